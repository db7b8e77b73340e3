"""The model in JAX beside a program: beside the reference in torch, or beside a recording.

Letters in shapes: B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import from_torch, to_torch
from jax_transformer.convert.table import USUAL_MASKS, Layout, Masks
from jax_transformer.model.transformer import Transformer, decode, encode
from jax_transformer.parity import Block, Comparison, Record, compare, record
from jax_transformer.parity.record import unused_name
from jax_transformer.porting.embeddings import exact_numbers, find_look_up
from jax_transformer.porting.layouts import get_layout
from jax_transformer.porting.probe import Probe
from jax_transformer.porting.recording import Recording
from jax_transformer.porting.replay import Replay
from jax_transformer.porting.sublayers import Attention, visible
from jax_transformer.storage.weights.arrays import as_torch
from jax_transformer.text.batches import pad

EXACT = 1e-11  # an error of logits in float64
# What is compared compiles once and runs once: what only makes its code faster is left out.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ROWS, SOURCE_LENGTH, TARGET_LENGTH = 3, 13, 11
COMPARED = 2  # rows of a run
Errors = dict[tuple[int, int], float]  # of logits, by the lengths of source and target


def verify(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    layout: str | os.PathLike | Layout = "reference",
    *,
    strip_prefixes: tuple[str, ...] = (),
    seed: int = 0,
) -> Comparison:
    """Return the model in JAX (a) beside `torch_reference` (b), on one state_dict.

    Both are built from `config`: this tests the conversion, not whether the config describes the
    model from which the weights came. Weights narrower than float32 are converted to float32.

    Args:
        state_dict: Tensors of torch, numpy or jax by name, of the whole model.
        layout: Name, path or `Layout` of their names.
        strip_prefixes: Begins of names that are left away.
        seed: Of the random ids.

    Raises:
        ConversionError: Tensors are missing, unexpected or of another shape; names each.
    """
    import torch_reference

    params = from_torch(state_dict, config, get_layout(layout), strip_prefixes=strip_prefixes)
    widest = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
    params = jax.tree.map(lambda leaf: leaf.astype(widest), params)
    src, tgt = _random_inputs(config, np.random.default_rng(seed), widest)
    model = torch_reference.Transformer(config)
    model.load_state_dict(to_torch(params, config), strict=True, assign=True)
    theirs = record(model, lambda model: {"logits": model(as_torch(src), as_torch(tgt))})
    return compare(record_model(params, config, src, tgt), theirs)


def verify_recording(
    params: Mapping[str, Any],
    config: TransformerConfig,
    layout: Layout,
    recording: Recording,
    tensors: Mapping[str, np.ndarray],
) -> Comparison:
    """Return the model in JAX (a) beside a recorded program (b), block by block in float64.

    Both get fresh ids: without padding for the blocks, and with padding for the logits of the rows
    that count.

    Args:
        params: From the weights of the program, by `config` and `layout`.
        recording: As `read_recording` returns it.
        tensors: The weights of the program by name.

    Raises:
        InputError: The tensors are not those of the program, or it looks no ids up.
    """
    probe = Probe(Replay(recording.runs[0], tensors))
    src, tgt = _fresh(probe, config, np.random.default_rng(0), padded=False)
    looked_up = _looked_up(probe, config, tgt)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), dict(params))
    ours = record_model(params, config, src, looked_up, layout.masks).blocks
    theirs = record_program(probe, config, src, tgt).blocks
    padded = both_logits([probe], params, config, layout.masks)[0]
    returned = _in_kind(ours["logits"].outputs[0], theirs["logits"].outputs[0])
    records = [
        Record(
            {**blocks, "logits": Block("", (whole,)), "logits beside padding": Block("", (rows,))}
        )
        for blocks, whole, rows in zip((ours, theirs), returned, padded, strict=True)
    ]
    return compare(records[0], records[1])


def record_model(
    params: Any,
    config: TransformerConfig,
    src: np.ndarray,
    tgt: np.ndarray,
    masks: Masks = USUAL_MASKS,
) -> Record:
    """Return what the model in JAX computes of ids `src` and `tgt`, in the dtype of `params`.

    Args:
        config: That of the parameters.
        src: Source ids [B, S]; padding is `config.pad_id`.
        tgt: Target ids [B, T], which begin with BOS.
        masks: Which ones hide padding and later targets.

    Raises:
        InputError: Parameters are missing, or of another shape than those of `config`.
    """
    double = any(leaf.dtype == np.float64 for leaf in jax.tree.leaves(params))
    lengths = config.positions_of(src.shape[1]), tgt.shape[1]
    inside = [np.ones((len(src), length), bool) for length in lengths]
    run_masks = _masks(src, tgt, inside, config, masks)
    with jax.enable_x64(double), jax.default_matmul_precision("highest"):
        params = jax.tree.map(jnp.asarray, dict(params))
        found = record(
            Transformer(config),
            lambda model: {"logits": _run(params, config, src, tgt, run_masks)},
        )
    blocks = {}
    for name, block in found.blocks.items():
        if "_embedding" in name and config.embedding_scale == "sqrt_d_model":
            # A program may multiply behind its table.
            scaled = block.outputs[0] / block.outputs[0].shape[-1] ** 0.5
            block = block._replace(outputs=(*block.outputs, scaled))
        # Nothing is dropped; the dropout of an attention has its weights.
        if block.kind != "Dropout" or name.endswith("attention.dropout"):
            blocks[name] = block
    return Record(blocks)


def record_program(
    probe: Probe, config: TransformerConfig, src: np.ndarray, tgt: np.ndarray
) -> Record:
    """Return what the modules of a recorded program compute of ids [B, S] and [B, T]."""
    run, blocks = probe.run, dict[str, Block]()
    inputs_of_run = _inputs(probe, config, src, tgt)
    all_weights = {
        leaf.names[0]: probe.replay.known[key].numpy() for key, leaf in probe.leaves.items()
    }
    # Values between modules, for example embeddings times sqrt(d_model), are no output of a module.
    between = [k for call in run.calls for k in call.outputs if len(run.shapes.get(k, ())) == 3]
    keys = [key for part in run.parts for key in (*part.outputs, *part.inputs)]
    keys += [*between, run.output]
    values = dict(zip(keys, probe.replay.values(keys, inputs_of_run), strict=True))
    for part in run.parts:
        weights = {
            name.removeprefix(f"{part.path}."): array
            for name, array in all_weights.items()
            if part.path and name.rpartition(".")[0] == part.path
        }
        outputs, inputs = ([values[key] for key in ends] for ends in (part.outputs, part.inputs))
        if outputs and outputs[0].dtype.kind == "f":
            name = unused_name(part.path, blocks)
            blocks[name] = Block(part.kind, tuple(outputs), tuple(inputs), weights)
    whole = blocks.get("", Block("Module", (values[run.output],)))
    blocks[""] = whole._replace(inputs=tuple(values[key] for key in between))
    logits = _program_logits(probe, config, src, tgt)
    return Record(blocks | {"logits": Block("", (logits,))})


def compare_runs(
    probes: Sequence[Probe], params: Any, config: TransformerConfig, masks: Masks
) -> Errors:
    """Return the error of the logits of each run, see `both_logits`."""
    both = both_logits(probes, params, config, masks)
    return {
        probe.run.lengths: _error(ours, theirs)
        for probe, (ours, theirs) in zip(probes, both, strict=True)
    }


def both_logits(
    probes: Sequence[Probe], params: Any, config: TransformerConfig, masks: Masks
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the logits of the model in JAX and of each run, on fresh ids in float64: rows [N, V].

    Of two rows of each run the second one ends in padding; rows of padding do not count. Tables of
    sinusoids that the program holds are computed anew: they may be rounded. In JAX all runs are one
    batch, which compiles once: what is longer than a run is hidden.
    """
    random, runs = np.random.default_rng(1), []
    for probe in probes:
        src, tgt = _fresh(probe, config, random)
        theirs = _program_logits(probe, config, src, tgt)
        runs.append((src[:COMPARED], _looked_up(probe, config, tgt)[:COMPARED], theirs[:COMPARED]))
    joined, inside = [], []
    for sides in ([src for src, _, _ in runs], [tgt for _, tgt, _ in runs]):
        rows = [row for ids in sides for row in ids.tolist()]
        joined.append(pad(rows, config.pad_id))
        inside.append(pad([[1] * len(row) for row in rows], 0) > 0)
    run_masks = _masks(joined[0], joined[1], inside, config, masks)
    logits = _exact_logits(params, config, joined[0], joined[1], run_masks)
    ends, found = np.cumsum([len(tgt) for _, tgt, _ in runs]), []
    for (_, tgt, theirs), ours in zip(runs, np.split(logits, ends[:-1]), strict=True):
        counts = (tgt != config.pad_id) | (np.arange(tgt.shape[1]) == 0)
        found.append(_in_kind(ours[:, : tgt.shape[1]][counts], theirs[counts]))
    return found


def compare_own_masks(
    probe: Probe, params: Any, config: TransformerConfig, attentions: Mapping[Any, Attention]
) -> Errors:
    """Return the error of the logits in JAX on a run's own ids, with the program's own masks."""
    run = probe.run
    self_attention = visible(probe, attentions["decoder", "self_attention"])
    masks = (
        visible(probe, attentions["encoder", "self_attention"]),
        visible(probe, attentions["decoder", "cross_attention"]),
        self_attention,
    )
    tgt = _looked_up(probe, config, run.tgt)
    theirs = _program_logits(probe, config, run.src, run.tgt)
    ours = _exact_logits(params, config, run.src.astype(np.int32), tgt, masks)
    counts = self_attention.any((1, 3)) & (tgt != config.pad_id)
    ours, theirs = _in_kind(ours[counts], theirs[counts])
    return {run.lengths: _error(ours, theirs)}


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return max|ours - theirs| / max(1, max|theirs|); infinity where their shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    return float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))


def _exact_logits(
    params: Any, config: TransformerConfig, src: np.ndarray, tgt: np.ndarray, masks: tuple
) -> np.ndarray:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        run = jax.jit(_run, static_argnames="config", compiler_options=QUICKLY)
        return np.asarray(run(params, config=config, src=src, tgt=tgt, masks=masks))


def _run(params: Any, config: TransformerConfig, src: Any, tgt: Any, masks: Any) -> Any:
    if jax.config.jax_enable_x64:  # the weights are widened as they are read
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    memory = encode(params, config, src, masks[0])
    return decode(params, config, tgt, memory, masks[2], masks[1])


def _in_kind(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both logits [N, V], ours as what the program returns: log_softmax or softmax."""
    powers = ours - ours.max(-1, keepdims=True)
    powers = powers - np.log(np.exp(powers).sum(-1, keepdims=True))
    with np.errstate(over="ignore"):
        if np.allclose(np.exp(theirs).sum(-1), 1):
            return powers, theirs
    return (np.exp(powers) if np.allclose(theirs.sum(-1), 1) else ours), theirs


def _inputs(
    probe: Probe, config: TransformerConfig, src: np.ndarray, tgt: np.ndarray
) -> dict[int, np.ndarray]:
    """Return what a program is given: ids, and exact numbers where it holds rounded ones."""
    exact = exact_numbers(probe, config)
    return exact | {probe.run.source: src, probe.run.target: tgt}


def _looked_up(probe: Probe, config: TransformerConfig, tgt: np.ndarray) -> np.ndarray:
    """Return the target ids as the program looks them up: it may put an id before them."""
    first = find_look_up(probe, probe.run.target, "target", config.pad_id).first
    shifted = tgt if first is None else np.concatenate([tgt[:, :1] * 0 + first, tgt[:, :-1]], 1)
    return shifted.astype(np.int32)


def _fresh(
    probe: Probe, config: TransformerConfig, random: np.random.Generator, padded: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids [B, S] and [B, T]; all rows but the first one may end in padding."""
    sizes = config.src_vocab_size, config.tgt_vocab_size
    sides = []
    for recorded, size in zip((probe.run.src, probe.run.tgt), sizes, strict=True):
        rows, length = recorded.shape
        ids = _tokens(random, size, recorded.shape, config.pad_id)
        ends = random.integers(1, length + 1, rows) if padded else np.full(rows, length)
        ends[0] = length
        sides.append(np.where(np.arange(length) < ends[:, None], ids, np.int32(config.pad_id)))
    return sides[0], sides[1]


def _program_logits(
    probe: Probe, config: TransformerConfig, src: np.ndarray, tgt: np.ndarray
) -> np.ndarray:
    """Return logits [B, T, V] of a program that returns [B, T, V], [T, B, V] or [B T, V]."""
    output = probe.replay.value(probe.run.output, _inputs(probe, config, src, tgt))
    rows, length = tgt.shape
    if output.shape[:2] == (length, rows) and length != rows:
        return output.swapaxes(0, 1)
    return output.reshape(rows, length, -1)


def _masks(
    src: np.ndarray,
    tgt: np.ndarray,
    inside: Sequence[np.ndarray],
    config: TransformerConfig,
    masks: Masks,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the masks of the encoder, the memory [B, 1, 1, S] and the target [B, 1, T, T].

    Args:
        inside: Which positions of each side the program was given.
    """
    tokens = [
        ids != config.pad_id if ids.ndim == 2 else np.ones_like(there)
        for ids, there in zip((src, tgt), inside, strict=True)
    ]
    tokens[1][:, 0] = True  # BOS is no padding, whatever its id
    sources = [
        (inside[0] & (tokens[0] | (not hidden)))[:, None, None]
        for hidden in (masks.encoder, masks.memory)
    ]
    later = np.tril(np.ones((inside[1].shape[1],) * 2, bool)) | (not masks.causal)
    return *sources, later & (inside[1] & (tokens[1] | (not masks.target)))[:, None, None]


def _random_inputs(
    config: TransformerConfig, random: np.random.Generator, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids of both sides without padding, or vectors, or sound."""
    longest = config.max_length if config.has_position_table else SOURCE_LENGTH
    same = config.decoder_attention == "self_over_memory"
    lengths = [SOURCE_LENGTH, SOURCE_LENGTH if same else TARGET_LENGTH]
    inputs = []
    for length, size in zip(lengths, (config.src_vocab_size, config.tgt_vocab_size), strict=True):
        length = min(length, longest)
        if config.token_embeddings == "none":
            inputs.append(random.normal(size=(ROWS, length, config.d_model)).astype(dtype))
        else:
            inputs.append(_tokens(random, size, (ROWS, length), config.pad_id))
    if (width := config.source_features) is not None:
        frames = 2 * min(SOURCE_LENGTH, config.stack("encoder").max_length)
        inputs[0] = random.normal(size=(ROWS, frames, width)).astype(dtype)
    return inputs[0], inputs[1]


def _tokens(
    random: np.random.Generator, size: int, shape: tuple[int, ...], pad_id: int
) -> np.ndarray:
    ids = random.integers(0, size - 1, shape, np.int32)
    return ids + (ids >= pad_id)  # no token is padding
