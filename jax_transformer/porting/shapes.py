"""What the names and the shapes of tensors tell, before a program was recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.porting.layouts import layouts_of

NUMBER = re.compile(r"\d+")
MOST_LINES = 60  # of tensors


def described(tensors: Mapping[str, Any]) -> str:
    """Return the tensors of a checkpoint in words: those of all layers in one line.

    Raises:
        InputError: There are none.
    """
    if not tensors:
        raise InputError("the checkpoint holds no tensors")
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((NUMBER.sub("{i}", name), tuple(tensor.shape)), []).append(name)
    rows = [
        (stem if len(names) > 1 else names[0], f"{len(names)} x {list(shape)}")
        for (stem, shape), names in groups.items()
    ]
    width = max(len(name) for name, _ in rows[:MOST_LINES])
    lines = [f"{name:<{width}}  {size}" for name, size in rows[:MOST_LINES]]
    if len(rows) > MOST_LINES:
        lines.append(f"and {len(rows) - MOST_LINES} more kinds")
    count = sum(tensor.size for tensor in tensors.values())
    lines.append(f"{len(tensors)} tensors with {count:,} numbers")
    if known := layouts_of(tensors):
        names = ", ".join(known)
        lines.append(f"these are the names of the layout {names}: --layout {known[0]} reads them")
    return "\n".join(lines)
