"""The rule language: a layout is a table of rows, and both directions are read from it.

A foreign tensor is one of another program's, known by its name; a parameter is one of this
library's, known by its path: the keys of the nested dict joined by slashes. `transfer` moves
tensors through a layout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model import init_params

Shape = tuple[int, ...]
Tree = Mapping[str, Any]

WORD = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Operation:
    """How a foreign tensor lies, seen from its parameter: transposed first, then reshaped.

    Attributes:
        transposed: Whether the two axes change places.
        shape: The foreign shape, where reshaping is needed: lengths, -1 for one that follows
            from the others, or the names of config fields, as "num_heads".
    """

    transposed: bool = False
    shape: tuple[int | str, ...] = ()

    def foreign_shape(self, shape: Shape, config: TransformerConfig) -> Shape:
        """Return the foreign shape of a parameter of this shape."""
        if not self.shape:
            return shape[::-1] if self.transposed else shape
        lengths = [getattr(config, n) if isinstance(n, str) else n for n in self.shape]
        known = math.prod(length for length in lengths if length != -1)
        return tuple(math.prod(shape) // known if n == -1 else n for n in lengths)

    def to_foreign(self, parameter: np.ndarray, foreign_shape: Shape) -> np.ndarray:
        """Return a parameter as the foreign tensor of this shape."""
        return (parameter.T if self.transposed else parameter).reshape(foreign_shape)

    def to_parameter(self, foreign: np.ndarray, shape: Shape) -> np.ndarray:
        """Return a foreign tensor as the parameter of this shape: the inverse."""
        return foreign.reshape(shape[::-1]).T if self.transposed else foreign.reshape(shape)


identity = Operation()
transpose = Operation(transposed=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """A foreign tensor and the parameter that it holds.

    A word in braces stands for one name or number, the same on both sides: a row serves every
    parameter of the model that it fits, and none where the config has no such parameter. Several
    rows for one parameter are tied copies: all are written; of those that are read, one is
    enough and all must be equal.

    Attributes:
        foreign: Name of the foreign tensor, as "encoder.layers.{i}.self_attn.out_proj.weight".
        parameters: Path of the parameter, as "encoder/layers_{i}/self_attention/output/kernel";
            several paths where the foreign tensor stacks several along its first axis.
        operation: How the foreign tensor, or each part of it, lies.
    """

    foreign: str
    parameters: str | tuple[str, ...]
    operation: Operation = identity

    def __post_init__(self) -> None:
        for path in self.paths:
            if set(WORD.findall(path)) != set(WORD.findall(self.foreign)):
                raise InputError(f"{self.foreign!r} and {path!r} must hold the same {{words}}")

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, one or several."""
        return (self.parameters,) if isinstance(self.parameters, str) else self.parameters


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A foreign buffer that is computed and not learned, as a position table.

    It is compared with the computed value when read, and that value is written.

    Attributes:
        foreign: Its name.
        value: Returns the array for a config; a float64 one is written in the dtype of the
            parameters, any other as it is.
    """

    foreign: str
    value: Callable[[TransformerConfig], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Another program's names and shapes for the model, or for a part of it.

    Attributes:
        name: What messages call it.
        rows: One for each kind of tensor.
        buffers: Buffers that are computed and not learned.
        scope: Path of the part of the parameters that is converted; the paths of the rows begin
            there. "" is the whole model.
    """

    name: str
    rows: tuple[Row, ...]
    buffers: tuple[Buffer, ...] = ()
    scope: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A row at work in one model: a foreign tensor and the parameters that it holds.

    Attributes:
        foreign: Name of the foreign tensor.
        paths: Paths of the parameters, stacked along the first axis where there are several.
        operation: How each part lies.
        shapes: Shape of each parameter.
        parts: Foreign shape of each part.
    """

    foreign: str
    paths: tuple[str, ...]
    operation: Operation
    shapes: tuple[Shape, ...]
    parts: tuple[Shape, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the foreign tensor."""
        return (sum(part[0] for part in self.parts), *self.parts[0][1:])

    @property
    def kind(self) -> str:
        """What a report calls it."""
        if len(self.paths) > 1:
            return "split"
        if self.operation.shape:
            return "reshaped"
        return "transposed" if self.operation.transposed else "mapped"

    def read(self, foreign: np.ndarray) -> list[np.ndarray]:
        """Return the parameters in a foreign tensor, as views of it."""
        ends = np.cumsum([part[0] for part in self.parts])[:-1]
        return [
            self.operation.to_parameter(part, shape)
            for part, shape in zip(np.split(foreign, ends), self.shapes, strict=True)
        ]

    def write(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """Return the foreign tensor that holds these parameters, fresh and C-contiguous."""
        parts = [
            self.operation.to_foreign(parameter, shape)
            for parameter, shape in zip(parameters, self.parts, strict=True)
        ]
        # One part alone must be copied explicitly: concatenate keeps Fortran order.
        return np.array(parts[0] if len(parts) == 1 else np.concatenate(parts), order="C")


def expand(layout: Layout, config: TransformerConfig) -> tuple[Pair, ...]:
    """Return the layout's rows for this config, one for each foreign tensor.

    Raises:
        InputError: Two rows give one foreign name, or a parameter has no row.
    """
    shapes = parameter_shapes(config, layout.scope)
    pairs: dict[str, Pair] = {}
    for row in layout.rows:
        first = _pattern(row.paths[0])
        for match in filter(None, map(first.fullmatch, shapes)):
            words = match.groupdict()
            foreign = row.foreign.format(**words)
            if foreign in pairs:
                raise InputError(f"layout {layout.name!r}: two rows give the name {foreign!r}")
            paths = tuple(path.format(**words) for path in row.paths)
            own = tuple(shapes[path] for path in paths)
            parts = tuple(row.operation.foreign_shape(shape, config) for shape in own)
            pairs[foreign] = Pair(foreign, paths, row.operation, own, parts)
    covered = {path for pair in pairs.values() for path in pair.paths}
    if bare := [path for path in shapes if path not in covered]:
        raise InputError(f"layout {layout.name!r} has no row for {', '.join(bare)}")
    return tuple(pairs.values())


def parameter_shapes(config: TransformerConfig, scope: str = "") -> dict[str, Shape]:
    """Return the shape of every parameter by its path.

    Args:
        config: The shape of the model.
        scope: Path of a part of the parameters; the paths of the result begin there.

    Raises:
        InputError: No parameter of this config lies there.
    """
    inside = f"{scope}/" if scope else ""
    shapes = {
        path.removeprefix(inside): shape
        for path, shape in _all_shapes(config)
        if path.startswith(inside)
    }
    if not shapes:
        raise InputError(f"scope={scope!r} holds no parameter of this config")
    return shapes


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested dict by their paths."""
    leaves = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        leaves |= flatten(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict of leaves by their paths: the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        branch = tree
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return tree


@functools.lru_cache
def _all_shapes(config: TransformerConfig) -> tuple[tuple[str, Shape], ...]:
    tree = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    return tuple((path, leaf.shape) for path, leaf in flatten(tree).items())


@functools.lru_cache
def _pattern(template: str) -> re.Pattern[str]:
    """Return what a template matches: a word in braces is whatever holds no slash."""
    pieces = WORD.split(template)  # literal, word, literal, word, ..., literal
    pattern = re.escape(pieces[0])
    for index in range(1, len(pieces), 2):
        pattern += f"(?P<{pieces[index]}>[^/]+){re.escape(pieces[index + 1])}"
    return re.compile(pattern)
