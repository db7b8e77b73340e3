"""What would explain a difference: changes of a config or a layout that mend it.

One change at a time: that with which more places agree. Where several are wrong before the first of
them, none does; then the change that comes nearest there is taken on trial, and kept if the model
gets past that place with the next ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Join, Layout, Masks, Operation, Row, expand
from jax_transformer.errors import InputError
from jax_transformer.porting.hypothesis import Hypothesis, with_outside
from jax_transformer.porting.names import join_heads
from jax_transformer.porting.outside import Outside, best_number, words_at
from jax_transformer.porting.places import common_module
from jax_transformer.porting.questions import SOURCE_MASKS, VALUES, possible_heads
from jax_transformer.porting.record import EXACT, Record
from jax_transformer.porting.simulate import Fit, Tensors, simulate

MOST_CHANGES = 3  # a model that needs more is another model
CLEAR = 2.0  # a change explains a rounding error if it makes it so many times smaller
LAYER_PLACE = re.compile(r"(encoder|decoder)\.layers\.(\d+) of batch")
PROJECTIONS = ("query", "key", "value", "output")
BLOCKS = ("self_attention", "cross_attention", "feed_forward")
# The block that holds parts of a layer, as a pattern and in words, and the parts that may be
# taken for each other.
LAYER_PARTS = (
    (r"\w+_attention/", " of the attentions", PROJECTIONS),
    ("self_attention/", " of the self-attention", PROJECTIONS),
    ("cross_attention/", " of the cross-attention", PROJECTIONS),
    ("feed_forward/", " of the feed-forward network", ("inner", "outer", "gate")),
    ("", "", BLOCKS[:2]),
    ("", "", (*(f"{block}_residual/norm" for block in BLOCKS), "memory_norm")),
)
OUTSIDE_PARTS = (
    ("source_embedding", "target_embedding"),
    ("source_positions", "target_positions"),
    ("source_embedding_norm", "target_embedding_norm"),
    ("encoder/norm", "decoder/norm"),
)


class Change(NamedTuple):
    """A changed hypothesis, and the change in words: "activation='gelu', not 'relu'"."""

    text: str
    hypothesis: Hypothesis


class Explanation(NamedTuple):
    """What explains a difference, and what a record cannot tell."""

    sentences: tuple[str, ...]  # one for each change that brings the model nearer to the record
    error: float  # the largest one of the model with these changes
    undecided: tuple[str, ...]  # values of fields with which the model follows the record as well


def explain(
    tensors: Mapping[str, np.ndarray],
    config: TransformerConfig,
    layout: Layout,
    record: Record,
    masks: Masks,
) -> Explanation:
    """Return the changes with which a model follows a record, as far as it can."""
    tensors, joined = join_heads(tensors)
    rows = dict.fromkeys(  # one for each tensor, those of heads apart joined
        Row(joined.get(pair.foreign, pair.foreign), pair.paths, pair.operation, stack=pair.stack)
        for pair in expand(layout, config)
    )
    hypothesis = Hypothesis(config, tuple(rows), masks)
    wide, taps = Tensors(tensors), layer_modules(hypothesis.rows)

    def fit_of(changed: Hypothesis, before: Fit) -> Fit:
        """Return the fit; of one that does not improve on `before`, at its first difference."""
        try:
            if before.complete:
                return simulate(wide, changed, record, taps)
            there = simulate(wide, changed, record, taps, only=before.points[-1].name)
            if there.complete:
                return simulate(wide, changed, record, taps)
        except (RuntimeError, IndexError):  # torch: the changed tensors do not fit
            return before
        return there._replace(points=(*before.points[:-1], *there.points))

    sentences: list[str] = []
    nearer: list[str] = []  # on trial
    fit = simulate(wide, hypothesis, record, taps)
    proven, proven_fit = hypothesis, fit
    while fit.error > EXACT and len(sentences) + len(nearer) < MOST_CHANGES:
        # What is as large as rounding is no exchanged tensor and no other mask.
        changes = _field_changes(hypothesis, record)
        if not fit.complete:
            changes = itertools.chain(changes, _other_changes(hypothesis, fit))
        fits = [(fit_of(change.hypothesis, fit), change) for change in changes]
        if not fit.complete and max(found.score[0] for found, _ in fits) <= fit.score[0]:
            fits += _words(hypothesis, fit, record, fit_of)
        nearest, change = max(fits, key=lambda item: (item[0].score[0], -item[0].error))
        further = nearest.score[0] > fit.score[0]
        if not further and not fit.complete:
            nearest, change = max(fits, key=lambda item: item[0].score)
            if CLEAR * nearest.points[-1].distance >= fit.points[-1].distance:
                break
            hypothesis, fit = change.hypothesis, nearest
            nearer.append(f"{change.text}: the model comes nearer")
            continue
        if not further and CLEAR * nearest.error >= fit.error:
            break
        hypothesis, fit = proven, proven_fit = change.hypothesis, nearest
        agrees = f"agrees within {fit.error:.0e}" if fit.complete else "agrees further"
        sentences += [*nearer, f"{change.text}: the model {agrees}"]
        nearer = []
    hypothesis, fit = proven, proven_fit
    undecided = [
        change.text
        for change in (_field_changes(hypothesis, record) if fit.complete else ())
        if (other := fit_of(change.hypothesis, fit)).complete
        and other.error <= max(CLEAR * fit.error, EXACT)
    ]
    return Explanation(tuple(sentences), fit.error, tuple(undecided))


def layer_modules(rows: tuple[Row, ...]) -> dict[str, str]:
    """Return the name of the program's module by our name of a layer, as "encoder.layers.0"."""
    modules: dict[str, list[str]] = {}
    for row in rows:
        if match := re.match(r"(encoder|decoder)/layers_(\d+)/", row.paths[0]):
            name = f"{match[1]}.layers.{match[2]}"
            modules.setdefault(name, []).append(row.foreign.rpartition(".")[0])
    found = {layer: common_module(names) for layer, names in modules.items()}
    shared = Counter(found.values())  # of layers that are no modules, a stack
    return {layer: module for layer, module in found.items() if shared[module] == 1}


def _words(
    hypothesis: Hypothesis, fit: Fit, record: Record, fit_of: Callable[[Hypothesis, Fit], Fit]
) -> Iterator[tuple[Fit, Change]]:
    """Yield what no config has and the program does: that with which it agrees further."""
    place = len(fit.points) - 1

    def changed(word: str, number: float) -> Hypothesis:
        return with_outside(hypothesis, Outside(word, number))

    def distance(word: str, number: float) -> float:
        return fit_of(changed(word, number), fit).points[place].distance

    for word in words_at(fit.points, record):
        number = best_number(word, partial(distance, word))
        found = changed(word, number)
        if (other := fit_of(found, fit)).score[0] > fit.score[0]:
            outside, config = Outside(word, number), hypothesis.config
            fields = outside.fields.items()
            text = "".join(
                f"{name}={value!r}, not {getattr(config, name)!r}" for name, value in fields
            )
            yield other, Change(text or outside.sentence(config.d_model), found)
            if other.error <= EXACT:
                return


def _other_changes(hypothesis: Hypothesis, fit: Fit) -> Iterator[Change]:
    """Yield changes of masks and rows; those of one layer only where the first difference is."""
    match = LAYER_PLACE.match(fit.points[-1].name)
    layer = f"{match[1]}/layers_{match[2]}/" if match else None
    masks = hypothesis.masks
    others = [masks._replace(encoder=encoder, memory=memory) for encoder, memory in SOURCE_MASKS]
    for other in (*others, masks._replace(causal=not masks.causal)):
        if other != masks:
            text = f"the masks of the program: {other}"
            yield Change(text, dataclasses.replace(hypothesis, masks=other))
    yield from _exchanges(hypothesis, layer)
    yield from _row_changes(hypothesis, layer)


def _field_changes(hypothesis: Hypothesis, record: Record) -> Iterator[Change]:
    """Yield other values of the fields that change no shape."""
    config = hypothesis.config
    inner, values = config.num_heads * config.head_dim, dict(VALUES)
    if config.positions not in VALUES["positions"]:  # a parameter shows them
        del values["positions"]
    if config.positions != "relative":
        values["num_heads"] = possible_heads(inner)
    if any(batch.src.shape[1] != batch.tgt.shape[1] for batch in record.batches):
        del values["decoder_attention"]  # the other one needs equal lengths
    for name, choices in values.items():
        for value in choices:
            if value == getattr(config, name):
                continue
            fields = {name: value}
            if name == "num_heads" and config.d_kv is not None:
                fields["d_kv"] = inner // value
            try:
                changed = dataclasses.replace(config, **fields)
            except InputError:
                continue
            if changed.explicit() == config.explicit():  # None, and what it stands for
                continue
            text = f"{name}={value!r}, not {getattr(config, name)!r}"
            yield Change(text, dataclasses.replace(hypothesis, config=changed))


def _exchanges(hypothesis: Hypothesis, layer: str | None) -> Iterator[Change]:
    """Yield exchanges of two parts: in all layers, in those of a stack, and in one layer."""
    scopes = {r"\w+/layers_\d+/": ""}
    scopes |= {rf"{stack}/layers_\d+/": f" of the {stack}" for stack in ("encoder", "decoder")}
    scopes |= {layer: f" of {layer.rstrip('/')}"} if layer else {}
    exchanges = [
        (f"{scope}{block}", parts, f"{place}{where}")
        for scope, where in scopes.items()
        for block, place, parts in LAYER_PARTS
    ]
    for stack in ("encoder", "decoder"):
        count = getattr(hypothesis.config, f"num_{stack}_layers")
        exchanges.append((f"{stack}/", [f"layers_{i}" for i in range(count)], f" of the {stack}"))
    exchanges += [("", parts, "") for parts in OUTSIDE_PARTS]
    tried = {hypothesis.rows}
    paths = {path for row in hypothesis.rows for path in row.paths}
    for before, parts, where in exchanges:
        for pair in itertools.combinations(parts, 2):
            rows = tuple(_exchanged(row, before, *pair) for row in hypothesis.rows)
            if rows not in tried and {path for row in rows for path in row.paths} == paths:
                tried.add(rows)
                text = f"{pair[0]} and {pair[1]}{where} are exchanged"
                yield Change(text, dataclasses.replace(hypothesis, rows=rows))


def _exchanged(row: Row, before: str, one: str, other: str) -> Row:
    """Return the row with one name in the place of the other, behind what `before` matches."""
    names = {one: other, other: one}
    pattern = re.compile(f"^({before})({re.escape(one)}|{re.escape(other)})(?=/)")
    paths = tuple(pattern.sub(lambda match: match[1] + names[match[2]], path) for path in row.paths)
    return dataclasses.replace(row, paths=paths)


def _row_changes(hypothesis: Hypothesis, layer: str | None) -> Iterator[Change]:
    """Yield other orientations of kernels, and other stackings, in all layers or in one."""
    kinds: dict[str, Row] = {}
    for row in hypothesis.rows:
        path = row.paths[0]
        if path.endswith("/kernel"):
            kinds.setdefault(re.sub(r"layers_\d+", r"layers_\\d+", path), row)
            if layer and path.startswith(layer):
                kinds.setdefault(path, row)

    def rewritten(text: str, pattern: str, change: Callable[[Row], Row]) -> Change:
        """Return the change of the rows of the kernels, and of their biases."""
        rows = tuple(
            change(row) if re.fullmatch(pattern, row.paths[0].replace("/bias", "/kernel")) else row
            for row in hypothesis.rows
        )
        return Change(text, dataclasses.replace(hypothesis, rows=rows))

    for pattern, row in kinds.items():
        name = row.foreign
        if sum(bool(re.fullmatch(pattern, other.paths[0])) for other in hypothesis.rows) > 1:
            name = pattern.removesuffix("/kernel").replace(r"/layers_\d+/", "'s ").replace("/", " ")
        if len(row.paths) == 1:
            to = "(inputs, outputs)" if row.operation.transposed else "(outputs, inputs)"
            yield rewritten(f"{name} is {to}: its other orientation", pattern, _turned)
            continue
        for order in itertools.permutations(range(len(row.paths))):
            for stack in {"rows": ("rows", "heads")}.get(row.stack, (row.stack, "rows")):
                parts = ", ".join(row.paths[i].split("/")[-2] for i in order)
                by_head = " head by head" if stack == "heads" else ""
                change = partial(_restacked, order=order, stack=stack)
                yield rewritten(f"{name} holds {parts}{by_head}", pattern, change)


def _turned(row: Row) -> Row:
    """Return the row of a kernel in its other orientation, that of a bias as it is."""
    kernel = row.paths[0].endswith("/kernel")
    turned = Operation(row.operation.transposed != kernel, row.operation.shape)
    return dataclasses.replace(row, operation=turned)


def _restacked(row: Row, order: tuple[int, ...], stack: Join) -> Row:
    parameters = tuple(row.paths[index] for index in order)
    return dataclasses.replace(row, paths=parameters, stack=stack)
