"""Two records: which values belong together, which block differs first, and by how much.

Names tell little: a block of one record belongs to that of the other which gave the same values,
then to that whose values are the nearest, among those of its sizes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.parity.catalogue import Stage, explain
from jax_transformer.parity.record import Record
from jax_transformer.parity.report import MARK, aligned, write_page
from jax_transformer.parity.values import Index, Rule, usual_size

HEADINGS = ("a", "b", "paired by", "dtype", "error", "roundings", "")
JUMP = 100  # a difference so many times larger than all before it does not come from them
LIKE = 0.5  # values that are further apart, each divided by its largest one, are not alike
PairedBy = Literal["name", "value", "likeness", "nothing"]


class Pair(NamedTuple):
    """A block of b and the block of a that it belongs to.

    Attributes:
        a: The name of a's block; None where only b has such a block.
        b: The name of b's block; None where only a has such a block.
        paired: By what they belong together.
        error: max|a - b| / max|b| of their first outputs; None of a block alone. Values that are
            small beside the usual ones of the record are measured by a thousandth of those.
        epsilon: The precision of the coarser one of both dtypes.
        form: How one output is arranged in the other, for example "axes (1, 0, 2)".
        dtypes: Of the outputs, a's before b's.
        shape: Of the output, b's if there is one.
    """

    a: str | None
    b: str | None
    paired: PairedBy
    error: float | None
    epsilon: float | None
    form: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """What messages call the pair."""
        names = dict.fromkeys(name for name in self[:2] if name is not None)
        return " = ".join(name or "the model" for name in names)

    @property
    def roundings(self) -> float | None:
        """The error in units of the precision."""
        return None if self.error is None else self.error / self.epsilon


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The blocks of two records, in the order in which b computed them; prints as a table.

    Attributes:
        blocks: Those of b with a's; those that only a has are at the end.
        first_differing: The innermost block that had the same inputs in both and gives another
            output; or the first value that differs or that only one program has, where no block
            was recorded. None if all values that the programs returned agree.
        explanations: Between which parts of the block it lies, and what explains it.
        notes: What differs earlier, but far less; and where the dtypes of both differ.
    """

    blocks: tuple[Pair, ...]
    first_differing: Pair | None
    explanations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the values that the programs returned agree."""
        return self.first_differing is None

    def write_page(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write one .html file with the remarks and the blocks."""
        rows = HEADINGS, *self._rows()
        write_page(path, self.remarks(), rows, agrees=self.agrees, overwrite=overwrite)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                *("-" if name is None else name or "(the model)" for name in pair[:2]),
                f"{pair.paired} {pair.form}".rstrip(),
                " ".join(dict.fromkeys(pair.dtypes)),
                *("" if x is None else f"{x:.1e}" for x in (pair.error, pair.roundings)),
                MARK * (pair is self.first_differing),
            )
            for pair in self.blocks
        ]

    def remarks(self) -> list[str]:
        """Return what is to be said beside the rows, the verdict last."""
        first = self.first_differing
        verdict = f"a differs from b, first in {first.name}" if first else "a agrees with b"
        verdict += f", by {first.error:.1e}" if first and first.error is not None else ""
        lines = [f"explanation: {text}" for text in self.explanations]
        return [*lines, *(f"note: {text}" for text in self.notes), verdict]

    def to_json(self) -> dict[str, Any]:
        """Return what programs read; docs/how_to/compare_two_models.md explains the keys."""
        first = self.first_differing
        return {
            "schema": 1,  # another number means other keys
            "agrees": self.agrees,
            "first_differing": first and first._asdict(),
            "explanations": self.explanations,
            "notes": self.notes,
            "blocks": [pair._asdict() for pair in self.blocks],
        }

    def __str__(self) -> str:
        return "\n".join([*aligned([HEADINGS, *self._rows()]), *self.remarks()])

    __repr__ = __str__  # in a notebook, too


def compare(a: Record, b: Record, *, bound: float | None = None) -> Comparison:
    """Return how what two programs computed of the same inputs differs, to be printed or read.

    Args:
        a: The program that is examined.
        b: The program that it must follow: errors are relative to its numbers.
        bound: How many times the precision of a block's dtype is no difference; None is 64, and
            8 of half precision.

    Raises:
        InputError: Nothing that the programs returned has the same size.
    """
    rule = Rule(usual_size(block.outputs[0] for block in b.blocks.values()), bound)
    found, notes = _Examined(a, b, rule), list[str]()
    paired = [pair for pair in found.pairs if pair.error is not None]
    if not any(found.mixed or not b.blocks[pair.b].kind for pair in paired):
        ours, theirs = ([*x.blocks.values()][-1].outputs[0].shape for x in (a, b))
        raise InputError(
            f"what a returned has other sizes than b's: {list(ours)} and {list(theirs)}"
        )
    first, error = found.first, found.error
    # What differs by little does not hide what differs by far more behind it.
    while JUMP * error < 1:
        later = _Examined(a, b, rule._replace(least=JUMP * error))
        if later.first is None:
            break
        right = [pair for pair in later.pairs if pair[later.seen] in later.model.right]
        if later.error > JUMP * max(error, *(pair.error or 0.0 for pair in right)):
            where = "; ".join(found.stage.where) or f"by {found.error:.1e}"
            notes = [f"{first.name} differs earlier, but far less: {where}"]
            first, found = later.first, later
        error = later.error
    other = [pair for pair in found.pairs if len({*pair.dtypes}) == 2]
    for first_other in other[:1]:
        ours, theirs = first_other.dtypes
        blocks = f"{len(other)} blocks have other dtypes, first {first_other.name}"
        notes.append(f"{blocks}: {ours} in a and {theirs} in b")
    explanations = (*found.stage.where, *explain(found.stage, found.rule)) if found.first else ()
    return Comparison(tuple(found.pairs), found.first, explanations, tuple(notes))


class _Side:
    """A record, and which of its values another one has too."""

    def __init__(self, record: Record, other: Record, rule: Rule) -> None:
        self.blocks, self.names = record.blocks, list(record.blocks)
        self.plain = not any(block.kind for block in record.blocks.values())  # a function's values
        self.outputs = Index((block.outputs[0] for block in record.blocks.values()), rule)
        theirs = other.blocks.values()
        self.theirs = Index((x for b in theirs for x in (*b.outputs, *b.inputs)), rule)
        # Of each block, those that it is a part of, the innermost first.
        self.around, ends = dict[str, list[str]](), dict[str, str]()
        # The blocks whose output the other record has, and those in such a block.
        self.right, self.used = set[str](), set[bytes]()
        for name in reversed(self.names):
            parts = name.partition("#")[0].split(".")
            outer = (".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1))
            self.around[name] = [ends[base] for base in outer if base in ends]
            ends[".".join(parts)] = name
            if self.knows(self.output(name)) or {*self.around[name]} & self.right:
                self.right.add(name)
                self.used |= {x.tobytes() for x in self.value_inputs(name)}

    def finds(self, x: np.ndarray) -> bool:
        """Return whether the other record has these values."""
        return any(True for _ in self.theirs.find(x))

    def knows(self, x: np.ndarray) -> bool:
        """Return whether a value is right: given, used by a right block, or in the other record."""
        return x.dtype.kind in "iub" or x.tobytes() in self.used or self.finds(x)

    def output(self, name: str) -> np.ndarray:
        return self.blocks[name].outputs[0]

    def value_inputs(self, name: str) -> list[np.ndarray]:
        """Return the inputs that carry values: those like the first float one, and no mask."""
        floats = [x for x in self.blocks[name].inputs if x.dtype.kind not in "iub"]
        shape = floats[0].shape if floats else ()
        return [x for x in floats if (x.ndim, x.shape[-1:]) == (len(shape), shape[-1:])]

    def inside(self, name: str, depth: int | None = None) -> list[str]:
        """Return the blocks in a block's call, in order; at depth 1 the outermost of them."""
        return [part for part in self.names if name in self.around[part][:depth]]


class _Examined:
    """Two records under a rule: which blocks belong together, the first that differs, and why.

    `model` is the side whose blocks are looked into: b, or a where only b is a plain function.
    """

    def __init__(self, a: Record, b: Record, rule: Rule) -> None:
        self.rule, self.sides = rule, (_Side(a, b, rule), _Side(b, a, rule))
        self.mixed = self.sides[0].plain != self.sides[1].plain
        self.seen = 0 if self.mixed and self.sides[1].plain else 1
        self.model, self.other = self.sides[self.seen], self.sides[1 - self.seen]
        self.pairs = self._paired()
        wrong = [pair for pair in self.pairs if self._differs(pair)]
        self.first = (self._first_suspect() or wrong[0]) if wrong else None
        self.error = np.inf  # of what differs first
        if self.first:
            self.stage = self._stage(self.first)
            errors = [rule.difference(x, self.stage.here).error for x in self.stage.there]
            self.error = min(errors, default=np.inf)
            if self.stage.where and self.error < LIKE:
                self.stage.where[-1] += f", by {self.error:.1e}"

    def _pair(self, a: str | None, b: str | None, paired: PairedBy) -> Pair:
        named = zip(self.sides, (a, b), strict=True)
        there = [side.output(name) for side, name in named if name is not None]
        error, epsilon, form = None, None, ""
        if len(there) == 2:
            error, epsilon, form = self.rule.difference(there[0], there[1])
        dtypes = tuple(x.dtype.name for x in there)
        return Pair(a, b, paired, error, epsilon, form, dtypes, there[-1].shape)

    def _kind(self, side: _Side, name: str) -> tuple[int, ...]:
        """Return what blocks that belong together share: sizes, and whether they have parts."""
        size, inside = side.output(name).size, side.inside(name)
        if self.mixed:  # a plain function has only values
            return (size,)
        own = side.blocks[name].weights.values()
        weights = [*own, *(x for part in inside for x in side.blocks[part].weights.values())]
        # Query, key and value are three parts, or one weight of the attention itself.
        has_parts = bool(inside) or any(map(_is_packed, own))
        sizes = {x.size // (3 if _is_packed(x) else 1) for x in weights}
        large = sorted(size for size in sizes if 4 * size > max(sizes))
        return size, bool(side.blocks[name].kind), has_parts, *large

    def _paired(self) -> list[Pair]:
        """Return a pair of each block, in b's order, then those that only a has."""
        a, b = self.sides
        pairs, taken = list[Pair](), (set[str](), set[str]())

        def join(one: str, name: str, paired: PairedBy) -> None:
            pairs.append(self._pair(one, name, paired))
            taken[0].add(one)
            taken[1].add(name)

        def choose(choices: list[str], name: str, paired: PairedBy) -> None:
            free = [one for one in choices if one not in taken[0]]
            if free and name not in taken[1]:
                join(name if name in free else free[0], name, paired)

        kinds = [{name: self._kind(side, name) for name in side.names} for side in self.sides]
        same = {x: [one for one in a.names if kinds[0][one] == kinds[1][x]] for x in b.names}
        equal = {x: [a.names[i] for i in a.outputs.find(b.output(x))] for x in b.names}
        for name in b.names:  # the same name, of values that the callers named
            if name in same[name] and not (b.blocks[name].kind or a.blocks[name].kind):
                join(name, name, "name")
        for name in b.names:
            choose([one for one in equal[name] if one in same[name]], name, "value")
        used = dict[str, bytes]()
        for names in self._alike(same, self.other.right if self.mixed else taken[1 - self.seen]):
            value, block = names[1 - self.seen], names[self.seen]
            output = self.model.output(block).tobytes()  # perhaps that of its last part too
            if block not in taken[self.seen] and used.setdefault(value, output) == output:
                join(names[0], names[1], "likeness")
        for name in b.names:  # of blocks that are cut otherwise
            choose(equal[name], name, "value")
        pairs += [self._pair(name, None, "nothing") for name in a.names if name not in taken[0]]
        pairs += [self._pair(None, name, "nothing") for name in b.names if name not in taken[1]]
        places = {name: place for place, name in enumerate(b.names)}
        return sorted(pairs, key=lambda pair: places.get(pair.b, len(places)))

    def _alike(self, same: Mapping[str, list[str]], known: set[str]) -> list[tuple[str, str]]:
        """Return names in a and b of values that differ: equal names first, then the nearest.

        Those that are not near come in order. A block is no choice for the value of a plain
        function that is twice as near to another one: the function did not name the block's.
        """
        model, found = self.model, []
        blocks = [name for name in model.names if name not in model.right]
        # A function seldom names what words are looked up: by a block without parts and floats.
        tables = {
            name
            for name in blocks
            if self.mixed and model.blocks[name].kind
            if not (model.value_inputs(name) or model.inside(name))
        }
        inner = [x for name in blocks for x in model.value_inputs(name) if not model.knows(x)]
        origins = {  # where the other program has the inputs of a block
            name: [next(self.other.outputs.find(x), 0) for x in model.value_inputs(name)]
            for name in blocks
        }
        for place, value in enumerate(self.other.names):
            x, scores = self.other.output(value), dict[tuple[str, str], float]()
            for block in blocks if value not in known else ():
                names = (value, block) if self.seen else (block, value)
                if names[0] in same[names[1]] and place >= max(origins[block], default=0):
                    scores[names] = self.rule.unlike(x, model.output(block))
            apart = [self.rule.unlike(x, y) for y in inner] if self.mixed else [np.inf]
            most = 2 * min([*apart, *scores.values()], default=0.0)
            for names, score in scores.items():
                limit = min(most / 2, LIKE) if names[self.seen] in tables else most
                if names[0] == names[1] or score <= limit:
                    found.append((names[0] != names[1], min(score, LIKE), names))
        return [names for *_, names in sorted(found, key=lambda one: one[:2])]

    def _differs(self, pair: Pair) -> bool:
        """Return whether a value that a caller named differs, or only one program has it."""
        named = [
            (side, name)
            for side, name in zip(self.sides, pair[:2], strict=True)
            if name is not None and not side.blocks[name].kind
            # A plain function returns its last value; the others are inside it.
            if not self.mixed or side is self.model or name == side.names[-1]
        ]
        if pair.error is None or self.mixed:
            return not all(side.finds(side.output(name)) for side, name in named)
        return bool(named) and not pair.error <= self.rule.limit(pair.epsilon)

    def _first_suspect(self) -> Pair | None:
        """Return the pair of a first block of which all inputs are right, but not the output.

        It is the first one of either side, by how far into its record it is. Beside a plain
        function, it is the first one whose mistake can be computed, also a part up to the first
        value that the function named; or else the first one that it named.
        """
        found = sorted(
            (side.names.index(name) / len(side.names), -position, name)
            for position, side in enumerate(self.sides)
            for name in side.names
            if side.blocks[name].kind and name not in side.right
            if all(map(side.knows, side.value_inputs(name)))
            if self.mixed or not self._is_hidden(position, name)
        )
        suspects = [self._of(-position, name) for _, position, name in found]
        for suspect in suspects if self.mixed else ():
            inside = self.model.inside(suspect[self.seen])
            parts = [self._of(self.seen, name) for name in inside if name not in self.model.right]
            named = [place for place, part in enumerate(parts) if part.error is not None]
            for pair in [*parts[: named[0] + 1 if named else None], suspect]:
                if any(explain(self._stage(pair), self.rule)):
                    return pair
        return next((one for one in suspects if not self.mixed or one.error is not None), None)

    def _is_hidden(self, position: int, name: str) -> bool:
        """Return whether a block is inside one whose partner has no parts to compare it with."""
        other = self.sides[1 - position]
        around = (self._of(position, outer) for outer in self.sides[position].around[name])
        return any(p.error is not None and not other.inside(p[1 - position]) for p in around)

    def _of(self, position: int, name: str) -> Pair:
        return next(pair for pair in self.pairs if pair[position] == name)

    def _stage(self, pair: Pair) -> Stage:
        """Return where in a pair the difference lies, and what is to be explained."""
        names = "ba" if self.seen else "ab"
        if pair[self.seen] is None:
            alone = self.other.output(pair[1 - self.seen])
            return Stage([f"only {names[1]} has this"], "", [], [], {}, alone, [])
        model, other, here = self.model, self.other, pair[self.seen]
        block, target, where = model.blocks[here], model.output(here), list[str]()
        if pair.a is None and not self.mixed:
            where.append("only b has this")
        elif not (self.mixed or all(map(other.knows, other.value_inputs(pair.a)))):
            where.append(f"what a gives {pair.a} is not what b gives {pair.b}")
        inputs, computed, before = model.value_inputs(here), list[np.ndarray](), "its inputs"
        for part in model.inside(here, 1):
            part_inputs = model.value_inputs(part)
            missing = [] if part in model.right else [x for x in part_inputs if not model.knows(x)]
            if missing and not (self.mixed and self._of(self.seen, part).error is None):
                target = missing[0]
                until = f"the end of {part}" if self.mixed else part  # perhaps it is not named
                where.append(
                    f"the difference arises in {names[0]} after {before} and before {until}"
                )
                break
            before = part if part in model.right else before
            inputs += part_inputs
            computed.append(model.output(part))
        masks = [x for x in block.inputs if not any(x is y for y in inputs)]
        values = {x.tobytes(): x for x in model.theirs.arrays if not other.knows(x)}
        there = [x for x in values.values() if x.size == target.size]
        if pair.a is not None and not self.mixed and target is model.output(here):
            there.append(other.output(pair.a))
        return Stage(where, names, [*inputs, *computed], masks, block.weights, target, there)


def _is_packed(weight: np.ndarray) -> bool:
    return weight.ndim == 2 and max(weight.shape) == 3 * min(weight.shape)
