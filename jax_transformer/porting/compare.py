"""The model in JAX beside what a user's own program computed: the error of every block.

Letters in shapes: B batch, S source length, T target length, L either, D d_model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import USUAL_MASKS, Layout, Masks
from jax_transformer.convert.transfer import to_tensors
from jax_transformer.errors import InputError
from jax_transformer.model.checks import check_inputs
from jax_transformer.porting.layouts import get_layout
from jax_transformer.porting.places import foreign_modules, run
from jax_transformer.porting.record import (
    EXACT,
    ROUGH,
    ROUNDED,
    Batch,
    OutputKind,
    Record,
    output_kind,
    record_module,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

SMALLEST_PROBABILITY = 1e-30
MOST_PAD_IDS = 8  # that are tried
DEFAULT_MASKS = str(USUAL_MASKS)


class BlockError(NamedTuple):
    """A block and how far the model is from the user's program there.

    Attributes:
        name: The block's name, as "encoder.layers.0.self_attention"; the last is "logits".
        foreign: The module of the user's program that was compared; "" for the logits.
        error: max|ours - theirs| / max(1, max|theirs|) where there are tokens. It includes the
            errors of earlier blocks.
    """

    name: str
    foreign: str
    error: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The blocks in the order in which they run, the logits last; prints as a table.

    Attributes:
        blocks: The error of each block.
        bound: The error above which a block differs.
        masks: The masks of the program where they are not those of the layout, as "not causal";
            "default" where they are.
        output: What the program returned: logits, or their log_softmax or softmax.
        explanations: Changes of the config or the layout that together would make it agree, or
            agree further; empty where none were found.
        notes: What the record cannot tell, because its numbers are rounded.
    """

    blocks: tuple[BlockError, ...]
    bound: float
    masks: str = DEFAULT_MASKS
    output: OutputKind = "logits"
    explanations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first_differing(self) -> BlockError | None:
        """The first block whose error exceeds the bound or is no number."""
        return next((block for block in self.blocks if not block.error <= self.bound), None)

    def table(self) -> list[str]:
        """Return the rows of the blocks."""
        width = max(len(block.name) for block in self.blocks)
        foreign_width = max(len(block.foreign) for block in self.blocks)
        return [
            f"{block.name:<{width}}  {block.foreign:<{foreign_width}}  {block.error:.1e}"
            + ("  <-- first to differ" if block is self.first_differing else "")
            for block in self.blocks
        ]

    def __str__(self) -> str:
        return "\n".join([*self.table(), *self.remarks()])

    def __repr__(self) -> str:
        """Return one line without the blocks: their number and the verdict."""
        first = f", first in {self.first_differing.name}" if self.first_differing else ""
        return f"Comparison({len(self.blocks)} blocks; {self.remarks()[-1]}{first})"

    def _repr_html_(self) -> str:
        """Return the table of the blocks for a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def remarks(self) -> list[str]:
        """Return what is to be said beside the rows, the verdict last."""
        lines = []
        if len(self.blocks) == 1:
            lines.append("note: only the logits: no recorded module has a name of the layout")
        if self.output != "logits":
            lines.append(f"note: the program returns {self.output} of the logits")
        if self.masks != DEFAULT_MASKS:
            told = "the config and the layout say"
            lines.append(f"note: the program masks otherwise than {told}: {self.masks}")
        lines += [f"explanation: {text}" for text in self.explanations]
        lines += [f"note: {text}" for text in self.notes]
        verdict = "differs from" if self.first_differing else "agrees with"
        return [*lines, f"{verdict} your program: the bound is {self.bound:.0e}"]


def compare(
    module: nn.Module,
    params: Mapping[str, Any],
    config: TransformerConfig,
    layout: str | Layout,
    src: Any,
    tgt: Any,
    *,
    call: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any] | None = None,
    explain: bool = True,
) -> Comparison:
    """Run a torch module and the model in JAX on the same inputs, and compare block by block.

    Args:
        module: Any torch module that computes logits of source and target ids.
        params: The module's parameters, as from `convert.from_torch`.
        config: The shape of the model.
        layout: The layout of the module's names.
        src: Source ids [B, S] of any framework or lists; `config.pad_id` is padding. Vectors
            [B, S, D] for a model without embeddings.
        tgt: Target ids [B, T], or vectors [B, T, D].
        call: Returns the logits of (module, src, tgt), for a module that is not called as
            module(src, tgt).
        explain: Whether what would explain a difference is looked for, which takes some seconds.

    Returns:
        A `Comparison`: print it, or read its `blocks` (each with `name`, `foreign` and `error`,
        which is max|ours - theirs| / max(1, max|theirs|)), `bound`, `first_differing` (None if
        all agree), `explanations` and `notes`.

    Raises:
        InputError: The layout does not fit the config, the parameters do not, or the inputs are
            none that the model can read.
    """
    layout = get_layout(layout)
    pad_id = None if config.token_embeddings == "none" else config.pad_id
    record = record_module(module, src, tgt, pad_id=pad_id, call=call)
    return compare_record(params, config, layout, record, explain=explain)


def compare_record(
    params: Mapping[str, Any],
    config: TransformerConfig,
    layout: Layout,
    record: Record,
    *,
    explain: bool = True,
) -> Comparison:
    """Compare the model in JAX with what a program computed of the same inputs.

    The model runs in the precision of the record: its bound is 1e-11 for float64, else 1e-5. If
    the logits do not agree with the masks of the layout, other usual masks are tried. Where the
    logits agree, a module whose output is another value than that of our block is left out.

    Args:
        explain: Whether a difference is explained, which takes some seconds, and needs torch. Then
            an error of at most 1e-5, in float64 5e-7, is a difference only if another config comes
            clearly nearer: a program of float64 may have a table that was rounded to float32.
    """
    _check_record(record, config)
    exact = record.is_exact
    kind = _output_kind(record, config)
    best: Comparison | None = None
    best_masks = layout.masks
    with jax.enable_x64(exact or jax.config.jax_enable_x64):
        dtype = np.float64 if exact else np.float32
        cast = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), dict(params))
        for pad_id, masks in _conventions(config, layout.masks, record):
            blocks = _block_errors(cast, config, layout, record, (masks, pad_id), kind)
            agrees = blocks[-1].error <= ROUGH
            if agrees:
                blocks = [block for block in blocks if block.error <= ROUGH]
            others = [f"pad_id={pad_id}"] if pad_id != config.pad_id else []
            if masks != layout.masks:
                others.append("the usual masks" if masks == USUAL_MASKS else str(masks))
            text = ", ".join(others) or DEFAULT_MASKS
            comparison = Comparison(tuple(blocks), ROUGH, text, kind)
            if best is None or _reach(comparison) > _reach(best):
                best, best_masks = comparison, masks
            if agrees:
                break
    if exact:
        best = dataclasses.replace(best, bound=EXACT)
    if not explain or (exact and best.first_differing is None):
        return best
    return _explained(best, params, config, layout, record, best_masks)


def _explained(
    comparison: Comparison,
    params: Mapping[str, Any],
    config: TransformerConfig,
    layout: Layout,
    record: Record,
    masks: Masks,
) -> Comparison:
    """Return the comparison with what would make the model agree, and what nothing tells.

    An error of the size of rounding to float32 is a difference if a change makes it clearly
    smaller. If none does, the program rounds: all of it, or a part, as a table of positions.
    """
    bound = ROUNDED if record.is_exact else ROUGH
    comparison = dataclasses.replace(comparison, bound=bound)
    if importlib.util.find_spec("torch") is None:
        if comparison.first_differing is None:
            notes = ("only with torch can it be told which fields this record leaves open",)
            return dataclasses.replace(comparison, notes=notes)
        text = "looked for by torch; install jax-transformer[torch]"
        return dataclasses.replace(comparison, explanations=(text,))
    from jax_transformer.porting import explain

    tensors, _ = to_tensors(params, config, layout, buffers=False)
    explanation = explain.explain(tensors, config, layout, record, masks)
    notes = tuple(f"the record cannot tell {text}" for text in explanation.undecided)
    if explanation.sentences:  # between the error of the model and that of the changed one
        largest = max(block.error for block in comparison.blocks)
        comparison = dataclasses.replace(
            comparison, bound=min(bound, (explanation.error * largest) ** 0.5)
        )
    return dataclasses.replace(comparison, explanations=explanation.sentences, notes=notes)


def _reach(comparison: Comparison) -> int:
    """Return how many blocks agree before the first that differs."""
    first = comparison.first_differing
    return comparison.blocks.index(first) if first else len(comparison.blocks)


def _check_record(record: Record, config: TransformerConfig) -> None:
    """Refuse inputs that the model cannot read, and outputs of another width."""
    vocabulary = config.output_projection != "none"
    width = config.tgt_vocab_size if vocabulary else config.d_model
    for batch in record.batches:
        check_inputs("src", batch.src, config.src_vocab_size, None, config)
        check_inputs("tgt", batch.tgt, config.tgt_vocab_size, None, config)
        if batch.output.shape[-1] != width:
            name = "tgt_vocab_size" if vocabulary else "d_model"
            raise InputError(
                f"the recorded output has {batch.output.shape[-1]} numbers a position, but "
                f"{name}={width}"
            )
        if not _seen(batch, record, config)["target"].any():
            raise InputError("a recorded batch has no row with a source and a target token")


def _conventions(
    config: TransformerConfig, told: Masks, record: Record
) -> Iterator[tuple[int, Masks]]:
    """Yield the masks that are told, then others that differ on this record: few changes first."""
    pad_ids = list(dict.fromkeys((config.pad_id, *({record.pad_id} - {None}))))
    choices = [
        (pad_id, Masks(*masks))
        for pad_id, *masks in itertools.product(pad_ids, *[(True, False)] * 4)
    ]
    choices += [(pad_id, told) for pad_id in _last_ids(record) if pad_id not in pad_ids]
    choices.sort(key=lambda c: (c[0] != config.pad_id) + sum(map(operator.ne, c[1], told)))
    tried = set()
    for pad_id, masks in choices:
        arrays = [batch.masks(masks, pad_id, config.bos_id) for batch in record.batches]
        key = b"".join(mask.tobytes() for batch in arrays for mask in batch)
        if key not in tried:
            tried.add(key)
            yield pad_id, masks


def _last_ids(record: Record) -> list[int]:
    """Return ids that end rows, of which one may be the program's padding: the lowest ones."""
    sides = [side for batch in record.batches for side in (batch.src, batch.tgt) if side.ndim == 2]
    return sorted({int(last) for side in sides for last in side[:, -1]})[:MOST_PAD_IDS]


def _seen(batch: Batch, record: Record, config: TransformerConfig) -> dict[str, np.ndarray]:
    """Return the positions of each side whose outputs are compared [B, L]."""
    pad_id = config.pad_id if record.pad_id is None else record.pad_id
    return dict(zip(("source", "target"), batch.compared(pad_id, config), strict=True))


def _block_errors(
    params: Any,
    config: TransformerConfig,
    layout: Layout,
    record: Record,
    convention: tuple[Masks, int],
    kind: OutputKind,
) -> list[BlockError]:
    """Return the errors of all blocks that were recorded, and of the logits."""
    runs = [
        run(params, config, batch.src, batch.tgt, batch.masks(*convention, config.bos_id))
        for batch in record.batches
    ]
    seen = [_seen(batch, record, config) for batch in record.batches]
    recorded = {name for batch in record.batches for name in batch.blocks}
    order = list(runs[0][1])
    blocks = []
    for place, modules in foreign_modules(layout, config, order, recorded).items():
        names = [place]
        if place.endswith("_positions"):  # which side a table serves is seen from its numbers
            names = ["source_positions", "target_positions"]
        for module in modules:
            errors = [
                BlockError(name, module, error)
                for name in names
                for error in _candidate_errors(name, module, record, runs, seen)
            ]
            if errors:
                blocks.append(min(errors, key=lambda block: block.error))
    blocks.sort(key=lambda block: order.index(block.name))
    logits = [
        _error(*_in_kind(ours, batch.output, kind), visible["target"])
        for batch, (ours, _), visible in zip(record.batches, runs, seen, strict=True)
    ]
    return [*blocks, BlockError("logits", "", float(np.max(logits)))]


def _candidate_errors(
    name: str,
    module: str,
    record: Record,
    runs: list[tuple[np.ndarray, dict[str, dict[str, list[np.ndarray]]]]],
    seen: list[dict[str, np.ndarray]],
) -> Iterator[float]:
    """Yield the error of each value at a place beside a foreign module; none where none fits."""
    recorded = [
        (batch.blocks[module], places[name], visible)
        for batch, (_, places), visible in zip(record.batches, runs, seen, strict=True)
        if module in batch.blocks
    ]
    for side, values in runs[0][1].get(name, {}).items():
        for index in range(len(values)):
            errors = []
            for block, places, visible in recorded:
                ours = places[side][index]
                theirs = _as_rows(block, ours.shape)
                errors.append(None if theirs is None else _error(ours, theirs, visible[side]))
            if None not in errors:
                yield float(np.nan_to_num(np.max(errors), nan=np.inf))


def _as_rows(output: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a foreign output as [B, L, D]; None where it has no such shape.

    Positions may be computed once for all rows.
    """
    output = output[None] if output.ndim == 2 else output
    if output.ndim != 3 or output.shape[1:] != shape[1:] or len(output) not in (1, shape[0]):
        return None
    return np.broadcast_to(output, shape)


def _error(ours: np.ndarray, theirs: np.ndarray, visible: np.ndarray) -> float:
    ours, theirs = (array[visible].astype(np.float64) for array in (ours, theirs))
    return np.max(np.abs(ours - theirs)) / max(1.0, np.max(np.abs(theirs)))


def _output_kind(record: Record, config: TransformerConfig) -> OutputKind:
    """Return what the program returned where there are tokens."""
    kinds = {
        output_kind(batch.output[_seen(batch, record, config)["target"]])
        for batch in record.batches
    }
    return kinds.pop() if len(kinds) == 1 else "logits"


def _in_kind(
    ours: np.ndarray, theirs: np.ndarray, kind: OutputKind
) -> tuple[np.ndarray, np.ndarray]:
    """Return our logits and the program's output as what can be compared."""
    if kind == "logits":
        return ours, theirs
    ours = ours.astype(np.float64)
    ours = ours - ours.max(-1, keepdims=True)
    ours = ours - np.log(np.exp(ours).sum(-1, keepdims=True))
    if kind == "softmax":  # probabilities are small: their logarithms show an error
        least = np.log(SMALLEST_PROBABILITY)
        theirs = np.log(np.maximum(theirs.astype(np.float64), SMALLEST_PROBABILITY))
        ours = np.maximum(ours, least)
    return ours, theirs
