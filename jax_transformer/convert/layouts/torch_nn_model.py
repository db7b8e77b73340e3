"""Embeddings, a torch.nn.Transformer and a head in one module: its config and its layout."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.layouts.torch_nn import torch_nn_config, transformer
from jax_transformer.convert.position_table import PositionTable
from jax_transformer.convert.table import Buffer, Layout, Operation, Row, expand, transpose
from jax_transformer.convert.transfer import COMPUTED_TOLERANCE, FREE_FIELDS, HALF_ROUNDING
from jax_transformer.errors import InputError
from jax_transformer.storage.weights.arrays import FLOATS, as_numpy

if TYPE_CHECKING:
    import torch
    from torch import nn

# Fields that a module has no part for: its forward function, or its user, decides.
UNTOLD = (
    *FREE_FIELDS,
    "embedding_scale",
    "position_offset",
    "output_scale",
    "attention_scale",
    "pad_id",
    "bos_id",
    "eos_id",
)
POSITION = re.compile(r"pos|wpe|\bpe\b", re.IGNORECASE)
SIDES = {
    "source": re.compile(r"src|source|enc|inp", re.IGNORECASE),
    "target": re.compile(r"tgt|trg|target|dec|out", re.IGNORECASE),
}
POSITIONS = get_args(inspect.get_annotations(TransformerConfig, eval_str=True)["positions"])
SINUSOIDS = tuple(kind for kind in POSITIONS if kind.startswith("sinusoidal"))


class ModuleDescription(NamedTuple):
    """A module's config, and the names and shapes of its state_dict."""

    config: TransformerConfig
    layout: Layout


class _Part(NamedTuple):
    """A parameter outside of the torch.nn.Transformer, with the names of its tied copies."""

    names: list[str]
    owners: list[nn.Module]
    tensor: torch.Tensor


def torch_nn_model(module: nn.Module, **fields: Any) -> ModuleDescription:
    """Return the config and the layout of a module that holds one torch.nn.Transformer.

    It finds the tables of tokens (one that both sides share, or two), learned tables of positions,
    the linear head and whether its matrix is tied, and buffers that hold sinusoids, whose kind it
    tells by their values. The layout is complete: what `to_torch` writes by it, the module loads
    with `strict=True`.

    A module does not tell what its `forward` does. Pass the fields where the default is not what
    yours does, and compare the outputs of both models afterwards:

    - `embedding_scale`: "sqrt_d_model" unless given, as in the paper; "none" where the tokens'
      vectors are not multiplied.
    - `positions`: the kind of the table that the module has; "none" without a table, and where it
      is given because `forward` does not add the table.
    - `pad_id`: `padding_idx` of the tables, else 0; `bos_id`, `eos_id`: 1 and 2.
    - `max_length`: the rows of the shortest table, else 512.
    - `output_projection`: "none" without a head; "tied" where `forward` multiplies by the table.

    Tables are told apart by their names (source, src, enc; target, tgt, dec; pos), a target's also
    by the head; two tables that no name tells apart are source and target in this order.

    Args:
        module: A module with embeddings, one torch.nn.Transformer and a head, or some of these.
        **fields: Fields of `TransformerConfig` that the module does not tell.

    Raises:
        InputError: The module has a part that the model cannot have, or a field contradicts it.
    """
    prefix, body = _find_transformer(module)
    told = torch_nn_config(body).to_dict()
    parts = _parts(module, prefix)
    tables, positions = _tables(parts, told["d_model"])
    head = _head(parts, tables, told["d_model"])
    found, names = _tokens(tables, head)
    learned_fields, learned_rows = _learned_positions(positions, told["d_model"], fields)
    used = [*tables, *positions, *([head] if head else [])]
    _check_all_used(module, parts, used, found, head)
    found |= _padding(tables)
    computed_fields, buffers = _buffers(module, told["d_model"], fields)
    if learned_fields and computed_fields:
        raise InputError(
            f"the module has {computed_fields['positions']!r} positions beside the learned ones of "
            f"{positions[0].names[0]}; the model has one kind"
        )
    found |= {"positions": "none"} | learned_fields | computed_fields
    config = _config(told, found, fields)
    rows = _head_rows(parts, head, found)
    layout = transformer(prefix, **names)
    layout = Layout(type(module).__name__, (*layout.rows, *learned_rows, *rows), tuple(buffers))
    return ModuleDescription(config, _with_copies(module, layout, config))


def _find_transformer(module: nn.Module) -> tuple[str, nn.Module]:
    """Return the prefix of the names of the only torch.nn.Transformer, and itself."""
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(f"a {type(module).__name__} is no torch.nn.Module")
    found = [
        (name, part) for name, part in module.named_modules() if isinstance(part, nn.Transformer)
    ]
    if len(found) != 1:
        named = ", ".join(name for name, _ in found[:5]) or "none"
        raise InputError(
            f"{type(module).__name__} must hold one torch.nn.Transformer, but holds {len(found)}: "
            f"{named}"
        )
    ((name, part),) = found
    return f"{name}." if name else "", part


def _parts(module: nn.Module, prefix: str) -> list[_Part]:
    """Return the parameters that are no part of the torch.nn.Transformer."""
    inside = {id(t) for name, t in module.named_parameters() if name.startswith(prefix)}
    parts: dict[int, _Part] = {}
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        for leaf, tensor in owner.named_parameters(recurse=False):
            name = f"{owner_name}.{leaf}" if owner_name else leaf
            if id(tensor) not in inside:
                part = parts.setdefault(id(tensor), _Part([], [], tensor))
                part.names.append(name)
                part.owners.append(owner)
    return list(parts.values())


def _is_embedding(part: _Part) -> bool:
    from torch import nn

    return any(isinstance(owner, nn.Embedding) for owner in part.owners)


def _tables(parts: Sequence[_Part], d_model: int) -> tuple[list[_Part], list[_Part]]:
    """Return the tables of tokens and the learned tables of positions."""
    tables, positions = [], []
    for part in parts:
        shape = tuple(part.tensor.shape)
        by_name = all(POSITION.search(name) for name in part.names)
        bare = not any(_kind(owner) in ("Linear", "LayerNorm") for owner in part.owners)
        if _is_embedding(part) and shape[1] != d_model:
            raise InputError(
                f"{part.names[0]} has vectors of width {shape[1]}, but the torch.nn.Transformer "
                f"has d_model={d_model}; the model has one width"
            )
        if by_name and (_is_embedding(part) or (bare and _axes(shape, d_model))):
            positions.append(part)
        elif _is_embedding(part):
            tables.append(part)
    if len(tables) > 2:
        listed = ", ".join(part.names[0] for part in tables)
        raise InputError(
            f"{listed} are {len(tables)} tables of tokens; the model has two at most (a table of "
            "positions is known by 'pos' in its name)"
        )
    return _by_side(tables), _by_side(positions)


def _by_side(tables: list[_Part]) -> list[_Part]:
    """Return two tables with the source's first, where their names tell."""
    if len(tables) == 2:
        first, second = map(_side, tables)
        if first != second and (first == "target" or second == "source"):
            return tables[::-1]
    return tables


def _side(part: _Part) -> str | None:
    """Return the side that the names of a table name, where they name only one."""
    named = {side for side, words in SIDES.items() if any(map(words.search, part.names))}
    return named.pop() if len(named) == 1 else None


def _kind(owner: nn.Module) -> str:
    return type(owner).__name__


def _head(parts: Sequence[_Part], tables: list[_Part], d_model: int) -> _Part | None:
    """Return the matrix of the output projection [V, d_model]; orders two nameless tables by it."""
    from torch import nn

    heads = [
        part
        for part in parts
        if any(isinstance(owner, nn.Linear) for owner in part.owners)
        and part.tensor.dim() == 2
        and part.tensor.shape[1] == d_model
        and all(name.endswith("weight") for name in part.names)
    ]
    tied = [part for part in heads if part in tables]
    sizes = {len(part.tensor) for part in tables}
    fitting = tied or [part for part in heads if not sizes or len(part.tensor) in sizes]
    if not fitting:
        return None
    if len(fitting) > 1:
        listed = ", ".join(part.names[0] for part in fitting)
        raise InputError(f"{listed} could each be the output projection; the model has one")
    head = fitting[0]
    if len(tables) == 2 and not any(map(_side, tables)):
        first, second = tables
        if first is head or (second is not head and len(second.tensor) != len(head.tensor)):
            tables.reverse()
    return head


def _tokens(tables: Sequence[_Part], head: _Part | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the embeddings and the head, and the names of the tables."""
    sizes = [len(part.tensor) for part in tables]
    out = len(head.tensor) if head else 1
    if not tables:
        found: dict[str, Any] = {"token_embeddings": "none"}
        found |= {"tgt_vocab_size": out, "src_vocab_size": out} if head else {}
        names = {}
    elif len(tables) == 1:
        found = {"token_embeddings": "shared", "src_vocab_size": sizes[0]}
        found["tgt_vocab_size"] = sizes[0]
        names = {"token_embedding": tables[0].names[0]}
    else:
        found = {"token_embeddings": "separate", "src_vocab_size": sizes[0]}
        found["tgt_vocab_size"] = sizes[1]
        names = {"source_embedding": tables[0].names[0], "target_embedding": tables[1].names[0]}
    if head is None:
        found |= {"output_projection": "none", "output_bias": False}
        return found, names
    tied = any(part is head for part in tables)
    if tied and head is not tables[-1]:
        raise InputError(
            f"{head.names[0]} of the source is tied to the head; the model ties the target's"
        )
    if tables and out != sizes[-1]:
        raise InputError(
            f"{head.names[0]} has {out} outputs, but the target's table {tables[-1].names[0]} has "
            f"{sizes[-1]} tokens"
        )
    found["output_projection"] = "tied" if tied else "linear"
    found["output_bias"] = _linear(head).bias is not None
    return found, names


def _linear(head: _Part) -> nn.Module:
    """Return the linear layer that has a matrix."""
    from torch import nn

    return next(owner for owner in head.owners if isinstance(owner, nn.Linear))


def _head_rows(
    parts: Sequence[_Part], head: _Part | None, found: Mapping[str, Any]
) -> Iterator[Row]:
    if head is None:
        return
    bias = _linear(head).bias
    if found["output_projection"] == "linear":
        yield Row(head.names[0], "output_projection/kernel", transpose)
    if bias is not None:
        (part,) = (part for part in parts if part.tensor is bias)
        yield Row(part.names[0], "output_projection/bias")


def _axes(shape: tuple[int, ...], d_model: int) -> tuple[int | str, ...] | None:
    """Return the axes of a table of positions [.., L, .., d_model]; None if it has none."""
    if len(shape) < 2 or shape[-1] != d_model or sum(n != 1 for n in shape[:-1]) > 1:
        return None
    rows = [index for index, length in enumerate(shape[:-1]) if length != 1]
    place = rows[0] if rows else len(shape) - 2
    return (*(1 if i != place else "length" for i in range(len(shape) - 1)), "d_model")


def _learned_positions(
    positions: Sequence[_Part], d_model: int, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Row]]:
    """Return the fields and the rows of two learned tables of positions."""
    if not positions:
        return {}, []
    if len(positions) != 2:
        listed = ", ".join(part.names[0] for part in positions)
        raise InputError(
            f"{listed}: {len(positions)} learned table(s) of positions; the model has one for the "
            "source and one for the target, and none that both share"
        )
    shapes = [tuple(part.tensor.shape) for part in positions]
    axes = [_axes(shape, d_model) for shape in shapes]
    rows = [shape[own.index("length")] for shape, own in zip(shapes, axes, strict=True)]
    if rows[0] != rows[1]:
        raise InputError(
            f"{positions[0].names[0]} has {rows[0]} positions and {positions[1].names[0]} has "
            f"{rows[1]}; the model has one max_length for both"
        )
    found = {"positions": "learned", "max_length": rows[0] - fields.get("position_offset", 0)}
    table_rows = []
    for side, part, own in zip(("source", "target"), positions, axes, strict=True):
        shape = tuple(-1 if axis == "length" else axis for axis in own) if len(own) > 2 else ()
        path = f"{side}_positions/embedding"
        table_rows.append(Row(part.names[0], path, Operation(shape=shape)))
    return found, table_rows


def _check_all_used(
    module: nn.Module,
    parts: Sequence[_Part],
    used: Sequence[_Part],
    found: Mapping[str, Any],
    head: _Part | None,
) -> None:
    """Refuse a parameter that has no place in the model."""
    known = {id(part.tensor) for part in used}
    if head is not None and found["output_bias"]:
        known.add(id(_linear(head).bias))
    for part in parts:
        if id(part.tensor) not in known:
            raise InputError(
                f"{part.names[0]} {list(part.tensor.shape)} of a {_kind(part.owners[0])} has no "
                f"place in the model; {type(module).__name__} may have embeddings, tables of "
                "positions and a head beside its torch.nn.Transformer"
            )


def _padding(tables: Sequence[_Part]) -> dict[str, int]:
    """Return the id of padding that the tables of tokens agree on."""
    ids = {getattr(owner, "padding_idx", None) for part in tables for owner in part.owners}
    ids -= {None}
    return {"pad_id": ids.pop()} if len(ids) == 1 else {}


def _buffers(
    module: nn.Module, d_model: int, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Buffer]]:
    """Return the fields of the sinusoids that a module holds, and the buffers that it saves."""
    saved, buffers = module.state_dict(), []
    kinds: dict[str, str] = {}
    lengths = []
    added = fields.get("positions") != "none"
    for name, tensor in _constants(module):
        array = as_numpy(tensor)
        axes = _axes(array.shape, d_model) if array.dtype.name in FLOATS else None
        kind = _sinusoid(array, axes, d_model) if axes and added else None
        value: Any = _constant(array)
        if kind is not None:
            length = array.shape[axes.index("length")]
            value = PositionTable(axes, length)
            kinds.setdefault(kind, name)
            lengths.append(length)
        elif axes and added and POSITION.search(name):
            raise InputError(
                f"{name} {list(array.shape)} holds positions of another kind than "
                f"{', '.join(SINUSOIDS)}"
            )
        if name in saved:
            buffers.append(Buffer(name, value))
    if len(kinds) > 1:
        named = ", ".join(f"{name} holds {kind!r}" for kind, name in kinds.items())
        raise InputError(f"{named}; the model has one kind of positions")
    found = {"positions": next(iter(kinds)), "max_length": min(lengths)} if kinds else {}
    return found, buffers


def _constants(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a module, and the tensors that are plain attributes of it."""
    import torch

    yield from module.named_buffers(remove_duplicate=False)
    for owner_name, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield f"{owner_name}.{name}" if owner_name else name, value


def _constant(array: np.ndarray) -> Any:
    """Return the value of a buffer that depends on nothing, as a causal mask."""
    kept = array.copy()
    return lambda config: kept


def _sinusoid(array: np.ndarray, axes: tuple[int | str, ...], d_model: int) -> str | None:
    """Return the kind of the sinusoids in a table of positions, or None."""
    length = array.shape[axes.index("length")]
    tolerance = COMPUTED_TOLERANCE + HALF_ROUNDING.get(array.dtype.name, 0)
    for kind in SINUSOIDS:
        try:
            config = TransformerConfig(d_model=d_model, num_heads=1, positions=kind)
        except InputError:  # a kind that this width cannot have
            continue
        if np.abs(PositionTable(axes, length)(config) - array).max() <= tolerance:
            return kind
    return None


def _config(
    told: Mapping[str, Any], found: Mapping[str, Any], fields: Mapping[str, Any]
) -> TransformerConfig:
    """Return the config of a body and the parts around it, with the fields of the caller."""
    around = ("embedding_scale", "embedding_dropout")  # of the body alone, "none"
    known = {**told, **{name: getattr(TransformerConfig, name) for name in around}, **found}
    for name, value in fields.items():
        TransformerConfig.check_value(name, value)
        free = name in UNTOLD or (name == "positions" and known[name] in ("none", value))
        free |= name == "positions" and value == "none" and known[name] != "learned"
        free |= name == "output_projection" and known[name] == "none" and value == "tied"
        if name == "max_length" and known["positions"] == "learned":
            free = False
        if not free and known[name] != value:
            raise InputError(f"{name}={value!r}, but the module has {known[name]!r}")
    return TransformerConfig.from_dict({**known, **fields})


def _with_copies(module: nn.Module, layout: Layout, config: TransformerConfig) -> Layout:
    """Return the layout with a row for every other name of a parameter, as tied copies have."""
    pairs = {pair.foreign: pair for pair in expand(layout, config)}
    tensors = dict(module.named_parameters(remove_duplicate=False))
    owners = {id(tensors[name]): pair for name, pair in pairs.items() if name in tensors}
    rows = []
    for name, tensor in tensors.items():
        if name not in pairs and id(tensor) in owners:
            pair = owners[id(tensor)]
            paths = pair.paths if len(pair.paths) > 1 else pair.paths[0]
            rows.append(Row(name, paths, pair.operation))
    return dataclasses.replace(layout, rows=(*layout.rows, *rows))
