"""What explains a difference: usual mistakes of ports, computed from what a record holds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jax_transformer.parity.values import Index, Rule, precision

Candidates = Iterator[tuple[str, np.ndarray]]  # in words, and what would be computed so
EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-9, 1e-3, 0.0)
LOWER = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MOST_HEADS, LATEST = 16, 4  # the latest inputs among which query, key and value are looked for
MASKED = -1e30
KERNEL = re.compile("the (?:transposed )?kernel")
TURNED = {"the kernel": "the transposed kernel", "the transposed kernel": "the kernel"}
FACTORS = 1e-4  # a factor this near to 1 is none
MOST_WORDS = 3  # of what cannot be told apart


class Stage(NamedTuple):
    """A part of a computation that differs: what one program computed, the other one not."""

    where: list[str]  # in words
    names: str  # of the program that computed `here`, and of the other one
    inputs: Sequence[np.ndarray]  # of its block, and what parts computed before it: [..., D]
    masks: Sequence[np.ndarray]  # what else the block was given
    weights: Mapping[str, np.ndarray]  # of the block, without those of its parts
    here: np.ndarray
    there: Sequence[np.ndarray]  # the values of this size that only the other program has


@np.errstate(all="ignore")
def explain(stage: Stage, rule: Rule) -> list[str]:
    """Return what explains a difference between two programs.

    Each is computed: from the same inputs, one formula gives the value of `here`, another one that
    of `there`; or a change of the value of one program gives that of the other one.
    """
    coarser = max(map(precision, (stage.here, *stage.inputs)))
    rule = rule._replace(least=rule.limit(coarser))  # what is computed has its roundings
    targets = Index([stage.here, *stage.there], rule)
    stage, said = stage._replace(inputs=[_rows(x) for x in stage.inputs]), []
    for candidates in CATALOGUE if stage.there else ():
        found: dict[int, list[tuple[float, str]]] = {}
        for words, candidate in candidates(stage):
            for target in targets.find(candidate):
                error = rule.difference(targets.arrays[target], candidate).error
                found.setdefault(target, []).append((error, words))
        here, there = found.pop(0, []), min(found.values(), key=min, default=[])
        both = [_indistinct(each, stage.here) for each in (here, there)]
        if all("transposed" in words for words in both[0]):  # frameworks store kernels either way
            both = [[KERNEL.sub(lambda k: TURNED[k[0]], x) for x in each] for each in both]
        if all(both) and not {*both[0]} & {*both[1]}:
            texts = (f"{x} has {' or '.join(y)}" for x, y in zip(stage.names, both, strict=True))
            said.append(", and ".join(texts))
    for value in stage.there:
        for words, candidate, target in _changes(value, stage):
            if rule.accepts(rule.difference(target, candidate)):
                said.append(words.format(stage.names[0], stage.names[1]))
    return said


def _indistinct(found: Sequence[tuple[float, str]], value: np.ndarray) -> list[str]:
    """Return in words what the precision cannot tell apart, of all that gives a value."""
    most = 4 * max(precision(value), min(found, default=(0.0, ""))[0])
    words = dict.fromkeys(words for error, words in found if error <= most)
    return [*words][:MOST_WORDS] + ["another"] * (len(words) > MOST_WORDS)


def _norms(stage: Stage) -> Candidates:
    for x in stage.inputs[:1]:
        size = x.shape[-1]
        vectors = {key: w.astype(float) for key, w in stage.weights.items() if w.shape == (size,)}
        bias = sum(w for key, w in vectors.items() if "bias" in key)
        scale = math.prod(w for key, w in vectors.items() if "bias" not in key)
        norms = ("layer norm", x - x.mean(-1, keepdims=True)), ("root mean square norm", x)
        for (name, moved), epsilon in itertools.product(norms, EPSILONS):
            normed = moved / np.sqrt((moved**2).mean(-1, keepdims=True) + epsilon)
            yield f"a {name} of epsilon {epsilon:g}", normed * scale + bias
            if np.any(bias):
                yield f"a {name} of epsilon {epsilon:g} without bias", normed * scale


def _activations(stage: Stage) -> Candidates:
    same = [x for x in stage.inputs[-2:] if x.size == stage.here.size]
    for x, (name, function) in itertools.product(same, ACTIVATIONS.items()):
        yield name, function(x)
        yield from ((f"{name} times a gate", function(x) * gate) for gate in same if gate is not x)


def _products(stage: Stage) -> Candidates:
    values = [_rows(value) for value in (stage.here, *stage.there)]
    for x in stage.inputs[:1]:
        size = x.shape[-1]
        matrices = [
            w.astype(float) for w in stage.weights.values() if w.size > size and not w.size % size
        ]
        for matrix, transposed in itertools.product(matrices, ("", "transposed ")):
            kernel = matrix.reshape(-1, size).T if transposed else matrix.reshape(size, -1)
            words = f"a product with the {transposed}kernel"
            product = x @ kernel
            biases = [("", w.ravel()) for w in stage.weights.values() if w.size == kernel.shape[1]]
            for bias, added in [*biases, (" without bias", 0.0)]:
                yield f"{words}{bias}", product + added
                for value in (value for value in values if value.shape == product.shape):
                    factor = (product * (value - added)).sum() / (product**2).sum()
                    if abs(factor - 1) > FACTORS:
                        changed = product * factor + added
                        yield f"{words}{bias}, of inputs times {factor:.8g}", changed
                for name, dtype in LOWER.items():
                    low, cast = (y.astype(dtype).astype(float) for y in (x, kernel))
                    if (low != x).any():
                        yield f"{words}{bias}, of inputs cast to {name}", low @ kernel + added
                        yield f"{words}{bias}, of numbers cast to {name}", low @ cast + added


def _attentions(stage: Stage) -> Candidates:
    """Yield softmax(q k^T scale + mask) v of three latest values, heads split in several ways."""
    for q, k, v in itertools.permutations(stage.inputs[-LATEST:], 3):
        width = q.shape[-1]
        if k.shape != v.shape or k.shape[::2] != q.shape[::2] or q.size != stage.here.size:
            continue
        filled = np.nan_to_num(k), np.nan_to_num(v)  # rows that do not count
        masks = list(_masks(stage.masks, (len(q), q.shape[1], k.shape[1])))
        counts = [heads for heads in range(1, MOST_HEADS + 1) if width % heads == 0]
        for heads, interleaved in itertools.product(counts, (False, True)):
            way = f"{heads} heads" + ", interleaved" * interleaved
            shape = (-1, heads) if interleaved else (heads, -1)
            axes = (0, 3, 1, 2) if interleaved else (0, 2, 1, 3)
            split = [x.reshape((*x.shape[:2], *shape)).transpose(axes) for x in (q, *filled)]
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
    for mask in masks:
        has_rows = 1 < mask.ndim < 4 and len(mask) == rows and mask.shape != causal.shape
        while mask.ndim < 4:
            mask = mask[:, None] if has_rows else mask[None]
        if mask.shape[-1] != keys or mask.shape[2] not in (1, queries):
            continue
        if mask.dtype.kind not in "iub":  # added to the scores
            yield "the mask that it was given", np.maximum(mask.astype(float), MASKED)
        else:
            yield "the mask that it was given", np.where(mask, 0, MASKED)
            yield "the mask that it was given inverted", np.where(mask, MASKED, 0)


def _changes(value: np.ndarray, stage: Stage) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield what makes another program's value this one: in words, the result, what it must be."""
    a, b, here = _rows(value), _rows(stage.here), stage.here
    a = a if a.shape == b.shape else a.swapaxes(0, 1)  # the sequence first
    if a.shape != b.shape or a.size < 3:  # of fewer, anything is a multiple
        return
    factor = (a * b).sum() / (a * a).sum()
    yield f"{{0}} has {{1}}'s value times {factor:.8g}", a * factor, here
    if a[..., 0].size > 1:
        moved = a + (b - a).mean((0, 1))
        yield "{0} has the same vector more in every row: a bias", moved, here
    for x in (x for x in stage.inputs if x.shape == a.shape):
        factor = (x * (b - a)).sum() / (x * x).sum()
        yield f"{{0}} has {factor:.8g} times an input more", a + factor * x, here
    for name, dtype in LOWER.items():
        yield f"{{0}} has {{1}}'s value cast to {name}", a.astype(dtype).astype(float), here
        yield f"{{1}} has {{0}}'s value cast to {name}", b.astype(dtype).astype(float), value


def _rows(x: np.ndarray) -> np.ndarray:
    """Return an array of any axes as [B, L, D] in float64."""
    rows = x.shape[:2] if x.ndim > 2 else (1, *x.shape[:1])
    return x.astype(float).reshape((*rows, -1))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu by erf": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu by tanh": lambda x: x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "no activation": lambda x: x,
}
CATALOGUE = (_norms, _products, _activations, _attentions)
