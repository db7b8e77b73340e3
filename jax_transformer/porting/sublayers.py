"""What the attentions and the feed-forward networks of a run compute, and with which elements.

Letters in shapes: B rows, I queries, J keys, N = B times heads, H heads, K width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jax_transformer.model.functional import rotary_angles
from jax_transformer.porting.graph import Unread
from jax_transformer.porting.operations import PRODUCTS, SOFTMAX
from jax_transformer.porting.probe import CLOSE, Affine, Elements, Norm, Point, Probe, capped
from jax_transformer.porting.recording import Call

HIDDEN = -1e4  # a number below it that is added to a score hides the key
GRID = np.array([-3.0, -1.7, -0.6, -0.1, 0.0, 0.2, 0.9, 1.3, 2.5])
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


class Core(NamedTuple):
    """A product of queries and keys, and what becomes of its scores: keys of values."""

    query: int  # the operands [N, I, K]
    key: int  # and [N, K, J]
    product: int  # the scores [N, I, J]
    logits: int  # what a softmax is taken of
    weights: int  # what the values are multiplied by
    value: int  # [N, J, K]
    read: int  # the result [N, I, K]
    calls: tuple[Call, Call, Call]  # the product, the softmax, and the second product


class Rotary(NamedTuple):
    """Rotary positions."""

    theta: float
    scaling: float  # what positions are divided by
    columns: int  # that are rotated


class Attention(NamedTuple):
    """An attention as it was read."""

    cores: tuple[Core, ...]  # its products; several where each head has its own
    heads: list[list[tuple[int, int]]]  # the core and the number n of each, for each row
    query: Affine  # the projections
    key: Affine
    value: Affine
    output: Affine
    divisor: float  # of the scores
    softcap: float | None  # their bound
    rotary: Rotary | None
    norms: tuple[Norm, Norm] | None  # of queries and keys


class Network(NamedTuple):
    """A feed-forward network as it was read; `gate` is None without one."""

    inner: Affine
    gate: Affine | None
    outer: Affine
    activation: str


def affine_points(probe: Probe, start: Point, end: int) -> list[Point]:
    """Return the cuts of a slice up to which it is affine, from its start on."""
    found = [start]
    for cut in probe.graph.cuts(start.key, [end])[1:]:
        point = probe.reached(start, cut)
        if not probe.is_affine([start], point):
            break
        found.append(point)
    return found


def no_product(probe: Probe, start: Point, end: int, what: str) -> Unread:
    """Return the refusal of a slice by its operations behind its longest affine part."""
    calls = probe.graph.changing([affine_points(probe, start, end)[-1].key], [end])
    behind = [call for call in calls if call.name not in PRODUCTS]
    return Unread(f"{what} is more than a product", behind or calls)


def read_affine(probe: Probe, starts: Sequence[Point], end: Point, what: str) -> Affine:
    """Return the elements of an affine slice; raise `Unread` if it is none, or mixes weights."""
    if not len(end.places) or not probe.is_affine(starts, end):
        raise no_product(probe, starts[0], end.key, what)
    found = probe.affine(starts, end)
    if found is None:
        keys = [start.key for start in starts]
        names = [probe.leaves[key].names[0] for key in probe.weights(keys, end.key)]
        raise Unread(
            f"{what} is no product with one kernel, but of {', '.join(names[:4]) or 'no weights'}",
            probe.graph.changing(keys, [end.key]),
        )
    return found


def read_attention(
    probe: Probe, products: Sequence[Call], query_from: int, key_from: int, end: int
) -> tuple[Attention, int]:
    """Return an attention, and the value behind its last product.

    Args:
        products: Those of two values that depend on tokens.
        query_from: The stream that queries are made of; so `key_from`.
        end: What the attention adds to the stream.
    """
    cores = find_cores(probe, products, [query_from, key_from])
    rows = range(len(probe.run.src))
    heads = [_heads(probe, cores, query_from, row) for row in rows]
    query, query_norm = _projection(probe, cores, heads[0], "query", query_from)
    key, key_norm = _projection(probe, cores, heads[0], "key", key_from)
    value, _ = _projection(probe, cores, heads[0], "value", key_from)
    divisor, softcap = _scores(probe, cores[0])
    contexts = []
    for core, n in heads[0]:
        _, queries, width = _three(probe.run.shapes[cores[core].read])
        contexts.append(Point(cores[core].read, n * queries * width + np.arange(width)))
    output, last = _last_product(probe, contexts, end)
    if (query_norm is None) != (key_norm is None):
        raise Unread("queries or keys alone are normed", cores[0].calls[:1])
    width, value_width = (part.kernel.shape[1] // len(heads[0]) for part in (query, value))
    found = Attention(
        cores=cores,
        heads=heads,
        query=query,
        key=_grouped(key, width, cores[0]),
        value=_grouped(value, value_width, cores[0]),
        output=output,
        divisor=divisor / (query.factor * key.factor),
        softcap=softcap,
        rotary=_rotary(probe, cores[0], heads[0][0][1], query_from, key_from),
        norms=(query_norm, key_norm) if query_norm and key_norm else None,
    )
    return found, last


def scores_of(probe: Probe, products: Sequence[Call], starts: Sequence[int]) -> list[Call]:
    """Return the products of queries and keys: those that read no other product."""
    made = {call.outputs[0] for call in products}
    return [c for c in products if made.isdisjoint(probe.graph.before(c.inputs, starts))]


def find_cores(probe: Probe, products: Sequence[Call], starts: Sequence[int]) -> tuple[Core, ...]:
    """Return the pairs of products of an attention, with the softmax between."""
    graph, found = probe.graph, []
    scores = scores_of(probe, products, starts)
    for call in (call for call in products if call not in scores):
        inside = graph.before(call.inputs, starts)
        its_scores = [one for one in scores if one.outputs[0] in inside]
        if len(its_scores) != 1:
            raise Unread(
                f"values are read by {len(its_scores)} products of queries and keys", [call]
            )
        query, key = its_scores[0].operands
        product, (weights, value) = its_scores[0].outputs[0], call.operands
        if weights not in graph.after([product]):
            raise Unread("values are multiplied from the other side", [call])
        logits, softmax = _softmax(probe, product, weights)
        found.append(
            Core(
                query=query,
                key=key,
                product=product,
                logits=logits,
                weights=weights,
                value=value,
                read=call.outputs[0],
                calls=(its_scores[0], softmax, call),
            )
        )
    if not found:
        raise Unread("a product of two values is read by no other one", products)
    return tuple(found)


def _softmax(probe: Probe, scores: int, weights: int) -> tuple[int, Call]:
    """Return the value that a softmax is taken of, and its call."""
    inside = probe.graph.between([scores], [weights])
    for call in probe.graph.calls([scores], [weights]):
        if call.name in SOFTMAX:
            return call.inputs[0], call
        if call.name in ("exp", "exp_"):
            before = probe.run.producer[call.inputs[0]]
            less = before.name in ("sub", "sub_") and {*before.inputs} <= inside  # the largest
            return (before if less else call).inputs[0], call
    raise Unread(
        "there is no softmax between the scores and the values",
        probe.graph.changing([scores], [weights]),
    )


def _three(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an operand of a batched product."""
    return (1,) * (3 - len(shape)) + tuple(shape)


def _heads(probe: Probe, cores: Sequence[Core], start: int, row: int) -> list[tuple[int, int]]:
    """Return the core and the number n of each head of a row of the batch, in order."""
    found = []
    for number, core in enumerate(cores):
        places = probe.reached(probe.first_position(start, row), core.query).places
        n, i, _ = np.unravel_index(places, _three(probe.run.shapes[core.query]))
        if np.any(i != 0) or not len(n):
            views = [c for c in probe.graph.calls([start], [core.query]) if "view" in c.name]
            raise Unread("the heads are split without a transpose", views[-1:])
        found += [(number, int(each)) for each in np.unique(n)]
    return found


def _projection(
    probe: Probe, cores: Sequence[Core], heads: Sequence[tuple[int, int]], name: str, start: int
) -> tuple[Affine, Norm | None]:
    """Return the elements of the queries, keys or values of all heads, and their norm."""
    projections, norm = [], None
    begin = probe.first_position(start)
    for number, core in enumerate(cores):
        key = getattr(core, name)
        end = probe.reached(begin, key)
        n, *axes = np.unravel_index(end.places, _three(probe.run.shapes[key]))
        if np.any(axes[name == "key"] != 0) or [*np.unique(n)] != [
            each for core_of_head, each in heads if core_of_head == number
        ]:
            raise Unread(f"the {name} of a position is read at other ones", core.calls[:1])
        if not probe.is_affine([begin], end):
            end, norm = _head_norm(probe, begin, end, name)
        projections.append(read_affine(probe, [begin], end, f"the {name} projection"))
    first = projections[0]
    same = all(
        part.factor == first.factor and (part.bias is None) == (first.bias is None)
        for part in projections
    )
    if not same or first.bias_factor != first.factor:
        raise Unread(f"heads or biases have other factors in the {name} projection", cores[0].calls)
    factor = first.factor * (norm.factor if norm else 1)
    return Affine(
        kernel=np.concatenate([part.kernel for part in projections], 1),
        bias=None if first.bias is None else np.concatenate([part.bias for part in projections]),
        factor=factor,
        bias_factor=factor,
    ), norm


def _head_norm(probe: Probe, begin: Point, end: Point, name: str) -> tuple[Point, Norm]:
    """Return the end of a projection whose heads are normed behind it, and the norm."""
    for cut in reversed(probe.graph.cuts(begin.key, [end.key])[1:]):
        point = probe.reached(begin, cut)
        fits = len(end.places) % probe.run.shapes[cut][-1] == 0
        if fits and probe.is_affine([begin], point):
            norm = probe.norm(cut, end.key, end.places)
            if norm is not None:
                return point, norm
    raise no_product(probe, begin, end.key, f"the {name} projection")


def _grouped(part: Affine, width: int, core: Core) -> Affine:
    """Return a projection with each head once that several heads of queries read."""
    heads = part.kernel.shape[1] // width
    kernels = part.kernel.reshape(len(part.kernel), heads, -1)
    new = [True] + [bool((a != b).any()) for a, b in pairwise(kernels.swapaxes(0, 1))]
    group = heads // sum(new)
    if new != [head % group == 0 for head in range(heads)]:
        raise Unread("heads share keys in groups that do not follow each other", core.calls[:1])
    bias = None if part.bias is None else part.bias.reshape(heads, -1)[::group].reshape(-1)
    return part._replace(kernel=kernels[:, ::group].reshape(len(part.kernel), -1), bias=bias)


def _scores(probe: Probe, core: Core) -> tuple[float, float | None]:
    """Return what products of queries and keys are divided by, and the bound of the scores.

    It also compares the weights with the softmax of the scores over the keys.
    """
    shapes = [probe.run.shapes[key] for key in (core.query, core.key)]
    query, key = (probe.random.normal(size=shape) / shape[-1] ** 0.5 for shape in shapes)
    table = probe.same(probe.weights([core.query, core.key], core.logits), 0.0)
    before = probe.graph.changing([core.query, core.key], [core.logits])
    unread = Unread("scores are changed before their softmax", before[1:] or core.calls[:1])

    def logits(scale: float) -> np.ndarray:
        values = table | {core.query: scale * query, core.key: key}
        return probe.replay.value(core.logits, values).reshape(-1)

    zero, product = logits(0.0), (query @ key).reshape(-1)
    seen = zero > HIDDEN
    if product.size != zero.size or not seen.any():
        raise unread
    zero, product = zero[seen], product[seen]
    ratio = float(np.median((logits(1e-5)[seen] - zero) / (1e-5 * product)))
    if not abs(ratio) > 1e-9:
        raise Unread("scores do not depend on queries and keys", unread.calls)
    large, softcap = logits(40.0)[seen] - zero, None
    expected = 40.0 * product * ratio
    if np.abs(large - expected).max() > CLOSE * np.abs(expected).max():
        softcap = capped(expected, large)
        if softcap is None:
            raise unread
    _check_softmax(probe, core)
    return 1 / ratio, softcap


def _check_softmax(probe: Probe, core: Core) -> None:
    """Raise `Unread` for a softmax that is not over the keys."""
    shape = probe.run.shapes[core.logits]
    scores = 2 * probe.random.normal(size=shape)
    weights = probe.replay.value(core.weights, {core.logits: scores}).reshape(-1)
    over = "none of its axes"
    for axis, name in list(enumerate(("keys", "the queries", "the heads"), 1))[: len(shape)]:
        powers = np.exp(scores - scores.max(-axis, keepdims=True))
        powers = (powers / powers.sum(-axis, keepdims=True)).reshape(-1)
        if weights.size == powers.size and np.abs(powers - weights).max() < CLOSE:
            over = name
            break
    if over != "keys":
        raise Unread(f"the softmax is over {over}, not over the keys", core.calls[1:2])


def _rotary(probe: Probe, core: Core, n: int, query_from: int, key_from: int) -> Rotary | None:
    """Return the rotary positions of queries and keys; None without them."""
    found = []
    for key, start in ((core.query, query_from), (core.key, key_from)):
        shape = probe.run.shapes[start]
        same = np.broadcast_to(probe.random.normal(size=shape[-1]), shape).copy()
        values = probe.drawn(probe.weights([start], key)) | {start: same}
        value = probe.replay.value(key, values).reshape(_three(probe.run.shapes[key]))[n]
        rows = value.T if key == core.key else value
        if np.abs(rows - rows[:1]).max() <= CLOSE * np.abs(rows).max():
            found.append(None)
            continue
        found.append(_rotation(rows))
        if found[-1] is None:
            calls = [c for c in probe.graph.changing([start], [key]) if c.name not in PRODUCTS]
            squares = rows[:, ::2] ** 2 + rows[:, 1::2] ** 2
            if np.abs(squares - squares[:1]).max() > CLOSE * squares.max():
                raise Unread("queries and keys depend on their position, by no rotation", calls)
            raise Unread(
                "rotary positions are of pairs of columns: put the even rows of each head's "
                "queries and keys before the odd ones, weights and biases",
                calls,
            )
    if found[0] != found[1]:
        raise Unread("queries and keys have other rotary positions", core.calls[:1])
    return found[0]


def _rotation(rows: np.ndarray) -> Rotary | None:
    """Return the rotation of equal rows [L, K] by their positions."""
    moving = np.abs(rows - rows[:1]).max(0) > CLOSE * np.abs(rows).max()
    columns = int(np.flatnonzero(moving).max()) + 1
    half = columns // 2
    pairs = rows[:, :half] + 1j * rows[:, half : 2 * half]
    angles = np.angle(pairs[1] / pairs[0])
    if columns % 2 or not np.all(angles > 0):
        return None
    theta = 1e4 if half == 1 else (angles[0] / angles[1]) ** half
    found = Rotary(float(f"{theta:.6g}"), float(f"{1 / angles[0]:.6g}"), columns)
    turned = pairs[0] * np.exp(1j * rotary_angles(len(rows), columns, found.theta, found.scaling))
    return found if np.abs(turned - pairs).max() <= 1e-4 * np.abs(rows).max() else None


def _last_product(probe: Probe, starts: Sequence[Point], end: int) -> tuple[Affine, int]:
    """Return the last product of a sublayer, and the value behind it: before a norm."""
    begin = max(start.key for start in starts)
    for cut in reversed([cut for cut in probe.graph.cuts(starts[0].key, [end]) if cut > begin]):
        if not probe.graph.products([starts[0].key], [cut]):
            break
        point = probe.first_position(cut)
        if len(probe.run.shapes[cut]) < 3:
            point = probe.reached(starts[0], cut)
        if probe.is_affine(starts, point):
            return read_affine(probe, starts, point, "the output projection"), cut
    raise no_product(probe, starts[0], end, "the output projection")


def read_network(probe: Probe, start: int, end: int) -> tuple[Network, int]:
    """Return a feed-forward network, and the value behind its last product."""
    inside = probe.graph.between([start], [end])
    products = probe.graph.products([start], [end])
    if len(products) < 2:
        raise Unread("one product alone is added to its input", products)
    begin = probe.first_position(start)
    hidden = next(key for key in products[-1].inputs if key in inside)
    outer, last = _last_product(probe, [probe.reached(begin, hidden)], end)
    try:
        inner, activation = _activated(probe, begin, hidden)
        return Network(inner, None, outer, activation), last
    except Unread as error:  # unless it has a gate
        cuts = probe.graph.cuts(start, [hidden])
        gates = [
            call
            for call in probe.graph.changing([start], [hidden])
            if call.name in ("mul", "mul_")
            and call.outputs[0] in cuts
            and len({*call.inputs} & inside) == 2
        ]
        if not gates:
            raise
        try:
            sides = [_activated(probe, begin, key) for key in gates[-1].inputs]
        except Unread:
            raise error from None
    sides.sort(key=lambda side: side[1] == "identity")
    (gate, activation), (inner, other) = sides
    if activation == "identity" or other != "identity":
        raise Unread("a gate has one activation", gates[-1:])
    return Network(inner, gate, outer, activation), last


def _activated(probe: Probe, begin: Point, end: int) -> tuple[Affine, str]:
    """Return the affine part of a chain, and the function that is applied behind it."""
    point, whole = affine_points(probe, begin, end)[-1], probe.reached(begin, end)
    size = len(point.places)
    if len(whole.places) == size:
        weights = probe.drawn(probe.weights([point.key], end))
        x = np.resize(GRID, size)
        y = probe.output([point], whole, weights, x)
        for name, function in ACTIVATIONS.items():
            if np.abs(function(x) - y).max() < CLOSE:
                return read_affine(probe, [begin], point, "the inner projection"), name
    known = ", ".join(name for name in ACTIVATIONS if name != "identity")
    calls = probe.graph.changing([point.key], [end])
    raise Unread(f"the activation is none of {known}", calls)


def visible(probe: Probe, attention: Attention) -> np.ndarray:
    """Return which keys queries read [B, H, I, J] where all products are 0."""
    found = []
    for core in attention.cores:
        zeros = probe.same(probe.weights([core.query, core.key], core.weights), 0.0)
        zeros |= {key: np.zeros(probe.run.shapes[key]) for key in (core.query, core.key)}
        weights = probe.replay.value(core.weights, zeros)
        found.append(weights.reshape(_three(weights.shape)) != 0)
    return np.stack([np.stack([found[core][n] for core, n in row]) for row in attention.heads])


def added_to_scores(probe: Probe, attention: Attention) -> tuple[Elements | None, np.ndarray]:
    """Return the elements that are added to the scores of the first row [H, I, J], and numbers.

    The element of a hidden key is -1. The numbers [H, I, J] are what no weight adds.
    """
    elements, numbers = [], []
    for core, n in ((attention.cores[c], n) for c, n in attention.heads[0]):
        keys = probe.weights([core.query, core.key], core.logits)
        zeros = {key: np.zeros(probe.run.shapes[key]) for key in (core.query, core.key)}
        plane = _three(probe.run.shapes[core.product])[1:]
        codes, without = (
            probe.replay.value(core.logits, weights | zeros).reshape(-1, *plane)[n]
            for weights in (probe.codes(keys), probe.same(keys, 0.0))
        )
        seen = without > HIDDEN
        numbers.append(np.where(seen, without, 0))
        if keys:
            found = probe.elements(np.where(seen, codes - without, 2.0), keys)
            if found is None:
                calls = probe.graph.changing([core.product], [core.logits])
                raise Unread("what is added to the scores is no table of weights", calls)
            elements.append(np.where(seen, found, -1))
    return np.stack(elements) if elements else None, np.stack(numbers)
