"""Embeddings, a torch.nn.Transformer and a head in one module: its config and its layout."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from jax_transformer.config import SPECIAL_IDS, TransformerConfig
from jax_transformer.config.declared import checked_fields, declarations
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.layouts.torch_nn import torch_nn_config, transformer
from jax_transformer.convert.table import Buffer, Layout, Operation, Row, expand, transpose
from jax_transformer.convert.transfer import COMPUTED_TOLERANCE, FREE_FIELDS, HALF_ROUNDING
from jax_transformer.errors import InputError
from jax_transformer.storage.weights.arrays import FLOATS, as_numpy

if TYPE_CHECKING:
    import torch
    from torch import nn

# Fields that no part of a module shows: its forward function, or its user, decides.
SCALES = ("embedding_scale", "position_offset", "output_scale", "attention_scale")
UNTOLD = (*FREE_FIELDS, *SCALES, *SPECIAL_IDS)
READ_IT = "`jax-transformer suggest` reads what another program computes"
POSITION = re.compile(r"pos|wpe|\bpe\b", re.IGNORECASE)
SOURCE = re.compile(r"src|source|enc|inp", re.IGNORECASE)
TARGET = re.compile(r"tgt|trg|target|dec|out", re.IGNORECASE)
POSITIONS = get_args(declarations(TransformerConfig)["positions"])
SINUSOIDS = tuple(kind for kind in POSITIONS if kind.startswith("sinusoidal"))


class ModuleDescription(NamedTuple):
    """A module's config, and the names and shapes of its state_dict.

    Attributes:
        config: The shape of the model.
        layout: The names and shapes of its tensors.
    """

    config: TransformerConfig
    layout: Layout


class _Part(NamedTuple):
    """A parameter outside of the torch.nn.Transformer, with the names of its tied copies."""

    names: list[str]
    owners: list[nn.Module]
    tensor: torch.Tensor

    def owner(self, kind: type[nn.Module]) -> nn.Module | None:
        return next((owner for owner in self.owners if isinstance(owner, kind)), None)

    @property
    def side(self) -> int:
        """0 if the names name the source alone, 2 if the target alone, otherwise 1."""
        named = [any(map(words.search, self.names)) for words in (SOURCE, TARGET)]
        return 1 + named[1] - named[0]


def torch_nn_model(module: nn.Module, **fields: Any) -> ModuleDescription:
    """Return the config and the layout of `module`, which holds one torch.nn.Transformer.

    It finds the tables of tokens (one shared table, or two), learned tables of positions, the
    linear head and whether its matrix is tied, and buffers of sinusoids, whose kind it knows by
    their values. The module loads what `to_torch` writes by the layout, with `strict=True`.

    A module does not show what its `forward` does. Pass those `fields` whose default is not what
    yours does, and compare the outputs of both models afterwards:

    - `embedding_scale`: "sqrt_d_model" unless given, as in the paper; "none" where the tokens'
      vectors are not multiplied.
    - `positions`: the kind of the table that the module has; "none" without a table, and where it
      is given because `forward` does not add the table.
    - `pad_id`: `padding_idx` of the tables; where none has it, it must be given. `bos_id`: 1; where
      1 is padding, it must be given. `eos_id`: 2.
    - `max_length`: the rows of the shortest table, else 512.
    - `output_projection`: "none" without a head; "tied" where `forward` multiplies by the table.

    One learned table of positions for both sides becomes two parameters in JAX. `to_torch` refuses
    them once they differ: freeze "*_positions/*" in a training, or give both the sum of their
    gradients, as torch does.

    Names show which table is which (source, src, enc; target, tgt, dec; pos); the head also shows
    the target's. Two tables whose names show nothing are source and target in this order.

    Raises:
        InputError: The module has a part that the model cannot have, a field contradicts it, or
            nothing tells `pad_id`.
    """
    prefix, body = _find_transformer(module)
    body_fields = torch_nn_config(body).to_dict()
    d_model = body_fields["d_model"]
    parts = _parts(module, prefix)
    tables, positions = _tables(parts, d_model)
    head = _head(parts, tables, d_model)
    token_fields, token_rows = _tokens(parts, tables, head)
    learned, position_rows = _learned_positions(positions, d_model, fields)
    rows = (*transformer(prefix).rows, *token_rows, *position_rows)
    used = {row.foreign for row in rows}
    for part in parts:
        if used.isdisjoint(part.names):
            raise InputError(
                f"{part.names[0]} {list(part.tensor.shape)} of a {type(part.owners[0]).__name__} "
                "has no place in the model, which has embeddings, tables of positions and a head; "
                f"{READ_IT}"
            )
    computed, buffers = _buffers(module, d_model, fields)
    if learned and computed:
        raise InputError(
            f"the module has {computed['positions']!r} positions beside the learned ones of "
            f"{positions[0].names[0]}; the model has one kind"
        )
    config = _config(body_fields, token_fields | {"positions": "none"} | learned | computed, fields)
    if tables:
        _check_ids(type(module).__name__, config, token_fields | fields)
    layout = Layout(type(module).__name__, rows, tuple(buffers))
    return ModuleDescription(config, _with_copies(module, layout, config))


def _find_transformer(module: nn.Module) -> tuple[str, nn.Module]:
    """Return the prefix of the names of the only torch.nn.Transformer, and itself."""
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(f"a {type(module).__name__} is no torch.nn.Module")
    bodies = [pair for pair in module.named_modules() if isinstance(pair[1], nn.Transformer)]
    if len(bodies) != 1:
        named = ", ".join(name for name, _ in bodies[:5]) or "none"
        raise InputError(
            f"{type(module).__name__} must hold one torch.nn.Transformer, but holds "
            f"{len(bodies)}: {named}; {READ_IT}"
        )
    name, body = bodies[0]
    return f"{name}." if name else "", body


def _parts(module: nn.Module, prefix: str) -> list[_Part]:
    inside = {id(t) for name, t in module.named_parameters() if name.startswith(prefix)}
    parts: dict[int, _Part] = {}
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        for leaf, tensor in owner.named_parameters(recurse=False):
            if id(tensor) not in inside:
                part = parts.setdefault(id(tensor), _Part([], [], tensor))
                part.names.append(f"{owner_name}.{leaf}" if owner_name else leaf)
                part.owners.append(owner)
    return list(parts.values())


def _tables(parts: Sequence[_Part], d_model: int) -> tuple[list[_Part], list[_Part]]:
    """Return the tables of tokens and the learned tables of positions, the source's first."""
    from torch import nn

    tables, positions = [], []
    for part in parts:
        shape = tuple(part.tensor.shape)
        embedding = part.owner(nn.Embedding) is not None
        if embedding and shape[1] != d_model:
            raise InputError(
                f"{part.names[0]} has vectors of width {shape[1]}, but the torch.nn.Transformer "
                f"has d_model={d_model}; the model has one width"
            )
        bare = not any(type(owner) in (nn.Linear, nn.LayerNorm) for owner in part.owners)
        for_positions = all(map(POSITION.search, part.names))
        if for_positions and (embedding or (bare and _axes(shape, d_model))):
            positions.append(part)
        elif embedding:
            tables.append(part)
    if len(tables) > 2:
        raise InputError(
            f"{_listed(tables)} are {len(tables)} tables of tokens; the model has two at most (a "
            f"table of positions is known by 'pos' in its name); {READ_IT}"
        )
    return sorted(tables, key=lambda part: part.side), sorted(positions, key=lambda part: part.side)


def _listed(parts: Sequence[_Part]) -> str:
    return ", ".join(part.names[0] for part in parts)


def _head(parts: Sequence[_Part], tables: list[_Part], d_model: int) -> _Part | None:
    """Return the matrix of the output projection [V, d_model]; orders two nameless tables by it."""
    from torch import nn

    heads = [
        part
        for part in parts
        if part.owner(nn.Linear) is not None
        and part.tensor.dim() == 2
        and part.tensor.shape[1] == d_model
        and all(name.endswith("weight") for name in part.names)
    ]
    tied = [part for part in heads if part in tables]
    sizes = {len(part.tensor) for part in tables}
    possible = tied or [part for part in heads if not sizes or len(part.tensor) in sizes]
    if len(possible) > 1:
        listed = _listed(possible)
        raise InputError(f"{listed} could each be the output projection; the model has one")
    if not possible:
        return None
    head = possible[0]
    if len(tables) == 2 and all(part.side == 1 for part in tables):
        first, second = tables
        if first is head or (second is not head and len(second.tensor) != len(head.tensor)):
            tables.reverse()
    return head


def _tokens(
    parts: Sequence[_Part], tables: Sequence[_Part], head: _Part | None
) -> tuple[dict[str, Any], list[Row]]:
    """Return the fields and the rows of the embeddings and of the head."""
    from torch import nn

    names = ("source_embedding", "target_embedding") if len(tables) == 2 else ("token_embedding",)
    named = zip(tables, names, strict=False)
    rows = [Row(part.names[0], f"{name}/embedding") for part, name in named]
    fields: dict[str, Any] = {"token_embeddings": ("none", "shared", "separate")[len(tables)]}
    sizes = [len(part.tensor) for part in tables or [head] if part]
    if sizes:
        fields |= {"src_vocab_size": sizes[0], "tgt_vocab_size": sizes[-1]}
    padding = {getattr(owner, "padding_idx", None) for part in tables for owner in part.owners}
    if len(padding - {None}) == 1:
        fields["pad_id"] = (padding - {None}).pop()
    if head is None:
        return fields | {"output_projection": "none", "output_bias": False}, rows
    tied = any(part is head for part in tables)
    if tied and head is not tables[-1]:
        raise InputError(f"{head.names[0]} of the source is tied to the head, not the target's")
    if len(head.tensor) != sizes[-1]:
        raise InputError(
            f"{head.names[0]} has {len(head.tensor)} outputs, but the target's table "
            f"{tables[-1].names[0]} has {sizes[-1]} tokens"
        )
    if not tied:
        rows.append(Row(head.names[0], "output_projection/kernel", transpose))
    bias = head.owner(nn.Linear).bias
    rows += [Row(p.names[0], "output_projection/bias") for p in parts if p.tensor is bias]
    fields |= {"output_projection": "tied" if tied else "linear", "output_bias": bias is not None}
    return fields, rows


def _axes(shape: tuple[int, ...], d_model: int) -> tuple[int | str, ...] | None:
    """Return the axes of a table of positions [.., L, .., d_model]; None if it has none."""
    if len(shape) < 2 or shape[-1] != d_model or sum(n != 1 for n in shape[:-1]) > 1:
        return None
    place = next((i for i, length in enumerate(shape[:-1]) if length != 1), len(shape) - 2)
    return (*(1 if i != place else "length" for i in range(len(shape) - 1)), "d_model")


def _learned_positions(
    positions: Sequence[_Part], d_model: int, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Row]]:
    """Return the fields and the rows of learned tables of positions, one for both sides or two."""
    if not positions:
        return {}, []
    if len(positions) > 2:
        raise InputError(
            f"{_listed(positions)}: {len(positions)} learned tables of positions; the model has "
            "one for both sides, or one for the source and one for the target"
        )
    rows, lengths = [], []
    paths = ("source_positions/embedding", "target_positions/embedding")
    stack, held = ("copies", (paths,)) if len(positions) == 1 else ("rows", paths)
    for part, path in zip(positions, held, strict=True):
        axes = _axes(tuple(part.tensor.shape), d_model)
        lengths.append(part.tensor.shape[axes.index("length")])
        foreign = tuple(-1 if axis == "length" else axis for axis in axes) if len(axes) > 2 else ()
        rows.append(Row(part.names[0], path, Operation(shape=foreign), stack=stack))
    if lengths[0] != lengths[-1]:
        raise InputError(
            f"{positions[0].names[0]} has {lengths[0]} positions and {positions[1].names[0]} has "
            f"{lengths[1]}; the model has one max_length for both"
        )
    max_length = lengths[0] - fields.get("position_offset", 0)
    return {"positions": "learned", "max_length": max_length}, rows


def _buffers(
    module: nn.Module, d_model: int, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Buffer]]:
    """Return the fields of the sinusoids that a module holds, and the buffers that it saves."""
    saved, buffers, lengths = module.state_dict(), [], []
    kinds: dict[str, str] = {}
    for name, tensor in _constants(module):
        array = as_numpy(tensor)
        axes = None
        if fields.get("positions") != "none" and array.dtype.name in FLOATS:
            axes = _axes(array.shape, d_model)
        value: Any = _constant(array)
        if axes and (kind := _sinusoid(array, axes, d_model)):
            value = PositionTable(axes, array.shape[axes.index("length")])
            kinds.setdefault(kind, name)
            lengths.append(value.length)
        elif axes and POSITION.search(name):
            raise InputError(
                f"{name} {list(array.shape)} holds positions of another kind than "
                f"{', '.join(SINUSOIDS)}; {READ_IT}"
            )
        if name in saved:
            buffers.append(Buffer(name, value))
    if len(kinds) > 1:
        named = ", ".join(f"{name} holds {kind!r}" for kind, name in kinds.items())
        raise InputError(f"{named}; the model has one kind of positions")
    computed_fields = {"positions": next(iter(kinds)), "max_length": min(lengths)} if kinds else {}
    return computed_fields, buffers


def _constant(array: np.ndarray) -> Callable[[TransformerConfig], np.ndarray]:
    copy = array.copy()  # of what depends on nothing, such as a causal mask
    return lambda config: copy


def _constants(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers, and the tensors that are plain attributes."""
    import torch

    yield from module.named_buffers(remove_duplicate=False)
    for owner_name, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield f"{owner_name}.{name}" if owner_name else name, value


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
    body: dict[str, Any], module_fields: Mapping[str, Any], fields: Mapping[str, Any]
) -> TransformerConfig:
    around = ("embedding_scale", "embedding_dropout")  # of the body alone, "none"
    values = body | {name: getattr(TransformerConfig, name) for name in around} | module_fields
    positions = values["positions"]
    free = {*UNTOLD}
    # What `forward` may do or leave undone, whatever parts the module has.
    choices = {("positions", value) for value in POSITIONS if positions == "none"}
    if positions == "learned":
        free.remove("max_length")
    else:
        choices.add(("positions", "none"))
    if values["output_projection"] == "none":
        choices.add(("output_projection", "tied"))
    for name, value in checked_fields(TransformerConfig, fields).items():
        if not (name in free or (name, value) in choices or values[name] == value):
            raise InputError(f"{name}={value!r}, but the module has {values[name]!r}")
    return TransformerConfig.from_dict({**values, **fields})


def _check_ids(name: str, config: TransformerConfig, told: Mapping[str, Any]) -> None:
    """Refuse ids that nothing tells and that a guess would make wrong in silence."""
    if "pad_id" not in told:
        raise InputError(
            f"no table of {name} has padding_idx: give the id of padding that its data has, for "
            f"example torch_nn_model(module, pad_id={config.pad_id})"
        )
    if "bos_id" not in told and config.bos_id == config.pad_id:
        raise InputError(
            f"pad_id={config.pad_id} is also the usual bos_id: give the ids that begin and end a "
            f"target, for example torch_nn_model(module, bos_id={config.eos_id}, "
            f"eos_id={config.eos_id + 1})"
        )


def _with_copies(module: nn.Module, layout: Layout, config: TransformerConfig) -> Layout:
    """Return the layout with a row for every other name of a parameter, as tied copies have."""
    rows = {row.foreign: row for row in expand(layout, config)}
    tensors = dict(module.named_parameters(remove_duplicate=False))
    owners = {id(tensors[name]): row for name, row in rows.items() if name in tensors}
    copies = (
        Row(name, owner.paths, owner.operation, stack=owner.stack)
        for name, tensor in tensors.items()
        if name not in rows and (owner := owners.get(id(tensor)))
    )
    return dataclasses.replace(layout, rows=(*layout.rows, *copies))
