"""The parts of an unknown model: two stacks of layers, tables, norms outside, computed buffers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.convert.table import Shape
from jax_transformer.convert.transfer import COMPUTED_TOLERANCE, HALF_ROUNDING
from jax_transformer.errors import InputError
from jax_transformer.model.functional import sinusoidal_positions
from jax_transformer.porting.blocks import Group, find_groups
from jax_transformer.porting.names import (
    PLACE,
    Stack,
    Unit,
    Units,
    find_stacks,
    find_units,
    most_common_width,
    natural_key,
    without_window,
    words,
)
from jax_transformer.porting.places import common_module

SINUSOIDS = (
    "sinusoidal",
    "sinusoidal_halves",
    "sinusoidal_tensor2tensor",
    "sinusoidal_per_column",
)
FIRST_ROWS = 4  # of a table that may hold sinusoids
MOST_TABLES = 5  # source, target and output, and two of positions
MOST_OUTSIDE = 100  # tensors outside the layers
ALONE_WORDS = {"an encoder": {"encoder", "bert"}, "a decoder": {"decoder", "gpt", "lm"}}
SHOWN = 12  # names in a message
LOSS_WORDS = {"criterion", "loss"}  # of a weight for each token that is no bias


class StackAlone(InputError):
    """The tensors of an encoder or of a decoder: no record and no layout would help."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """The blocks of a stack's layers; the names begin behind the layer's number.

    Attributes:
        relative: Table of relative biases [buckets, heads], or "".
        has_relative_per_layer: Whether each layer has such a table, and not the first alone.
        unused: Tensors without meaning, as masks.
    """

    stack: Stack
    attentions: tuple[Group, ...]
    feed_forward: Group
    norms: tuple[Unit, ...]
    relative: str
    has_relative_per_layer: bool
    unused: tuple[str, ...]

    def module(self, place: int) -> str:
        """Return the module whose output may be that of the layer at this place; "" for none.

        Where the layers are no modules, it is the one that holds the feed-forward network.
        """
        stack = self.stack
        if not any(map(PLACE.search, stack.shapes)):
            return f"{stack.before}{stack.indices[place]}"
        for suffixes in (stack.shapes, [unit.matrix for unit in self.feed_forward.units]):
            module, other = (
                common_module(stack.name(index, suffix).rpartition(".")[0] for suffix in suffixes)
                for index in (place, place - 1)
            )
            if module != other:
                return module
        return ""


class Positions(NamedTuple):
    """A sinusoidal table among the tensors: its name, kind, first position and shape."""

    name: str
    kind: str
    offset: int
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Structure:
    """The parts of a model; `copies` are the names of the originals by those of equal copies.

    `tables` are embeddings of tokens and of positions, and the output projection.
    """

    width: int
    shapes: Mapping[str, Shape]
    encoder: Layer
    decoder: Layer
    tables: tuple[Unit, ...]
    norms: tuple[Unit, ...]
    output_biases: tuple[str, ...]
    sinusoids: tuple[Positions, ...]
    copies: Mapping[str, str]
    unused: tuple[str, ...]
    num_heads: int | None


def find_structure(tensors: Mapping[str, np.ndarray], num_heads: int | None = None) -> Structure:
    """Return the parts of the model that tensors of these names, shapes and values make up.

    Args:
        num_heads: The number of heads, where each has tensors of its own, which are joined here.
    """
    buffers = [name for name, array in tensors.items() if array.dtype.kind in "iub"]
    tensors = {name: array for name, array in tensors.items() if name not in buffers}
    shapes = {name: without_window(tuple(array.shape)) for name, array in tensors.items()}
    stacks = find_stacks(shapes)
    if len(stacks) == 1 and 2 * len(shapes) < 3 * _size(stacks[0]):  # no second one is beside it
        raise _alone(stacks[0], tensors)
    if len(stacks) != 2:
        listed = ", ".join(f"{s.before}{_range(s.indices)}" for s in stacks[:SHOWN]) or "none"
        raise InputError(
            f"found {len(stacks)} stacks of layers among {len(shapes)} tensors ({listed}); "
            "an encoder-decoder has two, each with numbered layers that are alike"
        )
    width = most_common_width(shape for stack in stacks for shape in stack.shapes.values())
    inside = {
        stack.name(place, suffix)
        for stack in stacks
        for place in range(len(stack.indices))
        for suffix in (*stack.shapes, *stack.first_only)
    }
    outside = {name: shape for name, shape in shapes.items() if name not in inside}
    encoder, decoder = _order([_layer(stack, tensors, width) for stack in stacks])
    _check_shared(tensors, (encoder, decoder))
    if len(outside) > MOST_OUTSIDE:
        raise InputError(_no_place(sorted(outside, key=natural_key), shapes))
    sinusoids = tuple(_sinusoids(outside, tensors, width))
    computed = {positions.name for positions in sinusoids}
    copies = _copies(tensors, outside.keys() - computed)
    learned = {name: s for name, s in outside.items() if name not in computed | copies.keys()}
    units = find_units(learned, width)
    relative = [side.stack.name(0, side.relative) for side in (encoder, decoder) if side.relative]
    if len(relative) == 1:
        raise InputError(_no_place(relative, shapes))
    tables = [u for u in units.products if _is_table(u, width)]
    if len(tables) > MOST_TABLES:  # a further head has a length of its own
        sizes = Counter(math.prod(table.shape) for table in tables)
        tables = [table for table in tables if sizes[math.prod(table.shape)] > 1]
        tables = tables if len(tables) <= MOST_TABLES else []
    odd = [u for u in units.products if u not in tables]
    vocabularies = {max(unit.shape) for unit in tables}
    loose = [*units.other, *(unit.matrix for unit in odd if not unit.bias)]
    biases = [
        name
        for name in loose
        if shapes[name] and max(shapes[name]) == math.prod(shapes[name]) in vocabularies
        if LOSS_WORDS.isdisjoint(words(name))
    ]
    meaningless = [n for n in loose if n not in biases and _is_buffer(tensors[n], units)]
    unplaced = [name for name in loose if name not in (*biases, *meaningless)]
    unplaced += [unit.matrix for unit in odd if unit.bias]
    if unplaced:
        raise InputError(_no_place(unplaced, shapes))
    return Structure(
        width,
        {name: tuple(array.shape) for name, array in tensors.items()},
        encoder,
        decoder,
        tuple(tables),
        tuple(_by_value(norm, tensors) for norm in units.norms),
        tuple(biases),
        sinusoids,
        copies,
        (*buffers, *meaningless),
        num_heads,
    )


def _size(stack: Stack) -> int:
    """Return the number of a stack's tensors."""
    return len(stack.indices) * len(stack.shapes) + len(stack.first_only)


def _alone(stack: Stack, tensors: Mapping[str, np.ndarray]) -> StackAlone:
    """Return the refusal of a model with one stack, by its attentions and its words."""
    width = most_common_width(stack.shapes.values())
    try:
        attentions = len(_layer(stack, tensors, width).attentions)
    except InputError:  # it would have no place beside another stack either
        attentions = 1
    spoken = {word for name in tensors for word in words(name)}
    parts = [part for part, named in ALONE_WORDS.items() if named & spoken]
    if attentions > 1:
        parts = ["a decoder"]
    kind = parts[0] if len(parts) == 1 else "an encoder or a decoder"
    return StackAlone(
        f"{kind} alone: one stack of layers, {stack.before}{_range(stack.indices)}; suggest "
        "takes encoder-decoders, whose weights are two stacks"
    )


def position_kind(table: np.ndarray, width: int) -> tuple[str, int] | None:
    """Return kind and first position of a table of sinusoids [..., d_model], or None."""
    rows = np.asarray(table, np.float64).reshape(-1, width)
    if not 1 <= len(rows) <= 2**20 or not np.isfinite(rows).all():
        return None
    for kind, offset in itertools.product(SINUSOIDS, (0, 1, 2)):
        if (width % 2 and kind != "sinusoidal_tensor2tensor") or width < 4:
            continue
        if offset and kind != "sinusoidal_tensor2tensor":
            continue
        # Nearly every table of tokens differs in its first rows; all of it would take seconds.
        if all(
            np.max(np.abs(sinusoidal_positions(count, width, kind, offset) - rows[:count]))
            <= COMPUTED_TOLERANCE + HALF_ROUNDING.get(table.dtype.name, 0)
            for count in (min(FIRST_ROWS, len(rows)), len(rows))
        ):
            return kind, offset
    return None


def _layer(stack: Stack, tensors: Mapping[str, np.ndarray], width: int) -> Layer:
    """Return the blocks of a stack's layers."""
    units = find_units(stack.shapes, width)
    first = {suffix: tensors[stack.name(0, suffix)] for suffix in stack.shapes}
    unused = [name for name in units.other if _is_buffer(first[name], units)]
    if normed := [name for name in unused if first[name].ndim == 1 and "norm" in name.lower()]:
        raise InputError(
            f"{stack.name(0, normed[0])}: a norm of heads: suggest does not search those of "
            "queries and keys; write a layout with query_key_norm=True"
        )
    odd = [name for name in units.other if name not in unused]
    products: list[Unit] = []
    relative: list[str] = []
    for unit in units.products:
        if len(unit.shape) == 2 and width not in unit.shape and unit.shape[0] != unit.shape[1]:
            relative.append(unit.matrix)
        elif not unit.bias and _is_constant(first[unit.matrix]):
            unused.append(unit.matrix)
        elif len(unit.shape) > 3 or (len(unit.shape) == 3 and width not in unit.shape):
            odd.append(unit.matrix)
        elif len(unit.shape) == 3 and unit.bias and unit.shape[-1] < 16 and unit.shape[0] == width:
            odd.append(unit.matrix)  # the kernel of a convolution [outputs, inputs, window]
        else:
            products.append(unit)
    has_relative_per_layer = bool(relative)
    relative += [name for name in stack.first_only if len(stack.first_only[name]) == 2]
    odd += relative[1:]
    odd += [name for name in stack.first_only if name not in relative]
    if odd:
        shapes = {stack.template(name): (stack.shapes | stack.first_only)[name] for name in odd}
        raise InputError(_no_place(list(shapes), shapes))
    try:
        groups = find_groups(products, width)
    except InputError as error:
        raise InputError(f"{stack.before}{_range(stack.indices)}: {error}") from error
    attentions = tuple(group for group in groups if group.is_attention)
    (network,) = (group for group in groups if not group.is_attention)
    return Layer(
        stack,
        attentions,
        network,
        tuple(_by_value(norm, first) for norm in units.norms),
        "".join(relative),
        has_relative_per_layer,
        tuple(unused),
    )


def _order(layers: list[Layer]) -> tuple[Layer, Layer]:
    """Return the encoder, whose layers have one attention, and the decoder."""
    encoder, decoder = sorted(layers, key=lambda layer: len(layer.attentions))
    counts = len(encoder.attentions), len(decoder.attentions)
    if counts != (1, 2):
        raise InputError(
            f"the layers of {encoder.stack.before} have {counts[0]} attentions, those of "
            f"{decoder.stack.before} {counts[1]}; an encoder's have one and a decoder's two "
            "(suggest does not search merged attention)"
        )
    # One before or after each sublayer, or both; in a decoder also one of the memory.
    for layer, counts in ((encoder, (2, 4)), (decoder, (3, 4, 6, 7))):
        if len(layer.norms) not in counts:
            raise InputError(
                f"{layer.stack.before}{_range(layer.stack.indices)}: {len(layer.norms)} norms in a "
                f"layer; this library has {' or '.join(map(str, counts))}"
            )
    return encoder, decoder


def _copies(tensors: Mapping[str, np.ndarray], names: Iterable[str]) -> dict[str, str]:
    """Return the original of every large tensor that has the bits of another one."""
    copies: dict[str, str] = {}
    originals: list[str] = []
    for name in sorted(names, key=natural_key):
        array = tensors[name]
        large = array.ndim > 1 and not _is_constant(array)
        for other in originals if large else ():
            if array.dtype == tensors[other].dtype and np.array_equal(tensors[other], array):
                copies[name] = other
                break
        else:
            originals.append(name)
    return copies


def _check_shared(tensors: Mapping[str, np.ndarray], layers: Iterable[Layer]) -> None:
    """Refuse layers that share weights: in the tree of parameters each has its own."""
    names = [
        layer.stack.name(place, suffix)
        for layer in layers
        for place, suffix in itertools.product(range(len(layer.stack.indices)), layer.stack.shapes)
        if suffix not in layer.unused
    ]
    originals: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        array = tensors[name]
        alike = originals.setdefault((array.shape, array.reshape(-1)[:16].tobytes()), [])
        for other in alike:
            # A file may have lost that two names are one tensor. Vectors of layers that were copied
            # are equal until they are trained, matrices are drawn anew.
            is_one = array.ctypes.data == tensors[other].ctypes.data
            is_drawn = array.ndim > 1 and not _is_constant(array)
            if is_one or (is_drawn and np.array_equal(array, tensors[other])):
                raise InputError(
                    f"{other} and {name} are equal: layers that share weights have no place in the "
                    "model, which would train each alone; give each its own (copy.deepcopy), train "
                    "your program, and save it again"
                )
        alike.append(name)


def _sinusoids(
    shapes: Mapping[str, Shape], tensors: Mapping[str, np.ndarray], width: int
) -> Iterable[Positions]:
    for name, shape in sorted(shapes.items(), key=lambda item: natural_key(item[0])):
        table = len(shape) > 1 and shape[-1] == width and sum(n > 1 for n in shape) <= 2
        if table and (kind := position_kind(tensors[name], width)):
            yield Positions(name, *kind, shape)


def _by_value(norm: Unit, tensors: Mapping[str, np.ndarray]) -> Unit:
    """Return a norm whose scale is the one of its two vectors that is nearer to ones."""
    if not norm.bias:
        return norm
    far = [np.mean(np.abs(tensors[name] - 1.0)) for name in (norm.scale, norm.bias)]
    return norm if far[0] <= far[1] else dataclasses.replace(norm, scale=norm.bias, bias=norm.scale)


def _is_table(unit: Unit, width: int) -> bool:
    """Return whether a matrix has rows or columns of the model's width, and no third axis."""
    if len(unit.shape) == 2:
        return width in unit.shape
    return unit.shape[-1] == width and sum(length > 1 for length in unit.shape) == 2


def _is_buffer(array: np.ndarray, units: Units) -> bool:
    """Return whether a tensor is no parameter: a constant, or a vector that suits no product."""
    lengths = {length for unit in units.products for length in unit.shape}
    return _is_constant(array) or (array.ndim == 1 and len(array) not in lengths)


def _is_constant(array: np.ndarray) -> bool:
    """Return whether a tensor is no parameter: one number or none, or a mask."""
    if array.size <= 1:
        return True
    return array.ndim > 1 and len(np.unique(array.reshape(-1)[:4096])) <= 2


def _no_place(names: list[str], shapes: Mapping[str, Shape]) -> str:
    shown = ", ".join(f"{name} {list(shapes[name])}" for name in names[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    kinds = {len(shapes[name]) for name in names}
    cause = " (a convolution?)" if kinds & {3, 4} else ""
    remedy = "; leave out what is not needed by --drop NAME ..."
    return f"{shown}{more}: no place in a Transformer of this library{cause}{remedy}"


def _range(indices: tuple[int, ...]) -> str:
    return f"{{{indices[0]}..{indices[-1]}}}"
