"""One answer to every question: the config and the rows that follow from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable, fixed_buffer
from jax_transformer.convert.table import Buffer, Layout, Operation, Row, Shape, identity
from jax_transformer.errors import InputError
from jax_transformer.porting.blocks import Group, matrix_shape, role_shape
from jax_transformer.porting.names import Unit
from jax_transformer.porting.questions import group_name, orientation_name
from jax_transformer.porting.record import Masks
from jax_transformer.porting.structure import Layer, Structure

Answers = Mapping[str, Any]
FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A model that the tensors may be: its config, its rows and its masks."""

    config: TransformerConfig
    rows: tuple[Row, ...]
    masks: Masks


def build(structure: Structure, answers: Answers, pad_id: int = 0) -> Hypothesis:
    """Return the model that follows from the answers."""
    fields: dict[str, Any] = {}
    rows = [*_outside_rows(structure, answers, fields)]
    for side, layer in (("encoder", structure.encoder), ("decoder", structure.decoder)):
        rows += _layer_rows(structure, layer, side, answers, fields)
    fields = {name: answer for name, answer in answers.items() if name in FIELDS} | fields
    fields |= {"d_model": structure.width, "pad_id": pad_id}
    if fields["positions"] not in ("learned", "sinusoidal_tensor2tensor"):
        fields["position_offset"] = 0
    for side in ("encoder", "decoder"):
        count = len(getattr(structure, side).stack.indices)
        fields[f"num_{side}_layers"] = count
    inner, heads = fields.pop("inner"), fields["num_heads"]
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
    return Hypothesis(TransformerConfig.from_dict(fields), tuple(rows), masks)


def to_layout(
    structure: Structure, hypothesis: Hypothesis, tensors: Mapping[str, np.ndarray]
) -> Layout:
    """Return the layout of a hypothesis, with the buffers that can be given back."""
    buffers, unused = [], []
    for positions in structure.sinusoids:
        if positions.kind == hypothesis.config.positions and not positions.offset:
            table = _position_table(positions.shape, structure.width)
            buffers.append(Buffer(positions.name, table))
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
    return Layout("suggested", hypothesis.rows, tuple(buffers), unused=tuple(unused))


def _position_table(shape: Shape, width: int) -> PositionTable:
    """Return the table of a buffer whose last axis is d_model."""
    longest = max(shape[:-1])
    place = shape.index(longest)
    axes = ["length" if axis == place else 1 for axis in range(len(shape) - 1)]
    return PositionTable((*axes, "d_model"), _rows(shape, width))


def _rows(shape: Shape, width: int) -> int:
    return math.prod(shape) // width


def _layer_rows(
    structure: Structure, layer: Layer, side: str, answers: Answers, fields: dict[str, Any]
) -> Iterable[Row]:
    """Yield the rows of a stack; adds the fields of the config that its tensors determine."""
    order = answers["the decoder's self-attention and cross-attention"]
    blocks = {"self_attention": layer.attentions[order[0] if side == "decoder" else 0]}
    if side == "decoder":
        blocks["cross_attention"] = layer.attentions[order[1]]
    blocks["feed_forward"] = layer.feed_forward
    pairs: list[tuple[str, str | tuple[str, ...], Operation, str]] = []
    for block, group in blocks.items():
        pairs += _group_pairs(structure.width, block, group, answers, fields)
    norms = answers[f"the norms of an {side} layer"]
    for norm, block in zip(layer.norms, norms, strict=True):
        path = block if block == "memory_norm" else f"{block}_residual/norm"
        _agree(fields, "norm_bias", bool(norm.bias), norm.scale)
        pairs.append((norm.scale, f"{path}/scale", Operation(), "rows"))
        if norm.bias:
            pairs.append((norm.bias, f"{path}/bias", Operation(), "rows"))
        if block == "memory_norm":
            fields["memory_norm"] = True
    first, *_ = layer.stack.indices
    for suffix, paths, operation, stack in pairs:
        for index in range(len(layer.stack.indices)) if first else ("{i}",):
            own = f"{side}/layers_{index}"
            foreign = layer.stack.template(suffix)
            if first:
                foreign = layer.stack.name(index, suffix)
            several = isinstance(paths, tuple)
            where = tuple(f"{own}/{p}" for p in paths) if several else f"{own}/{paths}"
            yield Row(foreign, where, operation, stack=stack)
    if layer.relative:
        shapes = layer.stack.shapes | layer.stack.first_only
        fields["relative_attention_num_buckets"] = shapes[layer.relative][0]
        table = "relative_attention_bias/embedding"
        if layer.has_relative_per_layer:
            fields["relative_attention_bias"] = "per_layer"
            for index in range(len(layer.stack.indices)):
                yield Row(layer.stack.name(index, layer.relative), f"{side}/layers_{index}/{table}")
        else:
            yield Row(layer.stack.name(0, layer.relative), f"{side}/{table}")


def _group_pairs(
    width: int,
    block: str,
    group: Group,
    answers: Answers,
    fields: dict[str, Any],
) -> Iterable[tuple[str, str | tuple[str, ...], Operation, str]]:
    """Yield suffix, paths, operation and stacking of a group's tensors."""
    shared, first = group.kind == "shared", group.units[0].name
    if group.is_attention:
        _agree(fields, "inner", width if shared else group.inner, first)
        _agree(fields, "head_projection", "shared" if shared else "full", first)
    else:
        _agree(fields, "d_ff", group.inner, first)
        _agree(fields, "gated_feed_forward", group.kind != "feed_forward", first)
    roles = answers[f"roles of {group_name(group)}"]
    for index, (unit, role) in enumerate(zip(group.units, roles, strict=True)):
        role, _, stack = role.partition(" ")
        parts = role.split("+")
        shape, expected = (
            matrix_shape(unit, width),
            role_shape(group.kind, role, width, group.inner),
        )
        transposed = shape == expected
        if expected[0] == expected[1] and len(parts) == 1:
            transposed = answers[orientation_name(group, index)]
        paths = tuple(f"{block}/{part}/kernel" for part in parts)
        yield unit.matrix, _one(paths), _operation(unit, transposed, parts), stack or "rows"
        field = "attention_output_bias" if role == "output" else "qkv_bias"
        field = field if group.is_attention else "feed_forward_bias"
        _agree(fields, field, bool(unit.bias), unit.matrix)
        if unit.bias:
            paths = tuple(f"{block}/{part}/bias" for part in parts)
            yield unit.bias, _one(paths), Operation(), "heads" if stack == "heads" else "rows"


def _operation(unit: Unit, transposed: bool, parts: list[str]) -> Operation:
    if len(unit.shape) == 2 or len(parts) > 1:
        return Operation(transposed)
    return Operation(transposed, (*unit.shape[:-1], -1))  # the heads are one of three axes


def _one(paths: tuple[str, ...]) -> str | tuple[str, ...]:
    return paths[0] if len(paths) == 1 else paths


def _outside_rows(structure: Structure, answers: Answers, fields: dict[str, Any]) -> Iterable[Row]:
    """Yield the rows of what stands outside the layers; adds their fields."""
    source, target, output, positions = answers["the tables"]
    tables = structure.tables
    tied = {original: [] for original in structure.copies.values()}
    for copy, original in structure.copies.items():
        tied[original].append(copy)

    def rows(name: str, path: str, operation: Operation = identity) -> Iterable[Row]:
        yield Row(name, path, operation)
        for copy in tied.get(name, ()):
            yield Row(copy, path, operation)

    fields |= {"output_bias": False, "output_projection": "none", "token_embeddings": "none"}
    fields |= {"src_vocab_size": 8, "tgt_vocab_size": 8}
    if source is not None:
        shared = source == target
        fields["token_embeddings"] = "shared" if shared else "separate"
        fields["src_vocab_size"] = tables[source].shape[0]
        fields["tgt_vocab_size"] = tables[target].shape[0]
        names = ("token",) if shared else ("source", "target")
        for name, index in zip(names, (source, target), strict=False):
            yield from rows(tables[index].matrix, f"{name}_embedding/embedding")
    if output is not None:
        head = tables[output]
        if output == target:
            fields["output_projection"] = "tied"
        else:
            fields["output_projection"] = "linear"
            vocabulary = fields["tgt_vocab_size"]
            transposed = head.shape == (vocabulary, structure.width)
            yield from rows(head.matrix, "output_projection/kernel", Operation(transposed))
        biases = [*structure.output_biases, *([head.bias] if head.bias else [])]
        if len(biases) > 1:
            raise InputError(f"{' and '.join(biases[:4])} are two biases of one output")
        for bias in biases:
            fields["output_bias"] = True
            flat = len(structure.shapes[bias]) == 1
            yield Row(
                bias, "output_projection/bias", Operation() if flat else Operation(shape=(1, -1))
            )
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
        for side, index in zip(("source", "target"), positions, strict=True):
            name, shape = tables[index].matrix, tables[index].shape
            length = _rows(shape, structure.width) - answers["position_offset"]
            _agree(fields, "max_length", length, name)
            operation = Operation()
            if len(shape) > 2:
                inner = tuple(-1 if length > 1 else 1 for length in shape[:-1])
                operation = Operation(shape=(*inner, "d_model"))
            yield from rows(name, f"{side}_positions/embedding", operation)
    elif structure.sinusoids:
        fields["max_length"] = _rows(structure.sinusoids[0].shape, structure.width)


def _agree(fields: dict[str, Any], name: str, value: object, tensor: str) -> None:
    """Set a field; refuse a tensor that contradicts an earlier one."""
    if fields.setdefault(name, value) != value:
        raise InputError(
            f"{tensor}: {name}={value!r}, but {fields[name]!r} elsewhere in the model; a config "
            "has one for all"
        )
