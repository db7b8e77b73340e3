"""Whether two arrays hold the same values, in any arrangement, by the precision of their dtype."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

ROUNDINGS, FEW_ROUNDINGS = 64.0, 8.0  # the default bounds; the second one of half precision
HALF = 1e-4  # an epsilon above it is of half precision
SMALL = 1e-3  # of the usual size of a record's values; what is smaller is measured by that
APART = 1e100
MOST_AXES = 4  # of arrays whose axes are tried in every order


class Difference(NamedTuple):
    """See `Pair`; the error of other sizes is `APART`."""

    error: float
    epsilon: float
    form: str = ""


class Rule(NamedTuple):
    """What is no difference."""

    floor: float = 0.0  # of scales
    bound: float | None = None  # in roundings; None is the default
    least: float = 0.0  # an error that is none at any precision

    def limit(self, epsilon: float) -> float:
        """Return the largest error at a precision."""
        usual = FEW_ROUNDINGS if epsilon > HALF else ROUNDINGS
        return max(self.least, epsilon * (usual if self.bound is None else self.bound))

    def accepts(self, difference: Difference) -> bool:
        """Return whether this is rounding."""
        return bool(difference.error <= self.limit(difference.epsilon))

    def difference(self, a: np.ndarray, b: np.ndarray) -> Difference:
        """Return how far two arrays are apart in the arrangement in which they are nearest.

        It is that which they have, if they agree so. Else the axes of the one with more of them are
        tried in every order, and then joined: transposed, heads split, the sequence first.
        """
        nearest = Difference(APART, max(precision(a), precision(b)))
        if a.size != b.size:
            a, b = _once(a), _once(b)
        if a.size != b.size:
            return nearest
        scale = max(np.abs(_finite(b)).max(), self.floor) or 1.0
        wide = (np.asarray(x.astype(np.float64)).squeeze() for x in (b, a))
        fewer, more = sorted(wide, key=np.ndim)
        # Other orders of the axes only where they can help: they keep the largest number.
        apart = abs(_finite(more).max() - _finite(fewer).max()) / scale
        same = apart <= self.limit(nearest.epsilon)
        tried = None if (same or more.shape != fewer.shape) and more.ndim <= MOST_AXES else 1
        orders = itertools.permutations(range(more.ndim))
        for order in itertools.islice(orders, tried):
            apart = _farthest(more.transpose(order).reshape(fewer.shape), fewer) / scale
            form = "" if list(order) == sorted(order) else f"axes {order}"
            found = Difference(min(apart, APART), nearest.epsilon, form)
            nearest = min(nearest, found, key=lambda one: one.error)
            if self.accepts(nearest):
                break
        return nearest

    def unlike(self, a: np.ndarray, b: np.ndarray) -> float:
        """Return how far two arrays are apart if each is divided by its largest number."""
        a, b = (np.asarray(x / (np.abs(_finite(x)).max() or 1.0), float) for x in (a, b))
        if a.shape == b.shape:  # other arrangements take time
            return _farthest(a, b)
        return self._replace(floor=0.0).difference(a, b).error


class Index:
    """Finds the arrays that hold given values, by numbers first that no arrangement changes."""

    def __init__(self, arrays: Iterable[np.ndarray], rule: Rule) -> None:
        self.arrays, self.rule = list(arrays), rule
        self.summaries = [_summary(array) for array in self.arrays]

    def find(self, array: np.ndarray) -> Iterator[int]:
        """Yield the position of each array of these values."""
        summary = _summary(array)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = summary[1] * max(*np.abs(summary[2:4]), self.rule.floor)
            apart = [np.abs(summary - other)[2:].max() for other in self.summaries]
        for position, other in enumerate(self.summaries):
            limit = min(self.rule.limit(max(summary[0], other[0])), 1.0) * scale
            near = summary[1] == other[1] and apart[position] <= limit
            if near and self.rule.accepts(self.rule.difference(self.arrays[position], array)):
                yield position


def precision(array: np.ndarray) -> float:
    """Return the epsilon of an array's dtype; that of float64 for whole numbers."""
    is_float = array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
    return float(ml_dtypes.finfo(array.dtype if is_float else np.float64).eps)


def usual_size(arrays: Iterable[np.ndarray]) -> float:
    """Return the floor of scales: SMALL of the median of the largest numbers of arrays."""
    return SMALL * float(np.median([np.abs(_finite(array)).max() for array in arrays]))


def _farthest(a: np.ndarray, b: np.ndarray) -> float:
    """Return max|a - b|; what is not finite in both alike is equal."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.nan_to_num(np.where(same, 0.0, np.abs(a - b)), nan=np.inf).max())


def _once(array: np.ndarray) -> np.ndarray:
    """Return the first row of an array whose rows are equal, for example of positions."""
    return array[0] if array.ndim > 2 and (array == array[:1]).all() else array


def _finite(array: np.ndarray) -> np.ndarray:
    wide = array.astype(np.float64)
    return np.where(np.isfinite(wide), wide, 0.0)


def _summary(array: np.ndarray) -> np.ndarray:
    """Return the precision, the size, the extremes and the sum."""
    wide = _finite(_once(array))
    with np.errstate(over="ignore"):
        return np.array([precision(array), wide.size, wide.max(), wide.min(), wide.sum()])
