"""HTML written as text: every value that a file or a user gave is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable

LONGEST = 100  # characters of a name that the page shows


def text(value: object, longest: int = LONGEST) -> str:
    """Return a value as HTML text; one with more than `longest` characters is cut in its middle."""
    shown = str(value)
    if len(shown) > longest:
        half = longest // 2
        shown = f"{shown[:half]} … {shown[-half:]}"
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return html.escape(shown)


def code(value: object) -> str:
    """Return a value in the typeface of code, with places where a long name may break."""
    shown = text(value)
    for mark in "./_":
        shown = shown.replace(mark, f"{mark}<wbr>")
    return f"<code>{shown}</code>"


def section(title: str, lead: str, *content: str) -> str:
    """Return a section of the page; `lead` and `content` are HTML."""
    return f"<section>\n<h2>{text(title)}</h2>\n<p>{lead}</p>\n{lines(content)}\n</section>"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """Return a table; the cells are HTML. On a narrow screen each row becomes a card.

    Args:
        columns: Their titles.
        rows: Their cells.
        kind: A class of the style sheet, which sets the widths of the columns.
    """
    columns = [text(column) for column in columns]
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = lines(
        "<tr>"
        + "".join(
            f'<td data-label="{column}">{cell}</td>'
            for column, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<table class="{kind}">\n{head}\n<tbody>\n{body}\n</tbody>\n</table>'


def folded(summary: str, content: str, is_open: bool = False) -> str:
    """Return content under a line that folds it; both are HTML."""
    state = " open" if is_open else ""
    return f"<details{state}>\n<summary>{summary}</summary>\n{content}\n</details>"


def number(value: float) -> str:
    """Return an error as a person reads it: 3.1e-13, 1e-5; 0 where it is exactly 0."""
    if value == 0:
        return "0"
    factor, _, exponent = f"{value:.1e}".partition("e")
    return f"{factor.removesuffix('.0')}e{int(exponent)}" if exponent else factor


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, as "1 block" and "2 blocks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def lines(parts: Iterable[str]) -> str:
    """Return the parts that are not empty, each on a line."""
    return "\n".join(part for part in parts if part)
