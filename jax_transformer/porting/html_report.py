"""One HTML file that shows how a model was carried over: what agrees, what differs, and where.

The page needs no network and no script; its content policy allows neither, because names of
tensors come from files that others wrote. Every such name passes through `text`.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.resources
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import LAYER, Layout, Pair, expand
from jax_transformer.errors import InputError
from jax_transformer.porting.record import Record
from jax_transformer.porting.suggest import described, together
from jax_transformer.storage.writing import replace_file

if TYPE_CHECKING:
    from jax_transformer.porting.compare import BlockError, Comparison

MOST_EXPLANATIONS, LONGEST_EXPLANATION = 20, 400  # of these characters
LONGEST_NAME = 100  # characters of a name that the page shows
MOST_BARS, MOST_ROWS = 300, 400  # of the picture of errors, of a table
TICKS = range(-18, 7, 6)  # of the axis of errors, as exponents of 10
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Porting report: {title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{content}
</main>
<footer>Written by jax-transformer. This file loads nothing from elsewhere.</footer>
</body>
</html>
"""
HEADLINE = """\
<header class="{kind}">
<p class="kicker">Porting report · layout {layout}</p>
<h1><span class="sign" aria-hidden="true">{sign}</span>{verdict}</h1>
<p class="lead">{reason}</p>
{explanations}
<dl>{facts}</dl>
</header>"""
BAR = """\
<li class="{kind}"><div class="names"><span class="own">{name}{tag}</span>{foreign}</div>\
<div class="track">{bar}</div><div class="value">{value}</div></li>"""


def check_report(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Refuse a file that `write_report` would refuse; changes nothing on the disk."""
    path = Path(path)
    if path.suffix != ".html":
        raise InputError(f"{path}: the name of a report must end in .html")
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        raise InputError(f"{path}: exists already; name another report or overwrite it")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InputError(f"{path}: {path.parent} is no writable folder; name another or create it")


def write_report(
    path: str | os.PathLike,
    comparison: Comparison,
    config: TransformerConfig,
    layout: Layout,
    record: Record,
    *,
    overwrite: bool = False,
) -> None:
    """Write the report of a model that was carried over, as one HTML file.

    It shows the verdict, the error of every block, which tensor became which parameter, and the
    config. Its size is bounded for models of any size.

    Args:
        path: A .html file. A symbolic link there is replaced, not followed.
    """
    check_report(path, overwrite)
    sections = (
        _headline(comparison, layout, record),
        errors_section(comparison),
        weights_section(config, layout),
        _config_section(config),
    )
    style = importlib.resources.files(__package__).joinpath("report.css").read_text("utf-8")
    page = PAGE.format(title=text(layout.name), style=style, content="\n".join(sections))
    replace_file(Path(path), page.encode())


def text(value: object, longest: int = LONGEST_NAME) -> str:
    """Return a value as HTML text; one with more than `longest` characters is cut in its middle."""
    shown = str(value)
    if len(shown) > longest:
        half = longest // 2
        shown = f"{shown[:half]} … {shown[-half:]}"
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return html.escape(shown)


def number(value: float) -> str:
    """Return an error as a person reads it: 3.1e-13, 1e-5; 0 where it is exactly 0."""
    if not math.isfinite(value):
        return "not finite"
    factor, _, exponent = f"{value:.1e}".partition("e")
    return f"{factor.removesuffix('.0')}e{int(exponent)}" if value else "0"


def _code(value: object) -> str:
    return f"<code>{text(value)}</code>"


def _section(title: str, lead: str, *content: str) -> str:
    """Return a section of the page; `lead` and `content` are HTML."""
    return "\n".join(("<section>", f"<h2>{title}</h2>", f"<p>{lead}</p>", *content, "</section>"))


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """Return a table; the cells are HTML, `kind` is a class of the style sheet."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<table class="{kind}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    )


def _headline(comparison: Comparison, layout: Layout, record: Record) -> str:
    """Return the verdict in words, and the facts that it rests on."""
    blocks, first, bound = comparison.blocks, comparison.first_differing, number(comparison.bound)
    if first is None:
        verdict = "The converted model agrees with yours"
        compared = f"each of the {len(blocks)} outputs" if len(blocks) > 1 else "the logits"
        reason = f"The difference of {compared} stays within {bound}, the largest that rounding "
        reason += "causes."
    else:
        verdict = f"The models differ, first in {_code(first.name)}"
        module = f", your module {_code(first.foreign)}," if first.foreign else ""
        reason = f"The output of {_code(first.name)}{module} is off by {number(first.error)}, and "
        reason += f"rounding causes at most {bound}. Blocks before it: {blocks.index(first)}."
    facts = {
        "Error of the logits": number(blocks[-1].error),
        "Bound": bound,
        "Blocks within it": f"{sum(b.error <= comparison.bound for b in blocks)} of {len(blocks)}",
        "Recorded rows": f"{sum(len(batch.src) for batch in record.batches):,}",
        "Masks": "as in the config" if comparison.masks == "default" else text(comparison.masks),
        "Your program returns": text(comparison.output),
    }
    explanations = "".join(
        f"<li>{text(sentence, LONGEST_EXPLANATION)}</li>"
        for sentence in comparison.explanations[:MOST_EXPLANATIONS]
    )
    if explanations:
        title = "<h2>What would explain it</h2>"
        explanations = f'<div class="explanations">{title}<ul>{explanations}</ul></div>'
    return HEADLINE.format(
        kind="differs" if first else "agrees",
        layout=_code(layout.name),
        sign="✗" if first else "✓",
        verdict=verdict,
        reason=reason,
        explanations=explanations,
        facts="".join(f"<div><dt>{k}</dt><dd>{value}</dd></div>" for k, value in facts.items()),
    )


def errors_section(comparison: Comparison) -> str:
    """Return the errors as bars on a logarithmic axis, with the bound as a line."""
    blocks, first = comparison.blocks, comparison.first_differing
    lead = (
        "Each bar is the largest difference in the output of one block, relative to the size of "
        "that output, in the order in which the blocks run. Both models start from the same ids, "
        "so an error includes those of the blocks before it."
    )
    if len(blocks) == 1:
        lead = "The record holds the logits and no outputs of blocks, so there is one bar."
    start = max(0, blocks.index(first) - MOST_BARS // 2) if first else 0
    shown = blocks[start : start + MOST_BARS]
    if len(shown) < len(blocks):
        lead += f" {len(shown):,} of {len(blocks):,} blocks are shown."
    style = f"--bound:{_percent(comparison.bound)}%;--interval:{100 / (len(TICKS) - 1):.4f}%"
    ticks = "".join(
        f'<span style="left:{_percent(10.0**exponent)}%">10<sup>{exponent}</sup></span>'
        for exponent in TICKS
    ).replace("<sup>-", "<sup>&minus;")
    axis = (
        '<div class="axis" aria-hidden="true"><div class="scale"><div class="bound-label">'
        f'<span style="left:var(--bound)">bound {number(comparison.bound)}</span></div>'
        f'<div class="ticks">{ticks}</div></div></div>'
    )
    bars = "\n".join(_bar(block, comparison.bound, block is first) for block in shown)
    chart = f'<div class="chart" style="{style}">\n{axis}\n<ol>\n{bars}\n</ol>\n</div>'
    return _section("Error by block", lead, chart)


def _percent(error: float) -> float:
    """Return how far along the axis an error lies, from 0 to 100."""
    if not math.isfinite(error):
        return 100.0
    place = math.log10(max(error, 10.0 ** TICKS[0])) - TICKS[0]
    return round(100 * min(1.0, place / (TICKS[-1] - TICKS[0])), 3)


def _bar(block: BlockError, bound: float, is_first: bool) -> str:
    within = block.error <= bound
    mark = "" if within else '<span class="mark" title="beyond the bound">▲</span> '
    bar = f'<div class="bar" style="width:{_percent(block.error)}%"></div>'
    return BAR.format(
        kind="within" if within else "beyond",
        name=_code(block.name),
        tag='<span class="tag">first to differ</span>' if is_first else "",
        foreign=f'<span class="foreign">{_code(block.foreign)}</span>' if block.foreign else "",
        bar=bar if block.error else "",
        value=mark + number(block.error),
    )


def weights_section(config: TransformerConfig, layout: Layout) -> str:
    """Return the table of which foreign tensor became which parameter."""
    pairs = expand(layout, config)
    shapes = {
        path: shape for pair in pairs for path, shape in zip(pair.paths, pair.shapes, strict=True)
    }
    groups = grouped(pairs)
    lead = (
        f"Tensors of your model: {len(pairs):,}. Parameters: {len(shapes):,}. Numbers in them: "
        f"{sum(map(math.prod, shapes.values())):,}. A row stands for the same tensor of all "
        "layers, and names that of the first."
    )
    rows = [
        (
            _code(group[0].foreign),
            str(len(group)),
            f'<span class="shape">{" &times; ".join(map(str, group[0].shape))}</span>',
            text(described(group[0]) or "as it is"),
            _code(together(paths)),
        )
        for paths, group in groups[:MOST_ROWS]
    ]
    columns = ("Your tensor", "Tensors", "Shape", "Operation", "Parameter")
    content = [_table(columns, rows, "weights")]
    lists = {
        "Not shown": [group[0].foreign for _, group in groups[MOST_ROWS:]],
        "Computed and compared, not learned": [buffer.foreign for buffer in layout.buffers],
        "Without a meaning here, and not read": layout.unused,
    }
    for what, names in lists.items():
        if names:
            more = f" and {len(names) - MOST_ROWS:,} more" if len(names) > MOST_ROWS else ""
            content.append(f"<p>{what}: {', '.join(map(_code, names[:MOST_ROWS]))}{more}.</p>")
    return _section("Weights that went where", lead, *content)


def grouped(pairs: Sequence[Pair]) -> list[tuple[tuple[str, ...], list[Pair]]]:
    """Return the pairs that differ in their layer only, with their paths, as layers_{i}/norm."""
    groups: dict[tuple, list[Pair]] = {}
    for pair in pairs:
        paths = tuple(LAYER.sub("layers_{i}", path) for path in pair.paths)
        foreign = pair.foreign if paths == pair.paths else re.sub(r"\d+", "#", pair.foreign)
        key = (paths, foreign, pair.operation, pair.stack, pair.parts)
        groups.setdefault(key, []).append(pair)
    return [(key[0], group) for key, group in groups.items()]


def _config_section(config: TransformerConfig) -> str:
    """Return the fields of the config that differ from their defaults."""
    rows = [
        (_code(field.name), _code(repr(value)), _code(repr(field.default)))
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
    ]
    lead = "The fields of <code>TransformerConfig</code> that differ from the default."
    return _section("Config", lead, _table(("Field", "Value", "Default"), rows))
