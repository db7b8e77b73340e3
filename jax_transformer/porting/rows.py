"""The rows of a layout, from where each element of a parameter lies in the tensors of a program."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import HEAD, BoundRow, Join, Operation, Row, identity, transpose
from jax_transformer.errors import InputError
from jax_transformer.model.tree import LAYER, parameter_shapes
from jax_transformer.porting.probe import Elements

NUMBER = re.compile(r"\d+")


class Tensor(NamedTuple):
    """A tensor of the program: its names, its shape, the number of its first element, its user."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    first: int
    use: object

    @property
    def elements(self) -> Elements:
        """The numbers of its elements, in its shape."""
        return self.first + np.arange(math.prod(self.shape)).reshape(self.shape)


def layout_rows(
    elements: Mapping[str, Elements], tensors: Sequence[Tensor], config: TransformerConfig
) -> tuple[Row, ...]:
    """Return rows that read each parameter from its tensors.

    Args:
        elements: Of each parameter, by its path; a parameter of the config that has none is zeros.
        tensors: Those of the program, in the order of their elements.

    Raises:
        InputError: No row can express where the elements of a parameter lie, or a kernel is that of
            two places.
    """
    firsts = np.array([tensor.first for tensor in tensors])
    owners: dict[int, list[str]] = defaultdict(list)
    several: dict[tuple[int, ...], str] = {}
    for path, places in elements.items():
        first, last = np.searchsorted(firsts, [places.min(), places.max()], "right") - 1
        if first == last:
            owners[int(first)].append(path)
        else:
            found = np.unique(np.searchsorted(firsts, places.reshape(-1), "right") - 1)
            several[tuple(map(int, found))] = path
    rows = []
    for number, paths in owners.items():
        tensor = tensors[number]
        row = _row(tensor, {path: elements[path] for path in paths}, config)
        rows += [dataclasses.replace(row, foreign=name) for name in tensor.names]
    for numbers, path in several.items():
        of_heads = [tensors[number] for number in numbers]
        rows.append(_row_of_heads(of_heads, path, elements[path], config))
    names = {row.paths[0]: row.foreign for row in rows}
    for path, shape in parameter_shapes(config).items():
        if path not in elements:
            kernel = names.get(path.removesuffix("bias") + "kernel", path)
            if len(shape) > 1:
                raise InputError(f"no tensor of the program is {path}")
            rows.append(Row(f"{kernel.removesuffix('.weight')}.zeros", path, zeros=True))
    return tuple(_together(rows))


def _row(tensor: Tensor, placed: Mapping[str, Elements], config: TransformerConfig) -> Row:
    """Return the row of one tensor that holds some parameters, by trying each kind of row."""
    paths = sorted(placed, key=lambda path: int(placed[path].min()))
    copies = len(paths) > 1 and all(np.array_equal(placed[p], placed[paths[0]]) for p in paths)
    if copies and any(path.endswith("/kernel") for path in paths):
        raise InputError(
            f"{tensor.names[0]} is {' and '.join(paths[:2])}: layers that share weights have no "
            f"place in the model, because a training in JAX would part them: {tensor.use}"
        )
    stacks: tuple[Join, ...] = ("copies",) if copies else ("rows", "columns", "heads")
    stacks = stacks if len(paths) > 1 else ("rows",)
    heads = config.num_heads
    if paths[0].startswith("encoder/"):
        heads = config.stack("encoder").num_heads
    shapes = tuple(placed[path].shape for path in paths)
    axes = range(len(tensor.shape))
    operations = [transpose, identity] if len(axes) > 1 else [identity]
    operations += [
        Operation(flipped, (*tensor.shape[:place], -1, *tensor.shape[place + 1 :]))
        for place, flipped in itertools.product(axes, (True, False))
    ]
    for stack, operation in itertools.product(stacks, operations):
        try:
            row = BoundRow(
                foreign=tensor.names[0],
                paths=tuple(paths),
                operation=operation,
                shapes=shapes,
                parts=tuple(operation.foreign_shape(shape, config) for shape in shapes),
                stack=stack,
                num_heads=heads,
            )
            if row.shape == tensor.shape and np.array_equal(
                row.write([placed[path] for path in paths]), tensor.elements
            ):
                return Row(tensor.names[0], tuple(paths), operation, stack=stack)
        except (InputError, ValueError, ZeroDivisionError):
            continue
    raise InputError(
        f"{tensor.names[0]} {list(tensor.shape)} holds {', '.join(paths)} in an order of axes that "
        f"no row of a layout has: {tensor.use}"
    )


def _row_of_heads(
    tensors: Sequence[Tensor], path: str, places: Elements, config: TransformerConfig
) -> Row:
    """Return the row of a parameter that has a tensor for each head."""
    heads = np.split(places, len(tensors), -1) if places.shape[-1] % len(tensors) == 0 else []
    for flipped in (True, False):
        written = [head.T if flipped else head for head in heads]
        order = [
            next((t for t in tensors if np.array_equal(t.elements.ravel(), w.ravel())), None)
            for w in written
        ]
        if written and None not in order and len(tensors) == config.num_heads:
            template = _counted([tensor.names[0] for tensor in order], HEAD)
            if template is not None:
                return Row(template, path, transpose if flipped and places.ndim > 1 else identity)
    names = ", ".join(tensor.names[0] for tensor in tensors[:4])
    raise InputError(
        f"{path} lies in {names} in an order that no row of a layout has: {tensors[0].use}"
    )


def _counted(names: Sequence[str], word: str) -> str | None:
    """Return the template of names that differ by a number counted from 0."""
    for match in NUMBER.finditer(names[0]):
        begin, end = names[0][: match.start()], names[0][match.end() :]
        if all(name == f"{begin}{number}{end}" for number, name in enumerate(names)):
            return f"{begin}{word}{end}"
    return None


def _together(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield rows in which those of all layers are one, where their names count the layers."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        paths = tuple(LAYER.sub("layers_{i}", path) for path in row.paths)
        stem = NUMBER.sub("#", row.foreign.replace(HEAD, "{h}"))
        groups[paths, row.operation, row.stack, row.zeros, stem].append(row)
    for (paths, *_), group in groups.items():
        layers = [LAYER.search(row.paths[0]) for row in group]
        counted = [layer and int(layer[1]) for layer in layers] == [*range(len(group))]
        template = _counted([row.foreign for row in group], "{i}") if counted else None
        if template is None or len(group) == 1:
            yield from group
        else:
            yield dataclasses.replace(group[0], foreign=template, paths=paths)
