"""One HTML file that shows how a model was carried over: what agrees, what differs, and where.

The page loads nothing and runs nothing; its content policy allows neither, because names of
tensors come from files that others wrote.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import LAYER, USUAL_MASKS, BoundRow, Layout, Masks, expand
from jax_transformer.errors import InputError, check_installed, one_line
from jax_transformer.porting.suggest import described, together
from jax_transformer.storage.writing import exists_already, replace_file

if TYPE_CHECKING:
    from rich.table import Table

    from jax_transformer.porting.compare import Comparison

LONGEST_NAME, LONGEST_EXPLANATION = 100, 400  # characters that the page shows
MOST_ROWS = 400  # of a table
WIDTH = 200  # characters of a line
AGREES = "The converted model agrees with yours"
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Porting report</title>
<style>{stylesheet} body {{ color: {foreground}; background: {background} }}</style>
</head>
<body><pre>{code}</pre></body>
</html>
"""


def check_report(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Refuse a file that `write_report` would refuse; changes nothing on the disk."""
    path = Path(path)
    check_installed("rich")
    if path.suffix != ".html":
        raise InputError(f"{path}: the name of a report must end in .html")
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        raise exists_already(path, "report")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InputError(f"{path}: {path.parent} is no writable folder; name another or create it")


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
    from rich.console import Console

    check_report(path, overwrite)
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    first = comparison.first_differing
    verdict = f"The models differ, first in {first.name}" if first else AGREES
    console.print(verdict, style="bold red" if first else "bold green", markup=False)
    for remark in comparison.remarks():
        console.print(one_line(remark, LONGEST_EXPLANATION), markup=False, highlight=False)
    for table in (_errors(comparison), _weights(config, layout), _fields(config, layout.masks)):
        console.print(table)
    page = console.export_html(code_format=PAGE)
    replace_file(Path(path), page.encode())


def _table(title: str, columns: Iterable[str], rows: list[tuple[str, ...]]) -> Table:
    """Return a table of the page with as many rows as it may have."""
    from rich.table import Table
    from rich.text import Text

    more = f"{len(rows) - MOST_ROWS:,} more rows are not shown" if len(rows) > MOST_ROWS else None
    table = Table(*columns, title=title, caption=more, title_justify="left")
    for row in rows[:MOST_ROWS]:
        style = "red" if row[-1].startswith("<--") else ""
        table.add_row(*(Text(one_line(cell, LONGEST_NAME)) for cell in row), style=style)
    return table


def _errors(comparison: Comparison) -> Table:
    """Return the table of the blocks, from some blocks before the first that differs."""
    blocks, first = comparison.blocks, comparison.first_differing
    start = max(0, blocks.index(first) - MOST_ROWS // 2) if first else 0
    rows = [
        (block.name, block.foreign, f"{block.error:.1e}", "<-- first to differ" * (block is first))
        for block in blocks[start:]
    ]
    title = "Error by block: max|ours - theirs| / max(1, max|theirs|), with those of earlier blocks"
    return _table(title, ("block", "your module", "error", ""), rows)


def _weights(config: TransformerConfig, layout: Layout) -> Table:
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
    return _table("Weights; a row stands for the same tensor of all layers", columns, rows)


def _fields(config: TransformerConfig, masks: Masks) -> Table:
    """Return the table of the config, the fields that differ from their defaults first."""
    fields = [(f.name, getattr(config, f.name), f.default) for f in dataclasses.fields(config)]
    fields.sort(key=lambda field: field[1] == field[2])
    rows = [(name, repr(value), repr(default)) for name, value, default in fields]
    rows.append(("masks of your program", str(masks), str(USUAL_MASKS)))
    return _table("Config", ("field", "value", "default"), rows)
