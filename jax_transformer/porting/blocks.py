"""The attentions, the feed-forward network and the norms of a layer, found by shapes and names."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from jax_transformer.convert.table import Shape
from jax_transformer.errors import InputError
from jax_transformer.porting.names import Unit, words

MOST_FREE = 12  # products of a layer whose names do not tell what belongs together
# The products of each kind of block; those joined by "+" are one tensor. "shared" has products of
# the width of one head, "grouped" has fewer heads of keys and values than of queries.
KINDS: dict[str, tuple[str, ...]] = {
    "separate": ("query", "key", "value", "output"),
    "grouped": ("query", "key", "value", "output"),
    "shared": ("query", "key", "value", "output"),
    "fused": ("query+key+value", "output"),
    "key_value": ("query", "key+value", "output"),
    "feed_forward": ("inner", "outer"),
    "gated": ("gate", "inner", "outer"),
    "fused_gate": ("gate+inner", "outer"),
}
# Words that programs use for a product, after they are split as `words` splits them.
ROLE_WORDS = {
    role: set(role_words.split())
    for role, role_words in {
        "query": "q query queries wq qs toq wqs",
        "key": "k key keys wk ks tok wks",
        "value": "v value values val wv vs tov wvs",
        "output": "o out output wo fc dense proj final concat merge c",
        "inner": "inner in up intermediate wi expand first lin1 fc1 hidden",
        "outer": "outer out down output wo contract second lin2 fc2 back",
        "gate": "gate gated gating",
    }.items()
}
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
        kind: A key of `KINDS`.
        units: The products.
        assignments: The roles that the products may have, the likeliest first.
        named: Whether names or shapes single out the first.
        inner: Width of all heads together, of one shared head, or d_ff.
        key_inner: Width of all heads of keys together.
    """

    kind: str
    units: tuple[Unit, ...]
    assignments: tuple[tuple[str, ...], ...]
    named: bool
    inner: int
    key_inner: int

    @property
    def roles(self) -> tuple[str, ...]:
        """The likely role of each product."""
        return self.assignments[0]

    @functools.cached_property
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
        return "output" in self.roles


def find_groups(units: Sequence[Unit], width: int) -> tuple[Group, ...]:
    """Return the attentions and the feed-forward network of a layer."""
    network = _rectangular_network(units, width)
    first: tuple[Unit, ...] = ()
    # Without the network: it was the query and output of a wide attention.
    for candidate in (network, None) if network else (None,):
        groups, unplaced = _find(units, width, candidate)
        networks = sum(not group.is_attention for group in groups)
        if not unplaced and networks == 1 and len(groups) in (2, 3):
            return tuple(groups)
        first = first or unplaced
    shown = ", ".join(f"{unit.matrix} {list(unit.shape)}" for unit in (first or units)[:6])
    raise InputError(
        f"{len(first or units)} products of a layer do not form one feed-forward network and one "
        f"or two attentions: {shown}"
    )


def _find(
    units: Sequence[Unit], width: int, network: Group | None
) -> tuple[list[Group], tuple[Unit, ...]]:
    """Return the groups and the products that form none, given the feed-forward network."""

    def form(members: Sequence[Unit]) -> Group | None:
        group = classify(members, width)
        return group if group and (network is None or group.is_attention) else None

    placed = network.units if network else ()
    groups, unplaced = _walk("", tuple(unit for unit in units if unit not in placed), form)
    return [*groups, *([network] if network else [])], unplaced


def _rectangular_network(units: Sequence[Unit], width: int) -> Group | None:
    """Return the feed-forward network, where just one has the shapes (d_ff, d_model)."""
    shapes: dict[int, list[Unit]] = {}
    for unit in units:
        shape = matrix_shape(unit, width) or ()
        if len(shape) == 2 and width in shape and shape[0] != shape[1]:
            shapes.setdefault(sum(shape) - width, []).append(unit)
    groups = [classify(members, width) for members in shapes.values() if len(members) in (2, 3)]
    networks = [group for group in groups if group and not group.is_attention]
    return networks[0] if len(networks) == 1 else None


def _walk(before: str, units: tuple[Unit, ...], form: Form) -> tuple[list[Group], tuple[Unit, ...]]:
    """Return the groups under a prefix, innermost first, and the products that form none."""
    parts: dict[str, list[Unit]] = {}
    for unit in units:
        parts.setdefault(unit.matrix[len(before) :].partition(".")[0], []).append(unit)
    groups: list[Group] = []
    unplaced: tuple[Unit, ...] = ()
    for part, members in parts.items():
        inside = f"{before}{part}."
        if len(members) > 1 and all(unit.matrix.startswith(inside) for unit in members):
            inner, left = _walk(inside, tuple(members), form)
            groups += inner
            unplaced += left
        else:
            unplaced += tuple(members)
    if whole := form(unplaced):
        return [*groups, whole], ()
    split, unplaced = _split(unplaced, form) if len(unplaced) > 2 else ([], unplaced)
    return [*groups, *split], unplaced


def classify(units: Sequence[Unit], width: int) -> Group | None:
    """Return the group that exactly these products form, or None."""
    shapes = [matrix_shape(unit, width) for unit in units]
    if not 2 <= len(units) <= 4 or None in shapes:
        return None
    lengths = dict.fromkeys(length for shape in shapes for length in shape)
    for kind, inner, keys in itertools.product(KINDS, lengths, lengths):
        roles = KINDS[kind]
        grouped = keys < min(inner, width) and inner % keys == 0
        if len(roles) != len(units) or (kind == "shared" and width % inner):
            continue
        if not (grouped if kind == "grouped" else keys == inner):
            continue
        orders = dict.fromkeys(itertools.permutations(roles))
        fitting = [
            order for order in orders if _fits(units, shapes, kind, order, width, (inner, keys))
        ]
        if fitting:
            likely = [_role(unit, roles) for unit in units]  # as their names say
            votes = {
                order: sum(a == b for a, b in zip(likely, order, strict=True)) for order in fitting
            }
            fitting.sort(key=lambda order: -votes[order])
            clear = len(fitting) == 1 or votes[fitting[0]] > votes[fitting[1]]
            return Group(kind, tuple(units), tuple(fitting), clear, inner, keys)
    return None


def _fits(
    units: Sequence[Unit],
    shapes: Sequence[Shape],
    kind: str,
    roles: Sequence[str],
    width: int,
    inner: tuple[int, int],
) -> bool:
    """Return whether products and their biases have the shapes of these roles."""
    orientations, biased = set(), set()
    for unit, shape, role in zip(units, shapes, roles, strict=True):
        expected = role_shape(kind, role, width, *inner)
        if shape not in (expected, expected[::-1]) or unit.bias_length not in (0, expected[0]):
            return False
        if expected[0] != expected[1]:
            orientations.add(shape == expected)
        if role not in ("output", "outer"):
            biased.add(unit.bias_length > 0)
    return len(orientations) <= 1 and len(biased) <= 1


def role_shape(kind: str, role: str, width: int, inner: int, key_inner: int) -> Shape:
    """Return the outputs and inputs of a product."""
    if kind == "shared":
        return (width, width) if role == "output" else (inner, inner)
    if role in ("output", "outer"):
        return (width, inner)
    outputs = key_inner if role in ("key", "value") else inner
    return (outputs * len(role.split("+")), width)


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
    if len(left) <= MOST_FREE and (parts := _partition(left, form)) is not None:
        return [*groups, *parts], ()
    return groups, left


def _partition(units: tuple[Unit, ...], form: Form) -> list[Group] | None:
    """Return groups that the products form together, neighbours first; None where none do."""
    if not units:
        return []
    first, *others = units
    for size in (4, 2, 3):
        for members in itertools.combinations(others, size - 1):
            if group := form((first, *members)):
                unplaced = tuple(unit for unit in others if unit not in members)
                if (parts := _partition(unplaced, form)) is not None:
                    return [group, *parts]
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


def vote(unit: Unit, yes: Iterable[str], no: Iterable[str]) -> int:
    """Return how many words of a unit's name are in the first set, less those in the second."""
    spoken = words(unit.name)
    return sum(word in set(yes) for word in spoken) - sum(word in set(no) for word in spoken)


def _role(unit: Unit, roles: Sequence[str]) -> str:
    """Return the role that a name says, of some, or ""."""
    for part in reversed(unit.matrix.split(".")):
        spoken = {*words(part), "".join(words(part))}
        matching = {role for role in roles if spoken & ROLE_WORDS.get(role, set())}
        matching = matching - {"output"} or matching
        if len(matching) == 1:
            return matching.pop()
    return ""


def _stem(unit: Unit) -> tuple[str, ...]:
    known = set().union(*(ROLE_WORDS[role] for role in KINDS["separate"]))
    return tuple(word for word in words(unit.matrix) if word not in known)
