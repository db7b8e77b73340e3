"""What a config claims, held against what is there: no claim takes more than the weights do.

A config may come from a file that nobody checked. Reading it must not cost more time or memory
than the weights themselves, so nothing of the claimed size is built before it was compared. Of a
parameter the shape is compared where the tensors are checked; here is the rest: the number of the
layers, and arrays that no tensor holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.names import NUMBER
from jax_transformer.convert.report import Report
from jax_transformer.convert.table import Buffer, Layout, Pair, Shape
from jax_transformer.errors import InputError
from jax_transformer.model.parameters import LAYER, STACKS

# A computed table may have this many numbers (some 100 MB while it is computed), and more where the
# parameters are larger: so many times theirs.
FREE_NUMBERS = 2**22
FREE_SHARE = 4


def within(
    config: TransformerConfig, layout: Layout, names: Iterable[str], what: str, report: Report
) -> TransformerConfig:
    """Return the config with no more layers than the names hold numbers; more are a fault."""
    most = len({number for name in names for number in NUMBER.findall(name)})
    scope_layer = LAYER.search(layout.scope)
    fields = {}
    for stack in STACKS:
        field = f"num_{stack}_layers"
        claimed = getattr(config, field)
        if scope_layer or (layout.scope and layout.scope != stack):
            # Of a stack that the layout does not convert, only the layer of its scope is needed.
            fields[field] = min(claimed, 1 + int(scope_layer[1]) if scope_layer else 1)
            continue
        if claimed > most > 0:  # of 0 layers, the missing names say more
            detail = f"the {what} hold at most {most} layers of the {stack}"
            report.add("missing", f"{field}={claimed}", detail)
        fields[field] = min(claimed, max(1, most))
    return dataclasses.replace(config, **fields)


def claimed_shape(buffer: Buffer, config: TransformerConfig) -> Shape | None:
    """Return the shape of a buffer without computing it; None where it cannot say."""
    lengths = getattr(buffer.value, "lengths", None)
    return None if lengths is None else lengths(config)


def check_zeros(absent: Sequence[Pair], arrays: Iterable[np.ndarray]) -> None:
    """Refuse more zeros in the place of absent tensors than there are numbers."""
    claimed = sum(math.prod(shape) for pair in absent for shape in pair.shapes)
    held = sum(array.size for array in arrays)
    if claimed > held:
        raise InputError(
            f"{absent[0].foreign!r} is absent: {claimed:,} numbers would be zeros, but the tensors "
            f"hold only {held:,}"
        )


def check_buffers(
    buffers: Sequence[Buffer], config: TransformerConfig, arrays: Iterable[Any]
) -> None:
    """Refuse computed buffers that would be far larger than the parameters beside them."""
    held = sum(array.size for array in arrays)
    for buffer in buffers:
        shape = claimed_shape(buffer, config)
        if shape is not None and math.prod(shape) > max(FREE_NUMBERS, FREE_SHARE * held):
            raise InputError(
                f"{buffer.foreign!r} of max_length={config.max_length} would have the shape "
                f"{list(shape)}, but the parameters have {held:,} numbers; set a shorter max_length"
            )
