"""The attentions, the feed-forward network and the norms of a layer, found by shapes and names."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from jax_transformer.convert.table import Shape
from jax_transformer.errors import InputError
from jax_transformer.porting.names import Unit, words

MOST_FREE = 12  # products of a layer whose names do not tell what belongs together
Kind = Literal["separate", "fused", "key_value", "shared", "feed_forward", "gated", "fused_gate"]

# Words that programs use for a projection, after they are split as `words` splits them.
ROLE_WORDS = {
    "query": {"q", "query", "queries", "wq", "qs", "toq", "wqs"},
    "key": {"k", "key", "keys", "wk", "ks", "tok", "wks"},
    "value": {"v", "value", "values", "val", "wv", "vs", "tov", "wvs"},
    "output": {"o", "out", "output", "wo", "fc", "dense", "proj", "final", "concat", "merge", "c"},
}
INNER_WORDS = {
    *("inner", "in", "up", "intermediate", "wi", "expand", "first", "lin1", "fc1", "hidden"),
}
OUTER_WORDS = {"outer", "out", "down", "output", "wo", "contract", "second", "lin2", "fc2", "back"}
GATE_WORDS = {"gate", "gated", "gating"}
CROSS_WORDS = {
    *("cross", "encdec", "enc", "encoder", "src", "source", "memory", "mem", "context"),
    *("inter", "multihead", "x", "ca", "ed", "ctx"),
}
SELF_WORDS = {"self", "slf", "masked", "causal", "tgt", "dec", "target", "sa", "mask"}
FEED_FORWARD_WORDS = {
    *("ff", "ffn", "feed", "forward", "mlp", "pos", "final", "pw", "pwff", "ffw", "last"),
    *("fc", "output", "linear"),
}
ATTENTION_WORDS = {"attn", "attention", "att", "mha", *SELF_WORDS}


Form = Callable[[Sequence[Unit]], "Group | None"]  # the group that some products form


@dataclasses.dataclass(frozen=True)
class Group:
    """The products of one attention or feed-forward network.

    Attributes:
        kind: "separate" has query, key, value and output; "fused" the three in one tensor and the
            output; "key_value" query, both in one tensor, and output; "shared" three products of
            the width of a head. "feed_forward" has inner and outer; "gated" a gate beside them;
            "fused_gate" gate and inner in one tensor.
        units: The products, in the order of `roles`.
        roles: The likely role of each: "query", "key", "value", "output", "inner", "gate",
            "outer", or several joined by "+".
        named: Whether the names say so.
    """

    kind: Kind
    units: tuple[Unit, ...]
    roles: tuple[str, ...]
    named: bool

    @property
    def pattern(self) -> tuple[str, ...]:
        """What groups of one making have in common: the kind and the names inside the group."""
        names = [unit.matrix.split(".") for unit in self.units]
        shared = 0
        while len({tuple(parts[: shared + 1]) for parts in names}) == 1:
            shared += 1
        return (self.kind, *(".".join(parts[shared:]) for parts in names))

    @property
    def is_attention(self) -> bool:
        """Whether it is an attention."""
        return self.kind in ("separate", "fused", "key_value", "shared")


def find_groups(units: Sequence[Unit], width: int) -> tuple[Group, ...]:
    """Return the attentions and the feed-forward network of a layer.

    Names are believed first, then the shapes alone.
    """
    network = _rectangular_network(units, width)
    first: tuple[Unit, ...] = ()
    # Without the network: it was the query and output of a wide attention.
    for named, known in itertools.product((True, False), (network, None) if network else (None,)):
        groups, rest = _find(units, width, known, named)
        networks = sum(not group.is_attention for group in groups)
        if not rest and networks == 1 and len(groups) in (2, 3):
            return tuple(groups)
        first = first or rest
    shown = ", ".join(f"{unit.matrix} {list(unit.shape)}" for unit in (first or units)[:6])
    raise InputError(
        f"{len(first or units)} products of a layer do not form one feed-forward network and one "
        f"or two attentions: {shown}"
    )


def _find(
    units: Sequence[Unit], width: int, network: Group | None, named: bool
) -> tuple[list[Group], tuple[Unit, ...]]:
    """Return the groups and the products that form none, given the feed-forward network."""

    def form(members: Sequence[Unit]) -> Group | None:
        group = classify(members, width, named)
        return group if group and (network is None or group.is_attention) else None

    known = network.units if network else ()
    groups, rest = _walk("", tuple(unit for unit in units if unit not in known), form)
    return [*groups, *([network] if network else [])], rest


def _rectangular_network(units: Sequence[Unit], width: int) -> Group | None:
    """Return the feed-forward network, where just one has the shapes (d_ff, d_model)."""
    shapes: dict[int, list[Unit]] = {}
    for unit in units:
        shape = matrix_shape(unit, width) or ()
        if len(shape) == 2 and width in shape and shape[0] != shape[1]:
            shapes.setdefault(_other(shape, width), []).append(unit)
    groups = [
        classify(members, width, named=False)
        for members in shapes.values()
        if len(members) in (2, 3)
    ]
    networks = [group for group in groups if group and not group.is_attention]
    return networks[0] if len(networks) == 1 else None


def _walk(before: str, units: tuple[Unit, ...], form: Form) -> tuple[list[Group], tuple[Unit, ...]]:
    """Return the groups under a prefix, innermost first, and the products that form none."""
    parts: dict[str, list[Unit]] = {}
    for unit in units:
        parts.setdefault(unit.matrix[len(before) :].partition(".")[0], []).append(unit)
    groups: list[Group] = []
    rest: tuple[Unit, ...] = ()
    for part, members in parts.items():
        inside = f"{before}{part}."
        if len(members) > 1 and all(unit.matrix.startswith(inside) for unit in members):
            found, left = _walk(inside, tuple(members), form)
            groups += found
            rest += left
        else:
            rest += tuple(members)
    if whole := form(rest):
        return [*groups, whole], ()
    split, rest = _split(rest, form) if len(rest) > 2 else ([], rest)
    return [*groups, *split], rest


def classify(units: Sequence[Unit], width: int, named: bool) -> Group | None:
    """Return the group that exactly these products form, or None.

    `named`: squares that are named as an attention's projections are no feed-forward network.
    """
    shapes = [matrix_shape(unit, width) for unit in units]
    if any(shape is None or (width not in shape and min(shape) > width) for shape in shapes):
        return None
    if len(units) == 2:
        return _classify_two(units, shapes, width, named)
    if len(units) == 3 and (found := _classify_key_value(units, shapes, width)):
        return found
    if len(units) == 3:
        return _classify_gated(units, shapes, named)
    if len(units) == 4:
        return _classify_four(units, shapes, width)
    return None


def _classify_two(
    units: Sequence[Unit], shapes: Sequence[Shape], width: int, named: bool
) -> Group | None:
    one, other = shapes
    if one == other[::-1] and one != other:
        return _feed_forward(units)
    for fused, plain in ((0, 1), (1, 0)):
        for times, kind, roles in (
            (3, "fused", ("query+key+value", "output")),
            (2, "fused_gate", ("gate+inner", "outer")),
        ):
            inner = _other(shapes[plain], width)
            if sorted(shapes[fused]) == sorted((times * inner, width)) and width in shapes[plain]:
                return Group(kind, (units[fused], units[plain]), roles, True)
    if one == other == (width, width) and not (named and _is_named_attention(units)):
        return _feed_forward(units)
    return None


def _classify_key_value(units: Sequence[Unit], shapes: Sequence[Shape], width: int) -> Group | None:
    """Return an attention whose key and value are one tensor."""
    for index, both in enumerate(units):
        others = [i for i in range(3) if i != index]
        one, other = (shapes[i] for i in others)
        if width not in one or one != other[::-1]:
            continue
        if sorted(shapes[index]) != sorted((2 * _other(one, width), width)):
            continue
        # The query has its axes in the order of the key and value.
        products = sorted(
            others, key=lambda i: shapes[i].index(width) != shapes[index].index(width)
        )
        query, output = (units[i] for i in products)
        if one == other:
            query, output = _by_words([query, output], ("query", "output"))
        named = _role(query) == "query" or _role(output) == "output" or one != other
        return Group("key_value", (query, both, output), ("query", "key+value", "output"), named)
    return None


def _is_named_attention(units: Sequence[Unit]) -> bool:
    return any(_role(unit) in ("query", "key", "value") for unit in units)


def _classify_gated(units: Sequence[Unit], shapes: Sequence[Shape], named: bool) -> Group | None:
    counts = Counter(shapes)
    if len(counts) == 2:
        pair = next(shape for shape, count in counts.items() if count == 2)
        (single,) = (i for i, shape in enumerate(shapes) if shape != pair)
        if shapes[single] != pair[::-1]:
            return None
        outer = units[single]
    elif len(counts) == 1 and not (named and _is_named_attention(units)):
        outer = next((u for u in units if set(words(u.matrix)) & OUTER_WORDS), units[-1])
    else:
        return None
    inner = [unit for unit in units if unit is not outer]
    gates = [unit for unit in inner if set(words(unit.matrix)) & GATE_WORDS]
    gate = gates[0] if len(gates) == 1 else inner[0]
    other = inner[1] if gate is inner[0] else inner[0]
    return Group("gated", (gate, other, outer), ("gate", "inner", "outer"), len(gates) == 1)


def _classify_four(units: Sequence[Unit], shapes: Sequence[Shape], width: int) -> Group | None:
    counts = Counter(shapes)
    roles = ("query", "key", "value", "output")
    if len(counts) == 1:
        if shapes[0] != (width, width):
            return None
        ordered = _by_words(units, roles)
        named = all(_role(unit) == role for unit, role in zip(ordered, roles, strict=True))
        return Group("separate", tuple(ordered), roles, named)
    if len(counts) != 2 or 3 not in counts.values():
        return None
    three = next(shape for shape, count in counts.items() if count == 3)
    (last,) = (i for i, shape in enumerate(shapes) if shape != three)
    ordered = _by_words([u for i, u in enumerate(units) if i != last], roles[:3])
    named = all(_role(unit) == role for unit, role in zip(ordered, roles, strict=False))
    if shapes[last] == three[::-1] and width in three:
        return Group("separate", (*ordered, units[last]), roles, named)
    if three[0] == three[1] and shapes[last] == (width, width) and width % three[0] == 0:
        return Group("shared", (*ordered, units[last]), roles, named)
    return None


def _feed_forward(units: Sequence[Unit]) -> Group:
    first, second = units
    named = bool(set(words(first.matrix)) & INNER_WORDS or set(words(second.matrix)) & OUTER_WORDS)
    if set(words(first.matrix)) & OUTER_WORDS and not set(words(second.matrix)) & OUTER_WORDS:
        first, second, named = second, first, True
    return Group("feed_forward", (first, second), ("inner", "outer"), named)


def _split(units: tuple[Unit, ...], form: Form) -> tuple[list[Group], tuple[Unit, ...]]:
    """Return the groups of products whose names have no common module.

    Products belong together whose names differ in their roles alone; the others, as their shapes
    allow.
    """
    alike: dict[tuple[str, ...], list[Unit]] = {}
    for unit in units:
        alike.setdefault(_stem(unit), []).append(unit)
    formed = {stem: form(members) for stem, members in alike.items()}
    groups = [group for group in formed.values() if group]
    left = tuple(unit for unit in units if not formed[_stem(unit)])
    if len(left) <= MOST_FREE and (found := _partition(left, form)) is not None:
        return [*groups, *found], ()
    return groups, left


def _partition(units: tuple[Unit, ...], form: Form) -> list[Group] | None:
    """Return groups that the products form together, neighbours first; None where none do."""
    if not units:
        return []
    first, *others = units
    for size in (4, 2, 3):
        for members in itertools.combinations(others, size - 1):
            if group := form((first, *members)):
                rest = tuple(unit for unit in others if unit not in members)
                if (found := _partition(rest, form)) is not None:
                    return [group, *found]
    return None


def matrix_shape(unit: Unit, width: int) -> Shape | None:
    """Return the shape of a product as a matrix; None where it has no such shape.

    Kernels of three axes have the heads as one of them: (d_model, heads, head_dim) or
    (heads, head_dim, d_model).
    """
    shape = unit.shape
    if len(shape) == 2:
        return shape
    if len(shape) == 3 and shape[0] == width:
        return (width, shape[1] * shape[2])
    if len(shape) == 3 and shape[2] == width:
        return (shape[0] * shape[1], width)
    return None


def inner_width(group: Group, roles: Sequence[str], width: int) -> int:
    """Return the width of all heads together, or d_ff."""
    if group.kind == "shared":
        return width
    index = next(i for i, role in enumerate(roles) if role in ("output", "outer"))
    return _other(matrix_shape(group.units[index], width), width)


def vote(unit: Unit, yes: Iterable[str], no: Iterable[str]) -> int:
    """Return how many words of a unit's name are in the first set, less those in the second."""
    found = words(unit.name)
    return sum(word in set(yes) for word in found) - sum(word in set(no) for word in found)


def _role(unit: Unit) -> str:
    """Return the attention's role that a name says, or ""."""
    for part in reversed(unit.matrix.split(".")):
        found = {
            role
            for role, known in ROLE_WORDS.items()
            if set(words(part)) & known or "".join(words(part)) in known
        }
        if len(found) > 1:
            found -= {"output"}
        if len(found) == 1:
            return found.pop()
    return ""


def _stem(unit: Unit) -> tuple[str, ...]:
    known = set().union(*ROLE_WORDS.values())
    return tuple(word for word in words(unit.matrix) if word not in known)


def _by_words(units: Sequence[Unit], roles: Sequence[str]) -> list[Unit]:
    """Return the units in the order of the roles that their names say, the others in between."""
    named = {_role(unit): unit for unit in reversed(units)}
    placed = {role: named[role] for role in roles if role in named}
    free = [unit for unit in units if unit not in placed.values()]
    return [placed[role] if role in placed else free.pop(0) for role in roles]


def _other(shape: Shape, width: int) -> int:
    return shape[1] if shape[0] == width else shape[0]
