"""The layouts of `convert`, and those of training programs, by name."""

from __future__ import annotations

import os
from collections.abc import Iterable

from jax_transformer import convert
from jax_transformer.convert.table import Layout, holds_names
from jax_transformer.porting.trainers import TRAINERS


def layouts() -> tuple[str, ...]:
    """Return the names of the layouts that need no arguments, also of training programs."""
    return (*convert.layouts(), *TRAINERS)


def get_layout(layout: str | os.PathLike | Layout) -> Layout:
    """Return a layout: `layout` is as for `convert.get_layout`, or names a training program.

    Raises:
        InputError: The name is unknown, or the file holds no layout.
    """
    if isinstance(layout, str) and layout in TRAINERS:
        return TRAINERS[layout].layout
    return convert.get_layout(layout)


def layouts_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the layouts of whole models in which tensors have these `names`."""
    wanted = list(names)
    by_name = {name: get_layout(name) for name in layouts()}
    return tuple(
        name
        for name, layout in by_name.items()
        if wanted and not layout.scope and holds_names(layout, wanted)
    )
