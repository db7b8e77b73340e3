"""Which module of another program is which place of the model, by the names in a layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Layout, expand
from jax_transformer.errors import InputError

PROJECTIONS = ("query", "key", "value", "output", "inner", "outer", "gate")
LAST_PROJECTIONS = ("output", "outer")  # their outputs are the outputs of their sublayers
POSITIONS = "source_positions"


class Tensor(NamedTuple):
    """A foreign tensor: its module, its place, and whether it is of the place's last product."""

    module: str
    place: str
    last: bool


def foreign_modules(
    layout: Layout, config: TransformerConfig, order: Sequence[str], recorded: set[str]
) -> dict[str, list[str]]:
    """Return the recorded foreign modules that can be compared with each place.

    A module belongs to a place if it holds the place's tensors, and none of a place that runs
    later, in `order`: then its output is the place's output. Of several such modules it is the
    innermost that was recorded. A sublayer without a module of its own is compared with its last
    projection. Tied copies of a table give several modules. Position tables that are buffers
    are "source_positions", whichever side has them.
    """
    if layout.scope:
        raise InputError(f"layout {layout.name!r} is of {layout.scope}, not of a whole model")
    tensors = [
        _tensor(pair.foreign, path) for pair in expand(layout, config) for path in pair.paths
    ]
    tensors += [
        Tensor(buffer.foreign.rpartition(".")[0], POSITIONS, False) for buffer in layout.buffers
    ]
    indices = {name: index for index, name in enumerate(order)}
    found: dict[str, list[str]] = {}
    taken = set()
    # A module that is a whole layer or stack is compared as that, not as its last block.
    for place in sorted(order, key=lambda place: (not _is_layer(place), "." in place)):
        own = [tensor for tensor in tensors if f"{tensor.place}.".startswith(f"{place}.")]
        tables = place.endswith(("_embedding", "_positions"))
        for group in filter(None, [[tensor] for tensor in own] if tables else [own]):
            for module in _candidates(group, tensors, _is_layer(place)):
                inside = _inside(module, tensors)
                later = any(indices.get(tensor.place, 0) > indices[place] for tensor in inside)
                if module in recorded and not later:
                    if module not in taken:
                        found.setdefault(place, []).append(module)
                        taken.add(module)
                    break
    return found


def _candidates(own: list[Tensor], tensors: list[Tensor], exactly: bool) -> list[str]:
    """Return modules that may give a place's output, the likeliest first; `exactly`: no more."""
    inner = common_module(tensor.module for tensor in own)
    alone = [module for module in _around(inner) if len(_inside(module, tensors)) == len(own)]
    if exactly:
        return alone
    one_block = len({tensor.place for tensor in own}) == 1
    last = [tensor.module for tensor in own if tensor.last and one_block]
    return list(dict.fromkeys([*alone, *last, *_around(inner)]))


def _is_layer(place: str) -> bool:
    return place.startswith(("encoder.layers.", "decoder.layers.")) and place.count(".") == 2


def _inside(module: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a module holds, in the modules inside it too."""
    return [tensor for tensor in tensors if f"{tensor.module}.".startswith(f"{module}.")]


def _tensor(foreign: str, path: str) -> Tensor:
    """Return the tensor of a foreign name and of the path of a parameter in it."""
    *parts, _ = path.replace("layers_", "layers.").split("/")
    last = parts[-1] in LAST_PROJECTIONS
    if parts[-1] in PROJECTIONS:
        parts.pop()
    return Tensor(foreign.rpartition(".")[0], ".".join(parts), last)


def common_module(modules: Iterable[str]) -> str:
    """Return the innermost module that holds all of these modules."""
    columns = zip(*(module.split(".") for module in modules), strict=False)
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, columns)
    return ".".join(parts[0] for parts in same)


def _around(module: str) -> list[str]:
    """Return a module and those around it, the innermost first."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
