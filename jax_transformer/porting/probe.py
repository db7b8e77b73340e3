"""What a slice of a run computes, told by executing it on chosen numbers.

A slice goes from some values to another one. Its weights are replaced: element i of its weights
becomes the number 4 i + 2, its code. A product of codes with unit vectors then shows which element
each number of a kernel is, in any arrangement: the remainder by 4 is 2 for one element, 3 for one
plus it, and 0 for a sum or a product of two. The program's own weights are not used, because zeros
and ties among them hide what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_transformer.porting.graph import Graph
from jax_transformer.porting.recording import Call, Leaf
from jax_transformer.porting.replay import Replay

CLOSE = 1e-8  # of numbers of a size near 1 in float64
SCALES = tuple(10.0**-power for power in range(1, 8))
POOL = 1_000_003  # random numbers, of which weights are drawn
MOST_UNITS = 4096  # inputs of a kernel that are read one by one
Elements = np.ndarray  # numbers of elements of the weights


class Point(NamedTuple):
    """Some numbers of a value."""

    key: int
    places: np.ndarray  # in the value as one line


class Affine(NamedTuple):
    """factor * (x @ kernel) + bias_factor * bias, of elements of weights."""

    kernel: Elements  # [inputs, outputs]
    bias: Elements | None  # [outputs]; None where nothing is added
    factor: float
    bias_factor: float


class Norm(NamedTuple):
    """A norm of the last axis."""

    kind: str  # of the config
    epsilon: float
    scale: Elements | None
    bias: Elements | None
    factor: float  # what it is multiplied by beside its scale
    call: Call  # its last operation


class Probe:
    """Executes slices of a run with other weights and inputs."""

    def __init__(self, replay: Replay) -> None:
        """Number the elements of all weights that have a fraction."""
        self.replay, self.run, self.graph = replay, replay.run, Graph(replay.run)
        self.leaves: dict[int, Leaf] = {}
        self.first: dict[int, int] = {}
        self.size = 0
        for leaf in self.run.leaves:
            if replay.known[leaf.key].is_floating_point():
                self.leaves[leaf.key], self.first[leaf.key] = leaf, self.size
                self.size += math.prod(leaf.shape)
        self.kind = np.int32 if self.size < 2**31 else np.int64
        self.random = np.random.default_rng(0)
        self.pool = self.random.uniform(1, 2, POOL)

    def weights(self, starts: Iterable[int], end: int) -> list[int]:
        """Return the keys of the weights that a slice reads."""
        return sorted(self.graph.before([end], starts) & self.leaves.keys())

    def codes(self, keys: Iterable[int]) -> dict[int, np.ndarray]:
        """Return the codes of weights, which are numbered anew: few weights have small codes."""
        found, count = {}, 0
        for key in keys:
            shape = self.leaves[key].shape
            size = math.prod(shape)
            found[key] = (4.0 * np.arange(count, count + size) + 2).reshape(shape)
            count += size
        return found

    def elements(self, numbers: np.ndarray, keys: Sequence[int]) -> Elements | None:
        """Return the elements of codes; None where a number is no code of one element."""
        whole = np.round(numbers)
        if not np.abs(numbers - whole).max(initial=0) < 1e-3 or np.any(whole % 4 != 2):
            return None
        places = (whole // 4).astype(np.int64)
        ends = np.cumsum([math.prod(self.leaves[key].shape) for key in keys], dtype=np.int64)
        if not len(ends) or places.min(initial=0) < 0 or places.max(initial=-1) >= ends[-1]:
            return None
        which = np.searchsorted(ends, places, "right")
        moved = np.array([self.first[key] for key in keys]) - np.concatenate([[0], ends[:-1]])
        return (places + moved[which]).astype(self.kind)

    def drawn(self, keys: Iterable[int]) -> dict[int, np.ndarray]:
        """Return random weights between 1 and 2, pieces of one long list of numbers."""
        return {
            key: np.resize(self.pool[self.random.integers(POOL // 2) :], self.leaves[key].shape)
            for key in keys
        }

    def same(self, keys: Iterable[int], number: float) -> dict[int, np.ndarray]:
        """Return weights that are all one number."""
        return {key: np.full(self.leaves[key].shape, number) for key in keys}

    def first_position(self, key: int, row: int = 0) -> Point:
        """Return the numbers of a stream [B, L, D] or [L, B, D] at the first position of a row."""
        shape, size = self.run.shapes[key], self.run.shapes[key][-1]
        rows_first = len(shape) < 3 or shape[0] == len(self.run.src)
        step = math.prod(shape[1:]) if rows_first else size
        return Point(key, row * step + np.arange(size))

    def output(
        self, starts: Sequence[Point], end: Point, weights: Mapping[int, np.ndarray], x: np.ndarray
    ) -> np.ndarray:
        """Return the numbers at `end` for a vector at `starts`, with zeros around it."""
        values, used = dict(weights), 0
        for key, places in starts:
            array = values[key] if used and key in values else np.zeros(self.run.shapes[key])
            array.flat[places] = x[used : used + len(places)]
            values[key] = array
            used += len(places)
        return self.replay.value(end.key, values).flat[end.places]

    def reached(self, start: Point, end: int) -> Point:
        """Return the numbers of a value that depend on those of another one."""
        drawn_weights = self.drawn(self.weights([start.key], end))
        everywhere = Point(end, np.arange(math.prod(self.run.shapes[end])))
        vectors = 0.1 * self.random.normal(size=(2, len(start.places)))
        zero = self.output([start], everywhere, drawn_weights, 0 * vectors[0])
        # Both signs: an activation may be flat on one side.
        signed = [*vectors, *-vectors]
        changed = [self.output([start], everywhere, drawn_weights, x) != zero for x in signed]
        return Point(end, np.flatnonzero(np.any(changed, 0)))

    def is_identity(self, start: int, end: int, counts: np.ndarray) -> bool:
        """Return whether a slice of a stream changes no number of a token.

        Args:
            counts: Which positions [B, L] hold a token; a program may set the others to 0.
        """
        if start == end:
            return True
        if math.prod(self.run.shapes[start]) != math.prod(self.run.shapes[end]):
            return False
        x = self.random.normal(size=self.run.shapes[start])
        y = self.replay.value(end, {start: x, **self.drawn(self.weights([start], end))})
        x, y = rows_of(x, counts), rows_of(y, counts)
        return x.shape == y.shape and bool(np.all(x == y))

    def is_affine(self, starts: Sequence[Point], end: Point) -> bool:
        """Return whether a slice is a matrix product and an addition, for any weights."""
        drawn_weights = self.drawn(self.weights([start.key for start in starts], end.key))
        x = self.random.normal(size=sum(len(start.places) for start in starts))
        zero, one, minus, three = (
            self.output(starts, end, drawn_weights, f * x) for f in (0, 1, -1, 3)
        )
        odd, even = three - zero - 3 * (one - zero), one + minus - 2 * zero
        largest = max(np.abs(odd).max(initial=0), np.abs(even).max(initial=0))
        return bool(largest <= CLOSE * np.abs(one - zero).max(initial=1))

    def affine(self, starts: Sequence[Point], end: Point) -> Affine | None:
        """Return the elements that an affine slice multiplies with and adds; None if it cannot.

        The elements of a kernel's rows follow each other in equal steps, which two unit vectors
        show, and a random vector confirms; else each unit vector is taken.
        """
        keys = self.weights([start.key for start in starts], end.key)
        size = sum(len(start.places) for start in starts)
        codes, ones = self.codes(keys), self.same(keys, 1.0)

        def product(weights: Mapping[int, np.ndarray], unit: int) -> np.ndarray:
            vector = np.zeros(size)
            vector[unit] = 1.0
            return self.output(starts, end, weights, vector)

        added, added_ones = (self.output(starts, end, w, np.zeros(size)) for w in (codes, ones))
        factors = product(ones, 0) - added_ones
        factor, bias_factor = (_common(numbers) for numbers in (factors, added_ones))
        if not factor or bias_factor is None:
            return None
        bias = self.elements(added / bias_factor, keys) if bias_factor else None
        if bias_factor and bias is None:
            return None

        def row(unit: int) -> Elements | None:
            return self.elements((product(codes, unit) - added) / factor, keys)

        first, second = row(0), row(min(1, size - 1))
        if first is None or second is None:
            return None
        kernel = first + np.arange(size, dtype=self.kind)[:, None] * (second - first)
        found = Affine(kernel, bias, factor, bias_factor or factor)
        if self._multiplies(starts, end, found, self.drawn(keys)):
            return found
        rows = [row(unit) for unit in range(size)] if size <= MOST_UNITS else [None]
        if any(each is None for each in rows):
            return None
        return found._replace(kernel=np.stack(rows))

    def _multiplies(
        self, starts: Sequence[Point], end: Point, affine: Affine, weights: dict[int, np.ndarray]
    ) -> bool:
        kernel = affine.kernel
        if kernel.min() < 0 or kernel.max() >= self.size:
            return False
        x = self.random.normal(size=len(kernel))
        numbers = np.full(kernel.shape, np.nan)  # of elements of other weights
        for key, array in weights.items():
            places = kernel - self.first[key]
            inside = (places >= 0) & (places < array.size)
            numbers[inside] = array.reshape(-1)[places[inside]]
        zero, one = (self.output(starts, end, weights, f * x) for f in (0, 1))
        expected = affine.factor * (x @ numbers)
        return bool(np.abs(one - zero - expected).max() <= CLOSE * np.abs(expected).max())

    def leaf_of(self, elements: Elements) -> Leaf:
        """Return the weight that the first of some elements is of."""
        keys = [key for key, begin in self.first.items() if begin <= elements.flat[0]]
        return self.leaves[keys[-1]]

    def shift(self, start: int, end: int) -> Elements | None:
        """Return the elements of a vector that a slice of a stream adds; None if it does more."""
        keys, at = self.weights([start], end), self.first_position(start)
        if not keys or math.prod(self.run.shapes[start]) != math.prod(self.run.shapes[end]):
            return None
        x = self.random.normal(size=len(at.places))
        return self.elements(
            self.output([at], Point(end, at.places), self.codes(keys), x) - x, keys
        )

    def norm(self, start: int, end: int, places: np.ndarray | None = None) -> Norm | None:
        """Return the norm of the last axis that a slice computes; None if it computes no norm.

        Each row of `start` gets the same vector.

        Args:
            places: Those of a row in `end`; None are the first ones.
        """
        keys, shape = self.weights([start], end), self.run.shapes[start]
        size = shape[-1]
        if size < 2 or (places is None and math.prod(shape) != math.prod(self.run.shapes[end])):
            return None
        places = np.arange(size) if places is None else places[:size]
        x = self.random.normal(size=size) + self.random.uniform(1, 2)

        def output(weights: dict[int, np.ndarray], scale: float) -> np.ndarray:
            """Return the odd and the even part of the output in x."""
            plus, minus = (
                self.replay.value(end, weights | {start: np.full(shape, row)}).flat[places]
                for row in (scale * x, -scale * x)
            )
            return np.stack([plus - minus, plus + minus]) / 2

        zeros, ones = self.same(keys, 0.0), self.same(keys, 1.0)
        without, odd = output(zeros, 1.0)[0], output(ones, 1.0)[0]
        from_one = bool(np.abs(without).max(initial=0) > CLOSE)  # times 1 + scale, or no scale
        codes, even = output(self.codes(keys), 1.0)
        step = odd - without
        scale = None
        if keys and np.abs(step).max() > CLOSE and np.abs(step).min() > 0:
            scale = self.elements((codes - without) / step, keys)
            if scale is None:
                return None
        elif not from_one:
            return None
        with_bias = np.abs(even).max() > 1e-3
        bias = self.elements(even, keys) if with_bias else None
        if with_bias and bias is None:
            return None
        found = _kind(x, lambda s: output(ones, s)[0] - output(zeros, s)[0] * (scale is not None))
        if found is None:
            return None
        kind, epsilon, factor = found
        if from_one and scale is not None:
            if kind != "rms_norm" or np.abs(step / without - 1).max() > CLOSE:
                return None
            kind = "zero_centered_rms_norm"
        call = self.graph.changing([start], [end])[-1]
        return Norm(kind, epsilon, scale, bias, factor, call)


def _kind(x: np.ndarray, normed: Callable[[float], np.ndarray]) -> tuple[str, float, float] | None:
    """Return the kind, the epsilon and the factor of a norm that is given s x for scales s.

    With v the variance or the mean square of x, d = sqrt(v) and e the epsilon, its numbers at s are
    rho = s sqrt(v + e) / sqrt(s² v + e) times those at 1, or rho = s (d + e) / (s d + e) where e is
    added to the deviation: both are solved for e.
    """
    rows = {s: normed(s) for s in (1.0, *SCALES)}
    column = int(np.abs(rows[1.0]).argmax())
    if not all(np.isfinite(row).all() for row in rows.values()) or not rows[1.0][column]:
        return None
    s, rho = min(
        ((s, rows[s][column] / rows[1.0][column]) for s in SCALES),
        key=lambda pair: abs(pair[1] - 0.6),
    )
    if not s * (1 + CLOSE) < rho < 1 - CLOSE:  # a product, or no epsilon
        return None
    found = []
    for kind in ("layer_norm", "unbiased_layer_norm", "std_norm", "biased_std_norm", "rms_norm"):
        moved = x if kind == "rms_norm" else x - x.mean()
        unbiased, outside = kind in ("unbiased_layer_norm", "std_norm"), kind.endswith("std_norm")
        v = float((moved**2).sum() / (len(x) - unbiased))
        e = (
            s * v**0.5 * (1 - rho) / (rho - s)
            if outside
            else (s**2 * v * (1 - rho**2) / (rho**2 - s**2))
        )
        e = float(f"{e:.6g}")
        roots = {t: t * v**0.5 + e if outside else (t**2 * v + e) ** 0.5 for t in rows}
        factors = np.stack([row * roots[t] / (t * moved) for t, row in rows.items()])
        factor = float(np.median(factors))
        if np.abs(factors / factor - 1).max() < 1e-5:
            found.append((kind, e, factor))
    return min(found, key=lambda one: abs(one[2] - 1), default=None)


def capped(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return c where y = c tanh(x / c); None where it is something else."""
    place = int(np.argsort(np.abs(x), axis=None)[x.size // 2])
    score, bounded = abs(float(x.flat[place])), abs(float(y.flat[place]))
    if not 0 < bounded < score * (1 - CLOSE):
        return None
    low, high = bounded, 1e6
    for _ in range(100):
        middle = (low * high) ** 0.5
        below = middle * math.tanh(score / middle) < bounded
        low, high = (middle, high) if below else (low, middle)
    found = float(f"{high:.7g}")
    return found if np.abs(found * np.tanh(x / found) - y).max() < 1e-5 * np.abs(y).max() else None


def _common(numbers: np.ndarray) -> float | None:
    """Return the number that all of these are, 0 where all are 0; None if they differ."""
    first = float(numbers.flat[0])
    return first if np.abs(numbers - first).max() <= CLOSE * abs(first) else None


def rows_of(array: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the rows [N, D] of a stream [B, L, D] or [L, B, D] that hold tokens."""
    if array.shape[:2] == counts.shape:
        return array[counts]
    return array.swapaxes(0, 1)[counts] if array.shape[1::-1] == counts.shape else array
