"""One HTML file that shows what agrees, what differs, and where.

The page loads nothing and runs nothing; its content policy allows neither, because names of
tensors come from files that others wrote.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jax_transformer.errors import InputError, check_installed, one_line
from jax_transformer.storage.writing import exists_already, replace_file

if TYPE_CHECKING:
    from rich.table import Table

LONGEST_NAME, LONGEST_EXPLANATION = 100, 400  # characters that the page shows
MOST_ROWS = 400  # of a table
WIDTH = 200  # characters of a line
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Comparison of two models</title>
<style>{stylesheet} body {{ color: {foreground}; background: {background} }}</style>
</head>
<body><pre>{code}</pre></body>
</html>
"""


def check_report(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Refuse a file that `write_page` would refuse; changes nothing on the disk."""
    path = Path(path)
    check_installed("rich")
    if path.suffix != ".html":
        raise InputError(f"{path}: the name of a report must end in .html")
    check_new_file(path, overwrite)


def check_new_file(path: Path, overwrite: bool) -> None:
    """Refuse a file that exists, unless it may be replaced, and one that cannot be written."""
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        raise exists_already(path, "report")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InputError(f"{path}: {path.parent} is no writable folder; name another or create it")


def write_page(
    path: str | os.PathLike,
    verdict: str,
    remarks: Sequence[str],
    tables: Sequence[Table],
    *,
    agrees: bool,
    overwrite: bool = False,
) -> None:
    """Write a verdict, remarks and tables as one HTML file. Its size is bounded.

    Args:
        path: A .html file. A symbolic link there is replaced, not followed.
    """
    from rich.console import Console

    check_report(path, overwrite)
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    console.print(verdict, style="bold green" if agrees else "bold red", markup=False)
    for remark in remarks:
        console.print(one_line(remark, LONGEST_EXPLANATION), markup=False, highlight=False)
    for each in tables:
        console.print(each)
    replace_file(Path(path), console.export_html(code_format=PAGE).encode())


def table(title: str, columns: Iterable[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of the page, from some rows before the marked one, with `MOST_ROWS`."""
    from rich.table import Table
    from rich.text import Text

    marked = [number for number, row in enumerate(rows) if row[-1].startswith("<--")]
    rows = rows[max(0, marked[0] - MOST_ROWS // 2) if marked else 0 :]
    more = f"{len(rows) - MOST_ROWS:,} more rows are not shown" if len(rows) > MOST_ROWS else None
    shown = Table(*columns, title=title, caption=more, title_justify="left")
    for row in rows[:MOST_ROWS]:
        style = "red" if row[-1].startswith("<--") else ""
        shown.add_row(*(Text(one_line(cell, LONGEST_NAME)) for cell in row), style=style)
    return shown
