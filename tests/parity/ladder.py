"""How two results are compared, within which bounds, and where the errors are kept.

float32 is judged by float64. Another processor adds in another order, so that no fixed number
bounds the difference of two right float32 programs; and that it is within the sum of both errors
against float64 says nothing more than that the float64 results agree, by the triangle inequality.
`check_float32` checks what holds on every processor:

1. The float64 results agree, within the bound of float64. A wrong formula fails here.
2. Each float32 error is at most what `TERMS` roundings of the inputs cost. A sum of n terms, in any
   order, is the exact sum of terms that were moved by less than n roundings each (Higham, Accuracy
   and Stability of Numerical Algorithms, section 4.2), and no sum of the models has more. What one
   rounding costs is measured in float64, by moving each weight and input: it is as large as the
   function is sensitive, however a program computes it. Products of rounded inputs (2^13 of these
   roundings in TensorFloat-32, 2^16 in bfloat16) and formulas that cancel fail here, also if both
   frameworks have them.
3. No float32 error is above sqrt(TERMS) times the other one and one rounding together: n roundings
   of either sign add up to sqrt(n), so the order of a sum explains no more. What one framework
   alone loses fails here.
"""

import copy
import math
from typing import NamedTuple

import jax
import numpy as np
import torch

from jax_transformer import TransformerConfig
from jax_transformer.convert.table import flatten

# float64, float32: the largest error that is still called identical. In float32 only where what is
# measured is far below it; elsewhere `check_float32` judges.
BOUNDS = {
    "block": (1e-14, 2e-6),
    "logits": (1e-14, 2e-6),
    "gradient": (1e-12, 1e-5),  # of the leaf's largest
    "adam": (1e-12, 1e-4),  # parameters after 20 steps
}
ROUNDING = 2.0**-24  # the largest relative error of one rounding to float32
TERMS = 64  # a feed-forward layer adds 53, the gradient of a weight 55 positions
DRAWS = 4  # of the directions in which weights and inputs are moved
# For two float32 results within one framework, for example of two batches: what TERMS roundings
# of the largest number come to, 3.8e-6 of it. A row or a mask that is wrong shows at 1e-3.
ROUNDED = TERMS * ROUNDING


def error(actual, expected):
    """Return max|a - b| / max(1, max|b|), or infinity where either is not finite."""
    actual, expected = np.asarray(actual), to_numpy(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return np.inf
    return np.abs(actual - expected).max() / max(1, np.abs(expected).max())


def score_error(actual, expected):
    """Return the error of scores, among them -inf where there is no hypothesis, in both."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    there = np.isfinite(expected)
    assert np.array_equal(actual[~there], expected[~there])
    return error(np.float64(actual[there]), np.float64(expected[there]))


def to_numpy(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def bound(kind, dtype):
    return BOUNDS[kind][("float64", "float32").index(str(dtype))]


class Errors(NamedTuple):
    """Errors of one leaf against float64, and what one rounding of the inputs costs it there."""

    ours: float
    theirs: float
    rounding: float

    @property
    def roundings(self):
        """The smaller error and the larger one, in roundings; one that is not a number is last."""
        return np.sort([one / self.rounding if one else 0.0 for one in (self.ours, self.theirs)])

    @property
    def ratio(self):
        """The larger error by the other one and one rounding together."""
        smaller, larger = self.roundings
        return larger / (smaller + 1)

    @property
    def explained(self):
        """Whether rounding explains both errors."""
        return self.roundings[1] <= TERMS and self.ratio <= math.sqrt(TERMS)


def check_float32(what, pair, ours, theirs, *inputs, kind="block"):
    """Check what both frameworks compute in float32, as the module says.

    Args:
        what: Begins the message.
        pair: Has `params` and `module`, both with the same weights in float32.
        ours: Computes an array or a tree of them from params and inputs, in float64 as well.
        theirs: Computes the same from a module and the inputs as tensors.
        inputs: Arrays, whose float32 numbers are moved, or None.
        kind: The bound of the float64 results.
    """
    module = copy.deepcopy(pair.module).double()  # before its gradients are counted
    found = ours(pair.params, *inputs), theirs(pair.module, *as_tensors(inputs))
    with jax.enable_x64(True):
        wide = widen((pair.params, *inputs))
        exact = ours(*wide), theirs(module, *as_tensors(wide[1:]))
        check_errors(what, found, exact, [ours(*numbers) for numbers in moved(wide)], kind)


def check_errors(what, found, exact, moved, kind):
    """Check two float32 results by the two of float64, and by one from each moved input."""
    found = [named(result, np.float32) for result in found]
    exact, other, *moved = (named(result, np.float64) for result in (*exact, *moved))
    errors, difference = {}, 0.0
    for name, leaf in exact.items():
        scale = beside(name)
        largest = np.abs(exact[scale]).max()
        unit = largest if kind == "gradient" else max(1, largest)
        apart, allowed = farthest(other[name], leaf) / unit, bound(kind, "float64")
        assert apart <= allowed, f"{what} {name} in float64: {apart:.1e} > {allowed:.0e}"
        rounding = max(ROUNDING * largest, *(farthest(one[scale], exact[scale]) for one in moved))
        errors[name] = Errors(*(farthest(one[name], leaf) for one in found), rounding)
        assert errors[name].explained, f"{what} {name}: more than rounding: {errors[name]}"
        difference = max(difference, farthest(found[0][name], found[1][name]) / unit)
    worst = max(errors, key=lambda name: errors[name].roundings[1])
    print(
        f"{what}: at most {errors[worst].roundings[1]:.1f} roundings {worst}, "
        f"ratio {max(one.ratio for one in errors.values()):.1f}, difference {difference:.1e}"
    )


def beside(name):
    """Return the leaf whose numbers a leaf's errors are measured by.

    A key's bias has no gradient in theory: it moves all scores of a query alike, and softmax does
    not notice. Its rounding noise is measured by the gradient of the key's kernel.
    """
    return name.replace("key/bias", "key/kernel")


def named(result, dtype):
    """Return an array or a tree as arrays of this type, by name."""
    leaves = flatten(result) if isinstance(result, dict) else {"": result}
    arrays = {name: to_numpy(leaf) for name, leaf in leaves.items()}
    assert {leaf.dtype for leaf in arrays.values()} == {np.dtype(dtype)}
    return arrays


def as_tensors(inputs):
    return [None if x is None else torch.from_numpy(np.array(x)) for x in inputs]


def change_floats(function, tree):
    return jax.tree.map(lambda x: function(x) if np.asarray(x).dtype.kind == "f" else x, tree)


def widen(tree):
    return change_floats(np.float64, tree)


def moved(tree):
    """Yield float64 numbers `DRAWS` times, each moved up or down by one rounding to float32."""
    for seed in range(DRAWS):
        random = np.random.default_rng(seed)

        def move(x, random=random):
            return x * (1 + ROUNDING * random.choice((-1, 1), x.shape))

        yield change_floats(move, tree)


def farthest(one, other):
    assert one.shape == other.shape, (one.shape, other.shape)
    return np.abs(np.float64(one) - np.float64(other)).max()


class Ladder:
    """Checks errors against their bounds and remembers the worst of each rung."""

    def __init__(self):
        self.worst = {}

    def check(self, pair, block, ours, theirs, *inputs, kind="block"):
        """Check what both sides compute from the pair's weights and these inputs.

        float64 by its bound; float32 as in `check_float32`, which explains the arguments.
        """
        actual = ours(pair.params, *inputs)
        expected = theirs(pair.module, *as_tensors(inputs))
        dtype = np.asarray(actual).dtype.name
        measured = error(actual, expected)
        rung = self.worst.setdefault((block, pair.preset), {})
        rung[dtype] = max(measured, rung.get(dtype, 0.0))
        if dtype == "float32":
            check_float32(f"{pair.preset} {block}", pair, ours, theirs, *inputs, kind=kind)
        else:
            allowed = bound(kind, dtype)
            assert measured <= allowed, f"{pair.preset} {block}: {measured:.1e} > {allowed:.0e}"

    def table(self):
        """Return the worst errors as Markdown: a row a preset, a column a block, both dtypes."""
        blocks = list(dict.fromkeys(block for block, _ in self.worst))
        lines = [f"| preset | {' | '.join(blocks)} |", f"|---|{'---|' * len(blocks)}"]
        for preset in TransformerConfig.presets():
            rungs = [self.worst.get((block, preset), {}) for block in blocks]
            if any(rungs):
                lines.append(f"| {preset} | {' | '.join(map(self._cell, rungs))} |")
        return "\n".join(lines)

    def _cell(self, rung):
        return " · ".join(f"{rung[dtype]:.0e}" for dtype in ("float64", "float32") if dtype in rung)
