"""What explains a difference: usual mistakes of ports, computed from what a record holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_transformer.parity.values import Index, Rule

Candidates = Iterator[tuple[str, np.ndarray]]  # in words, and what would be computed so
EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-9, 1e-3, 0.0)
LOWER = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MOST_HEADS, LATEST = 16, 4  # the latest inputs among which query, key and value are looked for
MASKED = -1e30


class Stage(NamedTuple):
    """A part of a computation that differs: what b computed, and a, None where it has no such part.

    `inputs` [..., D] are what b's block was given and what its parts computed before the
    difference, which a has too; `masks` other arrays that the blocks were given; `weights` a's and
    b's.
    """

    inputs: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]
    weights: Sequence[Mapping[str, np.ndarray]]
    b: np.ndarray
    a: np.ndarray | None = None


def explain(stage: Stage, rule: Rule) -> Iterator[str]:
    """Yield what b has where its output is a candidate of the catalogue, and what a has."""
    targets = Index([x for x in (stage.b, stage.a) if x is not None], rule)
    stage = stage._replace(inputs=[_rows(x) for x in stage.inputs])
    for candidates in CATALOGUE:
        found: dict[int, str] = {}
        with np.errstate(all="ignore"):
            for words, candidate in candidates(stage):
                for target in targets.find(candidate):
                    found.setdefault(target, words)
        if 0 in found and found[0] != found.get(1):
            yield f"b has {found[0]}" + (f", and a has {found[1]}" if 1 in found else "")


def _norms(stage: Stage) -> Candidates:
    for x, weights in itertools.product(stage.inputs[:1], stage.weights):
        size = x.shape[-1]
        vectors = {key: w.astype(float) for key, w in weights.items() if w.shape == (size,)}
        bias = sum(w for key, w in vectors.items() if "bias" in key)
        scale = math.prod(w for key, w in vectors.items() if "bias" not in key)
        for (name, mean), epsilon in itertools.product(MEANS.items(), EPSILONS):
            moved = x - mean(x)
            normed = moved / np.sqrt((moved**2).mean(-1, keepdims=True) + epsilon)
            yield f"a {name} of epsilon {epsilon:g}", normed * scale + bias


def _activations(stage: Stage) -> Candidates:
    same = [x for x in stage.inputs[-2:] if x.size == stage.b.size]
    for x, (name, function) in itertools.product(same, ACTIVATIONS.items()):
        value = function(x)
        yield name, value
        yield from ((f"{name} times a gate", value * gate) for gate in same if gate is not x)


def _products(stage: Stage) -> Candidates:
    for x, weights in itertools.product(stage.inputs[:1], stage.weights[:1]):
        size = x.shape[-1]
        matrices = [
            w.astype(float) for w in weights.values() if w.size > size and not w.size % size
        ]
        for matrix, transposed in itertools.product(matrices, ("", "transposed ")):
            kernel = matrix.reshape(-1, size).T if transposed else matrix.reshape(size, -1)
            width = kernel.shape[1]
            biases = [("", w.ravel()) for w in weights.values() if w.size == width]
            for bias, added in [*biases, (" without bias", 0.0)]:
                product = x @ kernel + added
                yield f"a product with the {transposed}kernel{bias}", product
                for heads in _head_counts(width):
                    order = np.arange(width).reshape(heads, -1).T.ravel()
                    for columns in (order, np.argsort(order)):
                        yield f"a product with {heads} heads interleaved", product[..., columns]
                for name, dtype in LOWER.items():
                    low = x.astype(dtype).astype(float)
                    cast = kernel.astype(dtype).astype(float)
                    yield f"a product of inputs cast to {name}{bias}", low @ kernel + added
                    yield f"a product of numbers cast to {name}{bias}", low @ cast + added


def _attentions(stage: Stage) -> Candidates:
    """Yield softmax(q k^T scale + mask) v of three latest values, heads split in several ways."""
    for q, k, v in itertools.permutations(stage.inputs[-LATEST:], 3):
        width = q.shape[-1]
        if k.shape != v.shape or (len(q), width) != (len(k), k.shape[-1]) or q.size != stage.b.size:
            continue
        masks = list(_masks(stage.masks, (len(q), q.shape[1], k.shape[1])))
        for heads, interleaved in itertools.product(_head_counts(width), (False, True)):
            way = f"{heads} heads" + ", interleaved" * interleaved
            shape, axes = (
                ((-1, heads), (0, 3, 1, 2)) if interleaved else ((heads, -1), (0, 2, 1, 3))
            )
            split = [x.reshape(*x.shape[:2], *shape).transpose(axes) for x in (q, k, v)]
            scores = split[0] @ split[1].swapaxes(-1, -2)
            sizes = {"1/sqrt(head size)": width / heads, "1": 1, "1/sqrt(width)": width}
            for (scale, size), (mask, added) in itertools.product(sizes.items(), masks):
                if added.shape[1] not in (1, heads):
                    continue
                total = scores / size**0.5 + added
                weights = np.exp(total - total.max(-1, keepdims=True))
                context = weights / weights.sum(-1, keepdims=True) @ split[2]
                words = f"attention of {way}, scale {scale}, {mask}"
                yield words, context.transpose(np.argsort(axes)).reshape(q.shape)
                yield f"{words}, heads joined without a transpose", context.reshape(q.shape)


def _masks(masks: Sequence[np.ndarray], sizes: tuple[int, int, int]) -> Candidates:
    """Yield what is added to scores [B, H, queries, keys]."""
    rows, queries, keys = sizes
    causal = np.tril(np.ones((queries, keys), bool))
    yield "no mask", np.zeros((1, 1, 1, 1))
    yield "a causal mask", np.where(causal, 0, MASKED)[None, None]
    for given in masks:
        own = 1 < given.ndim < 4 and len(given) == rows and given.shape != causal.shape
        lead = (rows, *(1,) * (4 - given.ndim)) if own else (1,) * (4 - given.ndim)
        mask = given.reshape(*lead, *given.shape[own:]) if given.ndim < 4 else given
        if mask.shape[-1] != keys or mask.shape[2] not in (1, queries):
            continue
        if mask.dtype.kind not in "iub":  # added to the scores
            yield "the mask that it was given", np.maximum(mask.astype(float), MASKED)
        else:
            yield "the mask that it was given", np.where(mask, 0, MASKED)
            yield "the mask that it was given inverted", np.where(mask, MASKED, 0)


def _sums(stage: Stage) -> Candidates:
    """Yield what b would be if it were a with something more."""
    if stage.a is None:
        return
    a, b = _rows(stage.a), _rows(stage.b)
    a = a if a.shape == b.shape else a.swapaxes(0, 1)  # the sequence first
    if a.shape != b.shape:
        return
    yield f"a's output times {(a * b).sum() / (a * a).sum():.6g}", a * (a * b).sum() / (a * a).sum()
    yield "the same vector more in every row: a bias", a + (b - a).mean((0, 1))
    for x in stage.inputs:
        if x.shape == a.shape:
            factor = (x * (b - a)).sum() / (x * x).sum()
            yield f"{factor:.6g} times an input more", a + factor * x
    for name, dtype in LOWER.items():
        yield f"a's output cast to {name}", a.astype(dtype).astype(float)


def _rows(x: np.ndarray) -> np.ndarray:
    """Return an array of any axes as [B, L, D] in float64."""
    return x.astype(float).reshape(*(x.shape[:2] if x.ndim > 2 else (1, *x.shape[:1])), -1)


def _head_counts(width: int) -> list[int]:
    return [heads for heads in range(1, MOST_HEADS + 1) if width % heads == 0]


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu by erf": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu by tanh": lambda x: x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "no activation": lambda x: x,
}
MEANS: dict[str, Callable[[np.ndarray], Any]] = {
    "layer norm": lambda x: x.mean(-1, keepdims=True),
    "root mean square norm": lambda x: 0,
}
CATALOGUE = (_norms, _activations, _products, _attentions, _sums)
