"""One HTML file that shows how a model was carried over: what agrees, what differs, and where."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import LAYER, USUAL_MASKS, BoundRow, Layout, Masks, expand
from jax_transformer.parity.report import table, write_page
from jax_transformer.porting.suggest import described, together

if TYPE_CHECKING:
    from jax_transformer.porting.compare import Comparison

AGREES = "The converted model agrees with yours"


def write_report(
    path: str | os.PathLike,
    comparison: Comparison,
    config: TransformerConfig,
    layout: Layout,
    *,
    overwrite: bool = False,
) -> None:
    """Write the report of a model that was carried over, as one HTML file.

    It shows the verdict, the error of every block, which tensor became which parameter, and the
    config. Its size is bounded for models of any size.

    Args:
        path: A .html file. A symbolic link there is replaced, not followed.
    """
    first = comparison.first_differing
    verdict = f"The models differ, first in {first.name}" if first else AGREES
    tables = _errors(comparison), _weights(config, layout), _fields(config, layout.masks)
    remarks = comparison.remarks()
    write_page(path, verdict, remarks, tables, agrees=first is None, overwrite=overwrite)


def _errors(comparison: Comparison) -> str:
    """Return the table of the blocks."""
    blocks, first = comparison.blocks, comparison.first_differing
    rows = [
        (block.name, block.foreign, f"{block.error:.1e}", "<-- first to differ" * (block is first))
        for block in blocks
    ]
    title = "Error by block: max|ours - theirs| / max(1, max|theirs|), with those of earlier blocks"
    return table(title, ("block", "your module", "error", ""), rows)


def _weights(config: TransformerConfig, layout: Layout) -> str:
    """Return the table of which foreign tensor became which parameter."""
    pairs: dict[tuple, list[BoundRow]] = {}
    for pair in expand(layout, config):  # those that differ in their layer alone are one row
        paths = tuple(LAYER.sub("layers_{i}", path) for path in pair.paths)
        pairs.setdefault((paths, pair.operation, pair.stack, pair.parts), []).append(pair)
    rows = [
        (
            same[0].foreign,
            str(len(same)),
            " x ".join(map(str, same[0].shape)),
            described(same[0]),
            together(key[0]),
        )
        for key, same in pairs.items()
    ]
    rows += [(buffer.foreign, "1", "", "computed, not learned", "") for buffer in layout.buffers]
    rows += [(name, "1", "", "not read", "") for name in layout.unused]
    columns = ("your tensor", "tensors", "shape", "operation", "parameter")
    return table("Weights; a row stands for the same tensor of all layers", columns, rows)


def _fields(config: TransformerConfig, masks: Masks) -> str:
    """Return the table of the config, the fields that differ from their defaults first."""
    fields = [(f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)]
    fields.sort(key=lambda field: field[1] == field[2])
    rows = [(name, repr(value), repr(default)) for name, value, default in fields]
    rows.append(("masks of your program", str(masks), str(USUAL_MASKS)))
    return table("Config", ("field", "value", "default"), rows)
