"""The rule language: a layout is a table of rows, and both directions are read from it.

A foreign tensor has a name in another program. A parameter has a path: the keys of the nested dict,
joined by slashes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, no_type_check

import msgspec
import numpy as np
from flax import traverse_util

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked_fields
from jax_transformer.convert.report import nearest
from jax_transformer.errors import InputError
from jax_transformer.model.tree import LAYER, PARAMETERS, Shape, parameter_shapes

Tree = Mapping[str, Any]
Join = Literal["rows", "columns", "heads", "copies"]
JOIN_AXES = {"rows": 0, "columns": -1, "heads": 1}  # of the parts; heads have an axis of their own

# Numbers of a config that a foreign shape may name.
SIZES = tuple("d_model num_heads head_dim d_ff src_vocab_size tgt_vocab_size max_length".split())
WORD = re.compile(r"\{(\w+)\}")
HEAD = "{head}"  # in a foreign name: the number of a head, counted from 0
MOST_HEADS = 1024  # that have a tensor each
KEY = "[^/]+"  # of a nested dict; in a path, a word in braces stands for one key


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class Operation:
    """How a parameter becomes its foreign tensor: it is transposed first, then reshaped.

    Attributes:
        transposed: Whether the two axes change places.
        shape: The foreign shape, where reshaping is needed. Each entry is a length, the name of
            a config field, for example "num_heads", or -1 for the one length that follows.
    """

    transposed: bool = False
    shape: tuple[int | str, ...] = ()

    def __post_init__(self) -> None:
        lengths = [n for n in self.shape if not isinstance(n, str)]
        are_lengths = all(type(n) is int and (n >= 1 or n == -1) for n in lengths)
        if not are_lengths or lengths.count(-1) > 1 or {*self.shape} - {*lengths} - {*SIZES}:
            raise InputError(
                f"shape={str(list(self.shape))[:200]} must hold lengths, one -1 at most, and names "
                f"of {', '.join(SIZES)}"
            )

    def foreign_shape(self, shape: Shape, config: TransformerConfig) -> Shape:
        """Return the foreign shape of a parameter of this shape."""
        if not self.shape:
            return shape[::-1] if self.transposed else shape
        lengths = [getattr(config, n) if isinstance(n, str) else n for n in self.shape]
        product = math.prod(length for length in lengths if length != -1)
        return tuple(math.prod(shape) // product if n == -1 else n for n in lengths)

    def to_foreign(self, parameter: np.ndarray, foreign_shape: Shape) -> np.ndarray:
        """Return a parameter as the foreign tensor of this shape."""
        return (parameter.T if self.transposed else parameter).reshape(foreign_shape)

    def to_parameter(self, foreign: np.ndarray, shape: Shape) -> np.ndarray:
        """Return a foreign tensor as the parameter of this shape: the inverse."""
        return foreign.reshape(shape[::-1]).T if self.transposed else foreign.reshape(shape)


identity = Operation()
transpose = Operation(transposed=True)


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class Row:
    """A foreign tensor and the parameter that it holds.

    A word in braces stands for one name or number, the same on both sides. A row applies to every
    parameter of the config whose path it matches, perhaps to none. Several rows for one parameter
    are tied copies: `to_tensors` writes all of them, `to_params` needs one of them, and those that
    are present must be equal.

    Attributes:
        foreign: Name of the foreign tensor, for example "encoder.layers.{i}.linear1.weight". With
            the word {head}, which no path has, there is a tensor for each head, with the head's
            columns of the parameter: "layers.{i}.heads.{head}.query.weight".
        paths: Path of the parameter, for example "encoder/layers_{i}/self_attention/output/kernel";
            several paths if the foreign tensor stacks several parameters. A tuple when constructed.
        operation: How each parameter becomes the foreign tensor, or its part of the stack.
        zeros: Whether an absent foreign tensor means zeros.
        when: A field of the config and its value, without which the row is skipped, for
            example ("output_projection", "tied"); None for a row of every config.
        stack: How several parameters are stacked: "rows" along the first axis, [3 D, D] of three
            torch.nn.Linear; "columns" along the last axis, [D, 3 D] of a product x @ kernel;
            "heads" along the first axis head by head: head 0 of each parameter, then head 1 of
            each, and so on; "copies" not at all: each of them is the whole tensor, and `to_tensors`
            refuses parameters that differ.
    """

    foreign: str
    paths: str | tuple[str, ...]
    operation: Operation = identity
    zeros: bool = False
    when: tuple[str, Any] | None = None
    stack: Join = "rows"

    def __post_init__(self) -> None:
        paths = (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)
        object.__setattr__(self, "paths", paths)
        stack = f"{self.foreign!r}: stack={self.stack!r}"
        if self.stack not in get_args(Join):
            raise InputError(f"{stack} must be one of {', '.join(get_args(Join))}")
        if self.stack != "rows" and len(self.paths) == 1:
            raise InputError(f"{stack} needs several parameters, not one")
        for path in self.paths:
            if set(WORD.findall(path)) != set(WORD.findall(self.foreign.replace(HEAD, ""))):
                raise InputError(f"{self.foreign!r} and {path!r} must hold the same {{words}}")
        for template in (self.foreign, *self.paths):
            words = WORD.findall(template)
            are_names = all(map(str.isidentifier, words)) and len(set(words)) == len(words)
            if not are_names or set("{}") & set(WORD.sub("", template)):
                raise InputError(f"{template!r}: braces must hold a word, as {{i}}, each word once")
        if self.when is not None:
            checked_fields(TransformerConfig, dict([self.when]))
        if not self.paths:
            raise InputError(f"{self.foreign!r} must hold at least one parameter")

    def applies_to(self, config: TransformerConfig) -> bool:
        """Whether the config has the value that `when` names."""
        return self.when is None or getattr(config, self.when[0]) == self.when[1]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A foreign buffer that is computed and not learned, for example a position table.

    `to_params` compares it with the computed value; `to_tensors` writes the computed value, or what
    it is given.

    Attributes:
        foreign: Its name.
        value: Returns the array for a config. A float64 array is written in the dtype of the
            parameters, any other array in its own.
    """

    foreign: str
    value: Callable[[TransformerConfig], np.ndarray]

    def known_shape(self, config: TransformerConfig) -> Shape | None:
        """Return the shape without computing the value; None if only the value shows it."""
        lengths = getattr(self.value, "lengths", None)
        return None if lengths is None else lengths(config)


class Masks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which masks another program uses; prints how they differ from the usual ones.

    Attributes:
        encoder: Whether the encoder's attention hides the padding of the source.
        memory: Whether the attention to the memory hides it.
        target: Whether the padding of the target is hidden.
        causal: Whether later targets are hidden.
    """

    encoder: bool = True
    memory: bool = True
    target: bool = True
    causal: bool = True

    def __str__(self) -> str:
        source = {
            (False, False): "no source padding mask",
            (False, True): "no source padding mask in the encoder",
            (True, False): "no source padding mask in the cross-attention",
        }.get((self.encoder, self.memory))
        target = None if self.target else "no target padding mask"
        causal = None if self.causal else "not causal"
        return ", ".join(filter(None, (source, target, causal))) or "default"


USUAL_MASKS = Masks()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Another program's names and shapes for the model, or for a part of it.

    Attributes:
        name: Its name, in messages and in files.
        rows: The foreign tensors and their parameters.
        buffers: Foreign tensors that are computed and not learned.
        scope: Path of the part of the parameters that is converted; the paths of the rows are
            relative to it. "" is the whole model.
        unused: Names of foreign tensors that have no meaning: `to_params` does not read them.
        masks: What the other program hides; no tensor depends on it.
    """

    name: str
    rows: tuple[Row, ...]
    buffers: tuple[Buffer, ...] = ()
    scope: str = ""
    unused: tuple[str, ...] = ()
    masks: Masks = USUAL_MASKS

    def __repr__(self) -> str:
        """Return one line: a layout may have hundreds of rows."""
        counts = f"{len(self.rows)} rows, {len(self.buffers)} buffers"
        return f"{type(self).__name__}({self.name!r}: {counts}, masks: {self.masks})"


@dataclasses.dataclass(frozen=True)
class BoundRow:
    """A row applied to one config: a foreign tensor and the parameters that it holds."""

    foreign: str
    paths: tuple[str, ...]
    operation: Operation
    shapes: tuple[Shape, ...]  # of the parameters
    parts: tuple[Shape, ...]  # of the foreign tensor, one for each parameter
    zeros: bool = False
    stack: Join = "rows"
    num_heads: int = 1  # that the parts of a stack by "heads" have
    head: int | None = None  # whose columns of the parameters it holds

    def __post_init__(self) -> None:
        listed = ", ".join(str(list(part)) for part in self.parts)
        begin, end = {"columns": (0, -1), "copies": (0, None)}.get(self.stack, (1, None))
        others = {part[begin:end] for part in self.parts}
        if len(others) > 1:
            raise InputError(f"{self.foreign!r} cannot stack {listed} with stack={self.stack!r}")
        for shape, part in zip(self.shapes, self.parts, strict=True):
            if math.prod(shape) != math.prod(part):
                raise InputError(f"{self.foreign!r}: {list(shape)} cannot become {list(part)}")
        if self.stack == "heads" and any(part[0] % self.num_heads for part in self.parts):
            raise InputError(
                f"{self.foreign!r}: stack='heads' needs first axes that num_heads={self.num_heads} "
                f"divides, not {listed}"
            )

    def columns(self, parameter: np.ndarray) -> np.ndarray:
        """Return the columns of a parameter that it holds."""
        if self.head is None:
            return parameter
        return np.split(parameter, self.num_heads, axis=-1)[self.head]

    @property
    def shape(self) -> Shape:
        """Shape of the foreign tensor."""
        if self.stack == "copies":
            return self.parts[0]
        if self.stack == "columns":
            return (*self.parts[0][:-1], sum(part[-1] for part in self.parts))
        return (sum(part[0] for part in self.parts), *self.parts[0][1:])

    @property
    def kind(self) -> str:
        """The kind of its entry in a report."""
        if len(self.paths) > 1:
            return "split"
        if self.operation.shape:
            return "reshaped"
        return "transposed" if self.operation.transposed else "mapped"

    def is_written_as(self, other: BoundRow) -> bool:
        """Whether the same parameters give the same foreign tensor in both pairs."""
        return (self.operation, self.stack) == (other.operation, other.stack)

    def read(self, foreign: np.ndarray) -> list[np.ndarray]:
        """Return the parameters in a foreign tensor, as views of it where strides allow it."""
        if self.stack == "copies":
            return [self.operation.to_parameter(foreign, shape) for shape in self.shapes]
        axis = JOIN_AXES[self.stack]
        ends = np.cumsum([self._by_head(part)[axis] for part in self.parts])[:-1]
        stacked = np.split(foreign.reshape(self._by_head(self.shape)), ends, axis)
        return [
            self.operation.to_parameter(array.reshape(part), shape)
            for array, part, shape in zip(stacked, self.parts, self.shapes, strict=True)
        ]

    def write(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """Return the foreign tensor that holds these parameters; of one of them, a view."""
        parts = [
            self.operation.to_foreign(parameter, shape).reshape(self._by_head(shape))
            for parameter, shape in zip(parameters, self.parts, strict=True)
        ]
        if len(parts) == 1 or self.stack == "copies":
            return parts[0]
        return np.concatenate(parts, JOIN_AXES[self.stack]).reshape(self.shape)

    def _by_head(self, shape: Shape) -> Shape:
        """Return the shape with an axis for the heads in front, where the stack is by heads."""
        if self.stack != "heads":
            return shape
        return (self.num_heads, shape[0] // self.num_heads, *shape[1:])


def is_in_part(foreign: str, config: TransformerConfig) -> bool:
    """Return whether a foreign name can be of a config: an encoder alone has none of a decoder."""
    return bool(config.num_decoder_layers) or "decoder" not in foreign.split(".")


def expand(layout: Layout, config: TransformerConfig) -> tuple[BoundRow, ...]:
    """Return the layout's rows for this config: one for each foreign tensor."""
    shapes = parameter_shapes(config, layout.scope)
    bound: dict[str, BoundRow] = {}
    for row in layout.rows:
        if not row.applies_to(config) or not is_in_part(row.foreign, config):
            continue
        pattern = name_pattern(row.paths[0], KEY)
        matches = [match for path in shapes if (match := pattern.fullmatch(path))]
        if not matches:
            check_possible(layout, row)
        heads = range(config.num_heads) if HEAD in row.foreign else (None,)
        for match, head in itertools.product(matches, heads):
            words = match.groupdict() | {"head": head}
            foreign = row.foreign.format_map(words)
            if foreign in bound:
                raise InputError(f"layout {layout.name!r}: two rows give the name {foreign!r}")
            paths = tuple(path.format_map(words) for path in row.paths)
            if absent := [path for path in paths if path not in shapes]:
                check_possible(layout, row)
                raise InputError(
                    f"layout {layout.name!r}: {foreign!r} stacks {', '.join(absent)} of a model "
                    "that lacks it"
                )
            lengths = tuple(shapes[path] for path in paths)
            if head is not None:
                if len(heads) > MOST_HEADS or any(shape[-1] % len(heads) for shape in lengths):
                    raise InputError(
                        f"layout {layout.name!r}: {foreign!r} needs at most {MOST_HEADS} heads, "
                        f"which divide the columns of {paths[0]}, not num_heads={config.num_heads}"
                    )
                lengths = tuple((*shape[:-1], shape[-1] // len(heads)) for shape in lengths)
            bound[foreign] = BoundRow(
                foreign=foreign,
                paths=paths,
                operation=row.operation,
                shapes=lengths,
                parts=tuple(row.operation.foreign_shape(shape, config) for shape in lengths),
                zeros=row.zeros,
                stack=row.stack,
                num_heads=config.num_heads,
                head=head,
            )
    covered = {path for row in bound.values() for path in row.paths}
    bare = [LAYER.sub("layers_{i}", path) for path in shapes if path not in covered]
    if bare:
        raise InputError(
            f"layout {layout.name!r} has no row for {', '.join(dict.fromkeys(bare))}; add rows, or "
            "set the fields of the config by which the model lacks them, such as output_bias=False"
        )
    return tuple(bound.values())


def holds_names(layout: Layout, names: Iterable[str]) -> bool:
    """Return whether a layout has a row, a buffer or no use for every one of these names."""
    templates = {part.foreign for part in (*layout.rows, *layout.buffers)}
    patterns = [name_pattern(template) for template in templates]
    return all(
        name in layout.unused or any(pattern.fullmatch(name) for pattern in patterns)
        for name in names
    )


def flatten(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a nested dict by their paths."""
    return traverse_util.flatten_dict(dict(tree), sep="/")


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict of leaves by their paths: the inverse of `flatten`."""
    return traverse_util.unflatten_dict(leaves, sep="/")


def check_possible(layout: Layout, row: Row) -> None:
    """Refuse a row that can match no parameter of any config: its path is misspelt."""
    inside = f"{layout.scope}/" if layout.scope else ""
    for path in row.paths:
        pattern = name_pattern(LAYER.sub("layers_0", f"{inside}{path}"), KEY)
        if not any(pattern.fullmatch(name.replace("{i}", "0")) for name in PARAMETERS):
            raise InputError(
                f"layout {layout.name!r}: the row {row.foreign!r} names {path!r}, which is no "
                f"parameter of any config; {nearest(f'{inside}{path}', PARAMETERS)}"
            )


@functools.lru_cache(4096)
def name_pattern(template: str, word: str = "[^./]+") -> re.Pattern[str]:
    """Return what the template of a name matches: a word in braces holds no dot and no slash."""
    pieces = WORD.split(template)  # literal, word, literal, word, ..., literal
    expression = re.escape(pieces[0])
    for index in range(1, len(pieces), 2):
        expression += f"(?P<{pieces[index]}>{word}){re.escape(pieces[index + 1])}"
    return re.compile(expression)
