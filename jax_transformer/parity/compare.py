"""Two records: which values belong together, which block differs first, and by how much.

Names tell little: a block of one record belongs to that of the other which gave the same values,
then to that which was given the same values, and else to the next one of its sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.parity.catalogue import Stage, explain
from jax_transformer.parity.record import Block, Record
from jax_transformer.parity.values import Index, Rule, usual_size

HEADINGS = ("a", "b", "paired by", "dtype", "roundings", "")
SCHEMA = 1  # of `to_json`; another number means other keys
PairedBy = Literal["name", "value", "inputs", "order", "nothing"]


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
        pairs: Of blocks; those that only a has are at the end.
        first_differing: The innermost block that had the same inputs in both and gives another
            output; or the first value that differs or that only one program has, where no block
            was recorded. None if all values that the programs returned agree.
        explanations: Between which parts of the block it lies, and what would explain it.
        notes: Where the dtypes of both differ.
    """

    pairs: tuple[Pair, ...]
    first_differing: Pair | None
    explanations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, ...]]:
        """Return of each pair the cells of `HEADINGS`."""
        return [
            (
                *("-" if name is None else name or "(the model)" for name in pair[:2]),
                f"{pair.paired} {pair.form}".rstrip(),
                " ".join(dict.fromkeys(pair.dtypes)),
                "" if pair.roundings is None else f"{pair.roundings:.1e}",
                "<-- first to differ" * (pair is self.first_differing),
            )
            for pair in self.pairs
        ]

    def remarks(self) -> list[str]:
        """Return what is to be said beside the rows, the verdict last."""
        first = self.first_differing
        verdict = f"a differs from b, first in {first.name}" if first else "a agrees with b"
        lines = [f"explanation: {text}" for text in self.explanations]
        return [*lines, *(f"note: {text}" for text in self.notes), verdict]

    def to_json(self) -> dict[str, Any]:
        """Return what programs read; docs/how_to/compare_two_models.md explains the keys."""
        first = self.first_differing
        return {
            "schema": SCHEMA,
            "agrees": first is None,
            "first_differing": first and first._asdict(),
            "explanations": self.explanations,
            "notes": self.notes,
            "blocks": [pair._asdict() for pair in self.pairs],
        }

    def __str__(self) -> str:
        rows = [HEADINGS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *self.remarks()])


def compare(a: Record, b: Record, *, bound: float | None = None) -> Comparison:
    """Compare what two programs computed of the same inputs.

    Args:
        a: The program that is examined.
        b: The program that it must follow: errors are relative to its numbers.
        bound: How many times the precision of a block's dtype is no difference; None is 64, and
            8 of half precision.

    Returns:
        A `Comparison`: print it, or read its `first_differing`, None if they agree.

    Raises:
        InputError: Nothing that the programs returned has the same size.
    """
    rule = Rule(usual_size(block.outputs[0] for block in b.blocks.values()), bound)
    sides = _Side(a, rule), _Side(b, rule)
    pairs = _paired(*sides, rule)
    if not any(pair.error is not None and not b.blocks[pair.b].kind for pair in pairs):
        shapes = (list(side.output(side.names[-1]).shape) for side in sides)
        raise InputError("what a returned has other sizes than b's: {} and {}".format(*shapes))
    wrong = [pair for pair in pairs if _differs(*sides, pair)]
    first = (_first_suspect(sides, pairs) or wrong[0]) if wrong else None
    explanations = tuple(_explanations(*sides, first, pairs)) if first else ()
    other = [pair for pair in pairs if len({*pair.dtypes}) == 2]
    notes = (
        "{} blocks have other dtypes, first {}: {} in a and {} in b".format(
            len(other), pair.name, *pair.dtypes
        )
        for pair in other[:1]
    )
    return Comparison(tuple(pairs), first, explanations, tuple(notes))


class _Side:
    """A record, and where its values are."""

    def __init__(self, record: Record, rule: Rule) -> None:
        self.blocks, self.names = record.blocks, list(record.blocks)
        blocks = record.blocks.values()
        self.outputs = Index((block.outputs[0] for block in blocks), rule)
        self.values = Index((x for b in blocks for x in (*b.outputs, *b.inputs)), rule)
        self.sizes = {name: self._sizes(name) for name in self.names}

    def _sizes(self, name: str) -> tuple[int, ...]:
        """Return what equal blocks share: whether they have parts, sizes of output and weights."""
        base, block = name.partition("#")[0], self.blocks[name]
        inside = [b for other, b in self.blocks.items() if f"{other}.".startswith(f"{base}.")]
        sizes = {weight.size for each in inside for weight in each.weights.values()}
        large = sorted(size for size in sizes if 4 * size > max(sizes))
        return bool(block.kind), len(inside) > 1, self.output(name).size, *large

    def output(self, name: str) -> np.ndarray:
        return self.blocks[name].outputs[0]

    def knows(self, array: np.ndarray) -> bool:
        """Return whether the record has these values; whole numbers are what both were given."""
        return array.dtype.kind in "iub" or any(True for _ in self.values.find(array))

    def around(self, name: str) -> Iterator[str]:
        """Yield the blocks that a block was called in, the innermost first."""
        parts = name.partition("#")[0].split(".")
        later = self.names[self.names.index(name) + 1 :]
        for end in range(len(parts) - 1, -1, -1):
            outer = ".".join(parts[:end])
            yield from [other for other in later if other.partition("#")[0] == outer][:1]

    def parts(self, name: str) -> list[str]:
        """Return the blocks directly in a block's call, in order."""
        before = self.names[: self.names.index(name)]
        return [other for other in before if next(self.around(other), None) == name]

    def suspects(self, other: _Side) -> Iterator[str]:
        """Yield the blocks with inputs that the other side knows and an output that it does not.

        A part of a block whose output is known is none: the programs cut that block otherwise.
        """
        known = {name: other.knows(self.output(name)) for name in self.names}
        for name, block in self.blocks.items():
            fine = not block.kind or any(known[outer] for outer in (name, *self.around(name)))
            if not fine and all(map(other.knows, _relevant(block))):
                yield name


def _relevant(block: Block) -> list[np.ndarray]:
    """Return the inputs that carry values: those like the first float one, and no mask."""
    floats = [array for array in block.inputs if array.dtype.kind not in "iub"]
    return [x for x in floats if (x.ndim, x.shape[-1:]) == (floats[0].ndim, floats[0].shape[-1:])]


def _paired(a: _Side, b: _Side, rule: Rule) -> list[Pair]:
    """Return a pair of each block, in b's order, then those that only a has."""
    free, found = dict.fromkeys(a.names), dict[str | None, Pair]()

    def pair(one: str | None, other: str | None, paired: PairedBy) -> Pair:
        there = [side.output(n) for side, n in ((a, one), (b, other)) if n is not None]
        apart = rule.difference(*there) if len(there) == 2 else (None, None, "")
        return Pair(one, other, paired, *apart, tuple(x.dtype.name for x in there), there[-1].shape)

    def add(choices: Iterable[str], name: str, paired: PairedBy) -> None:
        near = [one for one in choices if one in free] if name not in found else []
        if near:
            one = name if name in near else near[0]
            found[name] = pair(one, name, paired)
            del free[one]

    def same_inputs(one: str, other: str) -> bool:
        given = [*_relevant(a.blocks[one])[:1], *_relevant(b.blocks[other])[:1]]
        return len(given) == 2 and rule.accepts(rule.difference(*given))

    same_sizes = {
        name: [one for one in a.names if a.sizes[one] == b.sizes[name]] for name in b.names
    }
    for name, block in b.blocks.items():  # the same name, of values that the callers named
        add([one for one in same_sizes[name] if one == name and not block.kind], name, "name")
    for name in b.names:
        near = {a.names[index] for index in a.outputs.find(b.output(name))}
        add([one for one in same_sizes[name] if one in near], name, "value")
    for name in b.names:
        add((one for one in same_sizes[name] if same_inputs(one, name)), name, "inputs")
    for name in b.names:
        add(same_sizes[name], name, "order")
    for name in b.names:  # of blocks that are cut otherwise
        add([a.names[index] for index in a.outputs.find(b.output(name))], name, "value")
    alone = [pair(name, None, "nothing") for name in free]
    return [found.get(name) or pair(None, name, "nothing") for name in b.names] + alone


def _differs(a: _Side, b: _Side, pair: Pair) -> bool:
    """Return whether a value that a caller named differs, or only one program has it."""
    (side, other), name = ((a, b), pair.a) if pair.b is None else ((b, a), pair.b)
    if side.blocks[name].kind:
        return False
    if pair.error is None:
        return not any(True for _ in other.values.find(side.output(name)))
    return not pair.error <= b.outputs.rule.limit(pair.epsilon)


def _first_suspect(sides: tuple[_Side, _Side], pairs: list[Pair]) -> Pair | None:
    """Return the pair of the first suspect of either side, by how far into its record it is."""
    found = [
        (side.names.index(name) / len(side.names), -position, name)
        for position, (side, other) in enumerate((sides, sides[::-1]))
        for name in [next(side.suspects(other), None)]
        if name is not None
    ]
    _, position, name = min(found, default=(0, 0, None))
    return next((pair for pair in pairs if found and pair[-position] == name), None)


def _explanations(a: _Side, b: _Side, first: Pair, pairs: list[Pair]) -> Iterator[str]:
    """Yield where in a block the difference lies, and what would explain it."""
    if first.b is None:
        yield "only a has this block"
        return
    block = b.blocks[first.b]
    own = () if first.a is None else (a.blocks[first.a],)
    inputs, targets = _relevant(block), [one.outputs[0] for one in (block, *own)]
    masks = [x for one in (block, *own) for x in one.inputs if not any(x is y for y in inputs)]
    if not own:
        yield "only b has this block"
    elif not all(map(b.knows, _relevant(own[0]))):
        yield f"what a gives {first.a} is not what b gives {first.b}"
    before, computed = "its inputs", []
    for part in b.parts(first.b):
        missing = [x for x in _relevant(b.blocks[part]) if not a.knows(x)]
        if missing:
            yield f"the difference arises in b after {before} and before {part}"
            partner = next(pair.a for pair in pairs if pair.b == part)
            given = _relevant(a.blocks[partner]) if partner else []
            targets = [missing[0], *(x for x in given if x.size == missing[0].size)][:2]
            break
        inputs += _relevant(b.blocks[part])
        if a.knows(b.output(part)):
            before = part
            computed.append(b.output(part))
    weights = [one.weights for one in (*own, block)]
    yield from explain(Stage([*inputs, *computed], masks, weights, *targets), b.outputs.rule)
