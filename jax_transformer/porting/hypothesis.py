"""One answer to every question: the config and the rows that follow from it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable, fixed_buffer
from jax_transformer.convert.table import Buffer, Layout, Masks, Operation, Row, Shape, identity
from jax_transformer.errors import InputError
from jax_transformer.porting.blocks import Group, matrix_shape, role_shape
from jax_transformer.porting.names import without_window
from jax_transformer.porting.questions import group_name, orientation_name
from jax_transformer.porting.structure import Layer, Structure

if TYPE_CHECKING:
    from jax_transformer.porting.outside import Outside

Answers = Mapping[str, Any]
FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A model that the tensors may be: its config, its rows and its masks.

    Attributes:
        outside: What the program does that no config has.
    """

    config: TransformerConfig
    rows: tuple[Row, ...]
    masks: Masks
    outside: Outside | None = None


def build(structure: Structure, answers: Answers, pad_id: int = 0) -> Hypothesis:
    """Return the model that follows from the answers."""
    fields: dict[str, Any] = {}
    rows = [
        copy
        for row in _outside_rows(structure, answers, fields)
        for copy in _with_copies(row, structure.copies)
    ]
    for side, layer in (("encoder", structure.encoder), ("decoder", structure.decoder)):
        rows += _layer_rows(structure, layer, side, answers, fields)
    fields = {name: answer for name, answer in answers.items() if name in FIELDS} | fields
    fields |= {"d_model": structure.width, "pad_id": pad_id}
    if fields["decoder_norm_placement"] == fields["norm_placement"]:
        fields["decoder_norm_placement"] = None
    if fields["positions"] not in ("learned", "sinusoidal_tensor2tensor"):
        fields["position_offset"] = 0
    for side in ("encoder", "decoder"):
        fields[f"num_{side}_layers"] = len(getattr(structure, side).stack.indices)
    inner, heads = fields.pop("inner"), fields["num_heads"]
    if (key_inner := fields.pop("key_inner")) != inner:
        if key_inner * heads % inner:
            raise InputError(f"num_heads={heads}: {key_inner} columns of keys are no whole heads")
        fields["num_kv_heads"] = key_inner * heads // inner
    if fields.get("head_projection") != "shared" and inner != structure.width:
        if inner % heads:
            raise InputError(f"num_heads={heads} does not divide {inner}, the width of all heads")
        fields["d_kv"] = inner // heads
    smallest = min(fields["src_vocab_size"], fields["tgt_vocab_size"])
    ids = [i for i in range(min(smallest, 3)) if i != pad_id]  # no weights tell them
    fields |= {"bos_id": ids[0], "eos_id": ids[-1]}
    masks = Masks(
        *answers["source padding hidden in"],
        answers["target padding hidden"],
        answers["later targets hidden"],
    )
    config = _cached_config(tuple(fields.items()))
    return with_outside(Hypothesis(config, tuple(rows), masks), answers.get("outside"))


def with_outside(hypothesis: Hypothesis, outside: Outside | None) -> Hypothesis:
    """Return a hypothesis that does what a word says, by the config where it has the field."""
    if outside is None or not outside.fields:
        return dataclasses.replace(hypothesis, outside=outside)
    try:
        config = dataclasses.replace(hypothesis.config, **outside.fields)
    except InputError:  # no config has both: nothing is nearer
        return hypothesis
    return dataclasses.replace(hypothesis, config=config)


@functools.lru_cache(maxsize=1024)
def _cached_config(fields: tuple[tuple[str, Any], ...]) -> TransformerConfig:
    """Return a config; most hypotheses of a search differ in their rows alone."""
    return TransformerConfig.from_dict(dict(fields))


def to_layout(
    structure: Structure, hypothesis: Hypothesis, tensors: Mapping[str, np.ndarray]
) -> Layout:
    """Return the layout of a hypothesis, with the buffers that can be given back."""
    buffers, unused = [], []
    for positions in structure.sinusoids:
        if positions.kind == hypothesis.config.positions and not positions.offset:
            buffers.append(Buffer(positions.name, _position_table(positions.shape)))
        else:
            unused.append(positions.name)
    constants = [*structure.unused]
    for layer in (structure.encoder, structure.decoder):
        for index, suffix in itertools.product(range(len(layer.stack.indices)), layer.unused):
            constants.append(layer.stack.name(index, suffix))
    for name in constants:
        value = fixed_buffer(tensors[name])
        if value is None:
            unused.append(name)
        else:
            buffers.append(Buffer(name, value))
    named = {"unused": tuple(unused), "masks": hypothesis.masks}
    return Layout("suggested", hypothesis.rows, tuple(buffers), **named)


def _position_table(shape: Shape) -> PositionTable:
    """Return the table of a buffer whose last axis is d_model."""
    place = shape.index(max(shape[:-1]))
    axes = ["length" if axis == place else 1 for axis in range(len(shape) - 1)]
    return PositionTable((*axes, "d_model"), math.prod(shape[:-1]))


def _layer_rows(
    structure: Structure, layer: Layer, side: str, answers: Answers, fields: dict[str, Any]
) -> Iterable[Row]:
    """Yield the rows of a stack; adds the fields of the config that its tensors determine."""
    stack, width = layer.stack, structure.width
    order = answers["the decoder's self-attention and cross-attention"]
    blocks = {"self_attention": layer.attentions[order[0] if side == "decoder" else 0]}
    if side == "decoder":
        blocks["cross_attention"] = layer.attentions[order[1]]
    blocks["feed_forward"] = layer.feed_forward
    tensors = [
        tensor
        for block, group in blocks.items()
        for tensor in _group_tensors(width, block, group, answers, fields)
    ]
    norms = answers[f"the norms of an {side} layer"]
    for norm, block in zip(layer.norms, norms, strict=True):
        sublayer, _, output = block.partition(" ")
        path = block if block == "memory_norm" else f"{sublayer}_residual/{output}norm"
        if output:
            fields[{"encoder": "norm_placement"}.get(side, "decoder_norm_placement")] = "sandwich"
        _agree(fields, "norm_bias", bool(norm.bias), norm.scale)
        leaves = {"scale": norm.scale, "bias": norm.bias}
        tensors += [(name, (f"{path}/{leaf}",)) for leaf, name in leaves.items() if name]
        if block == "memory_norm":
            fields["memory_norm"] = True
    numbers = range(len(stack.indices))
    for suffix, paths, *how in tensors:
        if how:
            how[0] = _with_window(structure, stack.name(0, suffix), how[0])
        names = {"{i}": stack.template(suffix)}
        if stack.indices[0] or "{i}" not in names["{i}"]:  # the program counts otherwise
            names = {index: stack.name(index, suffix) for index in numbers}
        for index, name in names.items():
            yield _row(name, tuple(f"{side}/layers_{index}/{path}" for path in paths), *how)
    if layer.relative:
        shapes = stack.shapes | stack.first_only
        fields["relative_attention_num_buckets"] = shapes[layer.relative][0]
        table = "relative_attention_bias/embedding"
        if layer.has_relative_per_layer:
            fields["relative_attention_bias"] = "per_layer"
            for index in numbers:
                yield Row(stack.name(index, layer.relative), f"{side}/layers_{index}/{table}")
        else:
            yield Row(stack.name(0, layer.relative), f"{side}/{table}")


def _with_window(structure: Structure, name: str, operation: Operation) -> Operation:
    """Return the operation of a kernel; of a convolution over one position, with its third axis."""
    shape = structure.shapes[name]
    if without_window(shape) == shape:
        return operation
    return Operation(operation.transposed, (-1, *shape[1:]))


@functools.lru_cache(maxsize=4096)
def _row(
    foreign: str, paths: tuple[str, ...], operation: Operation = identity, stack: str = "rows"
) -> Row:
    """Return a row; the hypotheses of a search share most of theirs."""
    return Row(foreign, paths[0] if len(paths) == 1 else paths, operation, stack=stack)


def _group_tensors(
    width: int, block: str, group: Group, answers: Answers, fields: dict[str, Any]
) -> Iterable[tuple[str, tuple[str, ...], Operation, str]]:
    """Yield suffix, paths, operation and stacking of a group's tensors."""
    shared, first = group.kind == "shared", group.units[0].name
    if group.is_attention:
        _agree(fields, "inner", width if shared else group.inner, first)
        _agree(fields, "key_inner", width if shared else group.key_inner, first)
        _agree(fields, "head_projection", "shared" if shared else "full", first)
    else:
        _agree(fields, "d_ff", group.inner, first)
        _agree(fields, "gated_feed_forward", group.kind != "feed_forward", first)
    roles = answers[f"roles of {group_name(group)}"]
    for index, (unit, role) in enumerate(zip(group.units, roles, strict=True)):
        role, _, stack = role.partition(" ")
        parts = role.split("+")
        expected = role_shape(group.kind, role, width, group.inner, group.key_inner)
        transposed = matrix_shape(unit, width) == expected
        if expected[0] == expected[1] and len(parts) == 1:
            transposed = answers[orientation_name(group, index)]
        # The heads may be one of three axes.
        flat = len(unit.shape) == 2 or len(parts) > 1
        operation = Operation(transposed, () if flat else (*unit.shape[:-1], -1))
        yield unit.matrix, tuple(f"{block}/{p}/kernel" for p in parts), operation, stack or "rows"
        field = "attention_output_bias" if role == "output" else "qkv_bias"
        field = field if group.is_attention else "feed_forward_bias"
        _agree(fields, field, bool(unit.bias), unit.matrix)
        if unit.bias:
            stack = "heads" if stack == "heads" else "rows"
            yield unit.bias, tuple(f"{block}/{part}/bias" for part in parts), identity, stack


def _outside_rows(structure: Structure, answers: Answers, fields: dict[str, Any]) -> Iterable[Row]:
    """Yield the rows of what stands outside the layers; adds their fields."""
    source, target, output, positions = answers["the tables"]
    tables = structure.tables
    fields |= {"output_bias": False, "output_projection": "none", "token_embeddings": "none"}
    fields |= {"src_vocab_size": 8, "tgt_vocab_size": 8}
    if source is not None:
        shared = source == target
        fields["token_embeddings"] = "shared" if shared else "separate"
        fields["src_vocab_size"] = tables[source].shape[0]
        fields["tgt_vocab_size"] = tables[target].shape[0]
        names = ("token",) if shared else ("source", "target")
        for name, index in zip(names, (source, target), strict=False):
            yield Row(tables[index].matrix, f"{name}_embedding/embedding")
    if output is not None:
        head = tables[output]
        fields["output_projection"] = "tied" if output == target else "linear"
        if output != target:
            transposed = head.shape == (fields["tgt_vocab_size"], structure.width)
            operation = _with_window(structure, head.matrix, Operation(transposed))
            yield Row(head.matrix, "output_projection/kernel", operation)
        biases = [*structure.output_biases, *([head.bias] if head.bias else [])]
        if len(biases) > 1:
            raise InputError(f"{' and '.join(biases[:4])} are two biases of one output")
        for bias in biases:
            fields["output_bias"] = True
            flat = len(structure.shapes[bias]) == 1
            yield Row(bias, "output_projection/bias", Operation(shape=() if flat else (1, -1)))
    slots = answers["the norms outside the layers"]
    for norm, slot in zip(structure.norms, slots, strict=True):
        _agree(fields, "norm_bias", bool(norm.bias), norm.scale)
        yield Row(norm.scale, f"{slot}/scale")
        if norm.bias:
            yield Row(norm.bias, f"{slot}/bias")
    fields["embedding_norm"] = "source_embedding_norm" in slots
    fields["final_norm"] = "encoder/norm" in slots
    if ("decoder/norm" in slots) != fields["final_norm"]:
        fields["decoder_final_norm"] = "decoder/norm" in slots
    if positions:
        fields["positions"] = "learned"
        tables_of: dict[int, list[str]] = {}
        for side, index in zip(("source", "target"), positions, strict=True):
            tables_of.setdefault(index, []).append(f"{side}_positions/embedding")
        for index, paths in tables_of.items():
            name, shape = tables[index].matrix, tables[index].shape
            length = math.prod(shape[:-1]) - answers["position_offset"]
            _agree(fields, "max_length", length, name)
            inner = tuple(-1 if length > 1 else 1 for length in shape[:-1])
            operation = Operation(shape=(*inner, "d_model")) if len(shape) > 2 else identity
            yield Row(name, tuple(paths), operation, stack="copies" if len(paths) > 1 else "rows")
    elif structure.sinusoids:
        fields["max_length"] = math.prod(structure.sinusoids[0].shape[:-1])


def _with_copies(row: Row, copies: Mapping[str, str]) -> Iterable[Row]:
    """Yield a row, and the same row for every equal copy of its tensor."""
    yield row
    for copy, original in copies.items():
        if original == row.foreign:
            yield dataclasses.replace(row, foreign=copy)


def _agree(fields: dict[str, Any], name: str, value: object, tensor: str) -> None:
    """Set a field; refuse a tensor that contradicts an earlier one."""
    if fields.setdefault(name, value) != value:
        raise InputError(
            f"{tensor}: {name}={value!r}, but {fields[name]!r} elsewhere in the model; a config "
            "has one for all"
        )
