"""The layouts that have a name, also those of families."""

import os

from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.layout_file import is_layout_file, read_layout
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.convert.table import Layout
from jax_transformer.errors import InputError, shorten


def layouts() -> tuple[str, ...]:
    """Return the names of the layouts that need no arguments, also of families."""
    return (*LAYOUTS, *FAMILIES)


def get_layout(layout: str | os.PathLike | Layout) -> Layout:
    """Return the layout of this name; a `Layout` is returned as it is.

    Args:
        layout: One of `layouts()`, the path of a TOML file (text ends in ".toml"), or a `Layout`.

    Raises:
        InputError: The name is unknown, or the file holds no layout.
    """
    if isinstance(layout, Layout):
        return layout
    if is_layout_file(layout):
        return read_layout(layout).layout
    if layout in LAYOUTS:
        return LAYOUTS[layout]
    if layout in FAMILIES:
        return FAMILIES[layout].layout
    names = ", ".join(layouts())
    raise InputError(f"layout={shorten(layout)} is unknown; choose one of {names}, or a .toml file")
