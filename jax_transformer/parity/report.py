"""One HTML file that shows what agrees, what differs, and where.

The page loads nothing and runs nothing; its content policy allows neither, because names of
tensors come from files that others wrote.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jax_transformer.errors import InputError, one_line
from jax_transformer.storage.writing import check_new_file, replace_file

LONGEST_NAME, LONGEST_EXPLANATION = 100, 400  # characters that the page shows
MOST_ROWS = 400  # of a table
MARK = "<-- first to differ"
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Comparison of two models</title>
<style>span {{ color: {colour}; font-weight: bold }}</style>
</head>
<body><pre><span>{verdict}</span>
{text}</pre></body>
</html>
"""


def check_report(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Refuse a file that `write_page` would refuse; changes nothing on the disk."""
    path = Path(path)
    if path.suffix != ".html":
        raise InputError(f"{path}: the name of a report must end in .html")
    check_new_file(path, overwrite)


def write_page(
    path: str | os.PathLike,
    remarks: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    agrees: bool,
    overwrite: bool = False,
) -> None:
    """Write remarks, the verdict last, and a table, its headings first, as one HTML file.

    Its size is bounded: it has `MOST_ROWS` rows, from some before the marked one. A symbolic link
    at `path` is replaced, not followed.
    """
    check_report(path, overwrite)
    headings, *rows = rows
    marked = [number for number, row in enumerate(rows) if row[-1] == MARK]
    rows = rows[max(0, marked[0] - MOST_ROWS // 2) if marked else 0 :]
    shown = [
        [one_line(cell, LONGEST_NAME) for cell in row] for row in (headings, *rows[:MOST_ROWS])
    ]
    *lines, verdict = (one_line(text, LONGEST_EXPLANATION) for text in remarks)
    lines += ["", *aligned(shown, " \N{BOX DRAWINGS LIGHT VERTICAL} ")]
    if len(rows) > MOST_ROWS:
        lines.append(f"{len(rows) - MOST_ROWS:,} more rows are not shown")
    verdict, text = (html.escape(part, quote=False) for part in (verdict, "\n".join(lines)))
    text = re.sub(f"(?m)^.*{html.escape(MARK)}.*$", r"<span>\g<0></span>", text)
    page = PAGE.format(colour="green" if agrees else "red", verdict=verdict, text=text)
    replace_file(Path(path), page.encode())


def aligned(rows: Sequence[Sequence[str]], between: str = "  ") -> Iterable[str]:
    """Return rows as lines in which columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [between.join(map(str.ljust, row, widths)).rstrip() for row in rows]
