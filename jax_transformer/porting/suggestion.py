"""A config and a layout for the weights of a program, of which some runs were recorded."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import differing_fields
from jax_transformer.convert.buffers import fixed_buffer
from jax_transformer.convert.table import USUAL_MASKS, Buffer, Layout, Masks, name_pattern
from jax_transformer.convert.transfer import check_state_dict, to_params, to_tensors
from jax_transformer.errors import InputError
from jax_transformer.model.tree import STACKS
from jax_transformer.parity.report import aligned
from jax_transformer.porting.findings import Findings
from jax_transformer.porting.graph import Unread
from jax_transformer.porting.layouts import layouts_of
from jax_transformer.porting.probe import Probe
from jax_transformer.porting.reading import read_run
from jax_transformer.porting.recording import Recording
from jax_transformer.porting.replay import Replay
from jax_transformer.porting.rows import Tensor, layout_rows
from jax_transformer.porting.verification import EXACT, compare_own_masks, compare_runs
from jax_transformer.storage.weights.arrays import as_numpy, as_torch
from jax_transformer.storage.weights.trained import plain_names

USUAL_DISTANCE = 128  # of relative positions, where runs cannot tell
USUAL_LENGTH = 512  # of texts, where no table bounds it
MOST_ROUNDINGS = 1e5  # between a program's own precision and float64
MOST_KINDS = 60  # of tensors: lines of what is shown before a program was recorded
MOST_LISTED = 4096  # numbers of a tensor that is not read and comes home as it was
# A projection without a bias beside others that have one has a bias of zeros.
EITHER = ("qkv_bias", "attention_output_bias", "feed_forward_bias", "norm_bias")


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """What was read of a program; prints as the config, what is refused, and what was compared.

    Attributes:
        config: None where something is refused.
        layout: None where something is refused.
        refused: What no config has, each with its operation, module and line.
        notes: What is told beside the result.
        errors: Of the logits in JAX on fresh ids, by the lengths of source and target.
        only_masks: Whether only masks are refused: with those of the program the logits agree, on
            the recorded ids.
    """

    config: TransformerConfig | None
    layout: Layout | None
    refused: tuple[str, ...]
    notes: tuple[str, ...]
    errors: Mapping[tuple[int, int], float]
    only_masks: bool = False

    @property
    def fits(self) -> bool:
        """Whether the model in JAX gives the logits of the program."""
        return self.layout is not None and not self.refused

    def __str__(self) -> str:
        lines = []
        if self.config is not None:
            fields = differing_fields(self.config).items()
            lines += [f"{name} = {value!r}" for name, value in fields]
        if self.layout is not None and self.layout.masks != USUAL_MASKS:
            lines.append(f"masks of your program, for encode and decode: {self.layout.masks}")
        lines += [f"refused: {text}" for text in self.refused]
        lines += [f"note: {text}" for text in self.notes]
        for (source, target), error in self.errors.items():
            with_masks = " and the masks of your program" if self.only_masks else ""
            lines.append(
                f"logits in JAX: {error:.1e} from your program's, with {source} source and "
                f"{target} target tokens{with_masks}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def suggest(tensors: Mapping[str, Any], recording: Recording) -> Suggestion:
    """Return the config and the layout of a recorded program.

    Args:
        tensors: Its weights and buffers by name.
        recording: As `read_recording` returns it.

    Raises:
        InputError: The tensors are not those of the program.
    """
    check_state_dict(tensors)
    names = plain_names(tensors)
    arrays = {names[name]: as_numpy(tensor) for name, tensor in tensors.items() if name in names}
    shared = {name: as_torch(array) for name, array in arrays.items()}
    probes = [Probe(Replay(run, shared)) for run in recording.runs]
    longest = max(probes, key=lambda probe: probe.run.tgt.size)
    found = read_run(probes[0], longest, recording.pad_id)
    for probe in probes:
        _check_replay(probe, found)
    windows: dict[str, Any] = {}
    with found.refusing(masks=True):
        windows = {} if found.refusals else _window_fields(found)
    other_masks = bool(found.refusals) and found.only_masks
    refused, notes, errors = [*found.refused()], found.notes, dict[tuple[int, int], float]()
    config = layout = None
    try:
        if not refused or other_masks:
            config = to_config(found, recording.pad_id, windows)
            layout = to_layout(found, probes[0], config, arrays)
    except InputError as error:
        refused, other_masks = [*refused, str(error)], False
    if layout is not None:
        # Nothing changes the weights: what is made of them are views.
        params, _ = to_params(arrays, config, layout, leaf=lambda path, array: array)
        back, _ = to_tensors(params, config, layout, buffers=False, copy=False)
        wrong = [
            f"{name} does not come back bit for bit"
            for name, x in back.items()
            if name in arrays
            and (x.dtype != arrays[name].dtype or x.tobytes() != arrays[name].tobytes())
        ]
        del back
        found.elements.clear()  # as large as the weights
        if other_masks:
            errors = compare_own_masks(probes[0], params, config, found.attentions)
        else:
            errors = compare_runs(probes, params, config, layout.masks)
        wrong += [
            f"at {source} source and {target} target tokens the logits in JAX are {error:.1e} from "
            "your program's"
            for (source, target), error in errors.items()
            if not error <= EXACT
        ]
        other_masks &= not wrong
        refused += wrong
        source, target = (max(lengths) for lengths in zip(*errors, strict=True))
        notes.append(
            "rows of padding were not compared, and "
            f"up to {source} source and {target} target tokens were seen: a window or a bucket of "
            "distances that reaches farther was not"
        )
    return Suggestion(config, layout, tuple(refused), tuple(notes), errors, other_masks)


def _check_replay(probe: Probe, found: Findings) -> None:
    """Refuse a recording whose operations do not give what the program returned."""
    run = probe.run
    # The ids are replaced, so that no value of the run is stored.
    ids = {run.source: run.src, run.target: run.tgt}
    logits, replayed = run.logits.astype(np.float64), probe.replay.value(run.output, ids)
    rows = np.isfinite(logits).all(-1) & np.isfinite(replayed).all(-1)
    error = np.abs(replayed - logits)[rows].max(initial=0) / np.abs(logits[rows]).max(initial=1)
    if error > MOST_ROUNDINGS * float(ml_dtypes.finfo(run.logits.dtype).eps):
        text = (
            f"the recorded operations give logits that are {error:.0e} from what the program "
            "returned: something outside of torch computes"
        )
        found.refuse(Unread(text, run.calls[-1:]))


def to_config(found: Findings, pad_id: int, windows: Mapping[str, Any]) -> TransformerConfig:
    """Return the config of what was read, with the fields of windows.

    Raises:
        InputError: A field would need two values; names the places of both.
    """
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    config: dict[str, Any] = {}
    for field in found.values:
        if field in EITHER:
            config[field] = True in found.values[field]
        elif field in fields:
            config[field] = found.one(field)
        elif " bias" in field:
            found.one(field)
    # Sizes are the decoder's, norms the encoder's, unless the other stack has its own.
    for usual, other, names in (
        ("decoder", "encoder", ("d_model", "num_heads", "num_kv_heads", "d_ff")),
        ("encoder", "decoder", ("norm_placement", "final_norm")),
    ):
        for name in names:
            config[name], value = found.one(f"{usual} {name}"), found.one(f"{other} {name}")
            if value != config[name]:
                config[f"{other}_{name}"] = value
    for prefix in ("", "encoder_"):
        if config.get(f"{prefix}num_kv_heads") == config.get(f"{prefix}num_heads"):
            config[f"{prefix}num_kv_heads"] = None
    width, head_dim = config["d_model"], config["d_kv"]
    if config["d_v"] == head_dim:
        config["d_v"] = None
    if head_dim * config["num_heads"] == width and "encoder_num_heads" not in config:
        config["d_kv"] = None
    for name, size in (("none", 1), ("d_model", width), ("head_dim", head_dim)):
        if abs(found.one("attention_scale") / size - 1) < 1e-6:
            config["attention_scale"] = name
    config.setdefault("max_length", USUAL_LENGTH)
    if found.relative:
        config |= _relative_fields(found)
    elif any(found.rotary["encoder"] + found.rotary["decoder"]):
        config |= _rotary_fields(found, head_dim)
    bos_id = found.first_id
    if bos_id is None:
        bos_id = 1 if pad_id != 1 else 0
    eos_id = next(n for n in range(2, 5) if n not in (pad_id, bos_id))
    config |= dict(windows) | {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
    return TransformerConfig.from_dict(config)


def _relative_fields(found: Findings) -> dict[str, Any]:
    """Return the fields of relative positions, and note the elements of their tables."""
    shared = all(
        np.array_equal(table, tables[0][1])
        for tables in found.relative.values()
        for _, table in tables
    )
    for stack, tables in found.relative.items():
        for layer, table in tables[:1] if shared else tables:
            path = stack if shared else layer
            found.place(f"{path}/relative_attention_bias/embedding", table)
    low, high = found.farthest
    if low > high:
        raise InputError("the encoder and the decoder put distances into other buckets")
    farthest = USUAL_DISTANCE if low <= USUAL_DISTANCE <= high else low
    if low != high:
        found.notes.append(
            f"relative_attention_max_distance={farthest} is taken, and {low} to {high} give the "
            "same on all distances that were seen"
        )
    return {
        "positions": "relative",
        "relative_attention_bias": "shared" if shared else "per_layer",
        "relative_attention_max_distance": farthest,
    }


def _rotary_fields(found: Findings, head_dim: int) -> dict[str, Any]:
    pairs = [
        pair
        for stack in STACKS
        for pair in itertools.zip_longest(
            found.rotary[stack], found.windows[stack], fillvalue=(None, None)
        )
    ]
    near = {rotary for rotary, (earlier, _) in pairs if earlier is not None}
    far = {rotary for rotary, (earlier, _) in pairs if earlier is None} or near
    if max(len(near), len(far)) > 1 or None in near | far:
        raise InputError(f"layers have several kinds of rotary positions: {near | far}")
    (rotary,) = far
    fields: dict[str, Any] = {
        "positions": "rotary",
        "rotary_theta": rotary.theta,
        "rotary_scaling": rotary.scaling,
        "rotary_fraction": rotary.columns / head_dim,
    }
    for windowed in near - far:
        fields["sliding_window_theta"] = windowed.theta
        if windowed.scaling != 1 or windowed.columns != rotary.columns:
            raise InputError(
                f"layers with a window have other rotary positions: {windowed}, {rotary}"
            )
    return fields


def _window_fields(found: Findings) -> dict[str, Any]:
    """Return the fields of windows; raise `Unread` for windows that no config has."""
    windows = [window for stack in STACKS for window in found.windows[stack]]
    if all(earlier is None for earlier, _ in windows):
        return {}
    near = [window for window in windows if window[0] is not None]
    sizes = {
        n for earlier, later in near for n in (earlier, earlier + 1, earlier + (later or 0) + 1)
    }
    patterns = {
        n + 1
        for stack in STACKS
        for n, (earlier, _) in enumerate(found.windows[stack])
        if earlier is None
    }
    for size, pattern, kind in itertools.product(
        sorted(sizes - {0}), (None, *sorted(patterns)), ("each_side", "split")
    ):
        fields = {"sliding_window": size, "sliding_window_pattern": pattern, "encoder_window": kind}
        shape = TransformerConfig.from_dict(fields)
        if all(
            (shape.window_of(stack, n) or (None, 0 if stack == "decoder" else None)) == window
            for stack in STACKS
            for n, window in enumerate(found.windows[stack])
        ):
            return fields
    text = f"windows of (earlier, later) positions that no config has, {dict(found.windows)}"
    raise Unread(text, found.window_calls)


def to_layout(
    found: Findings, probe: Probe, config: TransformerConfig, arrays: Mapping[str, np.ndarray]
) -> Layout:
    """Return the layout of what was read.

    Raises:
        InputError: No layout expresses it, or the program does not read a tensor.
    """
    tensors = []
    for key, leaf in probe.leaves.items():
        uses = probe.graph.changing([key], [probe.run.output])
        tensors.append(Tensor(leaf.names, leaf.shape, probe.first[key], uses[0] if uses else None))
    rows = layout_rows(found.elements, tensors, config)
    patterns = [name_pattern(row.foreign) for row in rows]
    read = {name for leaf in probe.run.leaves for name in leaf.names}
    buffers, unused, unread = [], [], []
    for name, array in arrays.items():
        if any(pattern.fullmatch(name) for pattern in patterns):
            continue
        small = name in read or array.dtype.kind in "biu" or array.size <= MOST_LISTED
        value = found.tables.get(name) or (fixed_buffer(array) if small else None)
        if value is not None:
            buffers.append(Buffer(name, value))
        elif small:
            unused.append(name)
        else:
            unread.append(name)
    if unread:
        raise InputError(f"the program does not read {', '.join(unread[:8])}: --drop leaves it out")
    told = (f"mask {name}" for name in Masks.__struct_fields__)
    masks = Masks(*(found.one(name) if name in found.values else True for name in told))
    return Layout("suggested", rows, tuple(buffers), unused=tuple(unused), masks=masks)


def described(tensors: Mapping[str, Any]) -> str:
    """Return the tensors of a checkpoint in words: those of all layers in one line.

    Raises:
        InputError: There are none.
    """
    if not tensors:
        raise InputError("the checkpoint holds no tensors")
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((re.sub(r"\d+", "{i}", name), tuple(tensor.shape)), []).append(name)
    rows = [
        (stem if len(names) > 1 else names[0], f"{len(names)} x {list(shape)}")
        for (stem, shape), names in groups.items()
    ]
    lines = [*aligned(rows[:MOST_KINDS])]
    if len(rows) > MOST_KINDS:
        lines.append(f"and {len(rows) - MOST_KINDS} more kinds")
    count = sum(tensor.size for tensor in tensors.values())
    lines.append(f"{len(tensors)} tensors with {count:,} numbers")
    if known := layouts_of(tensors):
        names = ", ".join(known)
        lines.append(f"these are the names of the layout {names}: --layout {known[0]} reads them")
    return "\n".join(lines)
