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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import LAYER, BoundRow, Layout, expand
from jax_transformer.errors import InputError
from jax_transformer.porting.places import attention_places, run
from jax_transformer.porting.record import Batch, Masks, Record
from jax_transformer.porting.suggest import together
from jax_transformer.storage.writing import exists_already, replace_file

if TYPE_CHECKING:
    from jax_transformer.porting.compare import BlockError, Comparison

MOST_EXPLANATIONS, LONGEST_EXPLANATION = 20, 400  # of these characters
LONGEST_NAME = 100  # characters of a name that the page shows
MOST_BARS, MOST_ROWS = 300, 400  # of the picture of errors, of a table
MOST_HEADS, MOST_TOKENS = 8, 12  # of an attention, of a side of its heat maps
CELL, LEFT, BELOW = 22, 26, 18  # side of one weight, room for the numbers of positions
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
        raise exists_already(path, "report")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InputError(f"{path}: {path.parent} is no writable folder; name another or create it")


def write_report(
    path: str | os.PathLike,
    comparison: Comparison,
    params: Mapping[str, Any],
    config: TransformerConfig,
    layout: Layout,
    record: Record,
    *,
    overwrite: bool = False,
) -> None:
    """Write the report of a model that was carried over, as one HTML file.

    It shows the verdict, the error of every block, which tensor became which parameter, attention
    weights of both models, and the config. Its size is bounded for models of any size.

    Args:
        path: A .html file. A symbolic link there is replaced, not followed.
    """
    check_report(path, overwrite)
    sections = (
        _headline(comparison, layout, record),
        errors_section(comparison),
        weights_section(config, layout),
        _attention_section(comparison, params, config, record),
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


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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
        "Recorded": _plural(sum(len(batch.src) for batch in record.batches), "row"),
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
        lead = (
            "The record holds the logits and no outputs of blocks, so there is one bar. With "
            "outputs of blocks, this picture shows where two models part."
        )
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
        f"{_plural(len(pairs), 'tensor')} of your model became "
        f"{_plural(len(shapes), 'parameter')} with "
        f"{_plural(sum(map(math.prod, shapes.values())), 'number')}. A row stands for the same "
        "tensor of all layers, and names that of the first."
    )
    rows = [
        (
            _code(group[0].foreign),
            str(len(group)),
            f'<span class="shape">{" &times; ".join(map(str, group[0].shape))}</span>',
            operation(group[0]),
            _code(together(paths)),
        )
        for paths, group in groups[:MOST_ROWS]
    ]
    content = [
        _table(("Your tensor", "Tensors", "Shape", "Operation", "Parameter"), rows, "weights")
    ]
    buffers = [buffer.foreign for buffer in layout.buffers]
    for what, names in (
        ("Not shown", [group[0].foreign for _, group in groups[MOST_ROWS:]]),
        ("Computed and compared, not learned", buffers),
        ("Without a meaning here, and not read", layout.unused),
    ):
        if names:
            more = f" and {len(names) - MOST_ROWS:,} more" if len(names) > MOST_ROWS else ""
            content.append(f"<p>{what}: {', '.join(map(_code, names[:MOST_ROWS]))}{more}.</p>")
    return _section("Weights that went where", lead, *content)


def grouped(pairs: Sequence[BoundRow]) -> list[tuple[tuple[str, ...], list[BoundRow]]]:
    """Return the pairs that differ in their layer only, with their paths, as layers_{i}/norm."""
    groups: dict[tuple, list[BoundRow]] = {}
    for pair in pairs:
        paths = tuple(LAYER.sub("layers_{i}", path) for path in pair.paths)
        foreign = pair.foreign if paths == pair.paths else re.sub(r"\d+", "#", pair.foreign)
        key = (paths, foreign, pair.operation, pair.stack, pair.parts)
        groups.setdefault(key, []).append(pair)
    return [(key[0], group) for key, group in groups.items()]


def operation(pair: BoundRow) -> str:
    """Return in words how the parameters of a pair are read from its foreign tensor."""
    changes = ["transposed"] if pair.operation.transposed else []
    changes += ["reshaped"] if pair.operation.shape else []
    change = " and ".join(changes)
    if len(pair.paths) == 1:
        return change or "as it is"
    along = {"rows": "rows", "columns": "columns", "heads": "rows of each head"}[pair.stack]
    split = f"split in {len(pair.paths)} by {along}"
    return f"{split}, each {change}" if change else split


class Attention(NamedTuple):
    """The attention of one block for one row of a batch; weights are [H, queries, keys].

    Attributes:
        axes: What the keys and the queries are, as ("source", "target").
        theirs: The recorded weights; None where there are none.
        module: Module of the user's program that they are an output of, or "".
    """

    title: str
    name: str
    axes: tuple[str, str]
    ours: np.ndarray
    theirs: np.ndarray | None
    module: str


def chosen_row(record: Record, bos_id: int) -> tuple[Batch, int]:
    """Return the longest row without padding, where masks make no difference, and its batch."""

    def length(place: tuple[Batch, int]) -> int:
        batch, row = place
        source, target = batch.tokens(record.pad_id, bos_id)
        whole = source[row].all() and target[row].all()
        return source.shape[1] + target.shape[1] if whole else 0

    rows = [(batch, row) for batch in record.batches for row in range(len(batch.src))]
    return max(rows, key=length)


def attention_of_both(
    comparison: Comparison,
    params: Mapping[str, Any],
    config: TransformerConfig,
    pad_id: int | None,
    batch: Batch,
    row: int,
) -> list[Attention]:
    """Return the self-attention of the first encoder layer and the cross-attention of the last."""
    one = batch._replace(src=batch.src[row : row + 1], tgt=batch.tgt[row : row + 1])
    convention = Masks(causal="not causal" not in comparison.masks)
    masks = one.masks(convention, pad_id, config.bos_id)
    _, places = run(params, config, one.src, one.tgt, masks)
    modules = {block.name: block.foreign for block in comparison.blocks}
    titles = ("First encoder layer to itself", "Last decoder layer to the source")
    maps = []
    for place, title in zip(attention_places(config), titles, strict=True):
        ((side, (weights,)),) = places[place].items()
        name = place.removesuffix(".dropout")
        module, theirs = _recorded(batch, row, weights[0], modules.get(name, ""))
        maps.append(Attention(title, name, ("source", side), weights[0], theirs, module))
    return maps[::-1]


def _recorded(
    batch: Batch, row: int, ours: np.ndarray, module: str
) -> tuple[str, np.ndarray | None]:
    """Return the recorded weights of an attention, and the name of the module they came from.

    They are an output [B, H, queries, keys] whose rows sum to 1: of the module that is known to be
    the attention or lies in it, or else the output that is most like ours.
    """
    found = {}
    for name, block in batch.blocks.items():
        if block.shape == (len(batch.src), *ours.shape):
            weights = block[row].astype(np.float64)
            if (weights >= 0).all() and np.allclose(weights.sum(-1), 1, atol=1e-3):
                found[name] = weights
    inside = [name for name in found if module and f"{name}.".startswith(f"{module}.")]
    candidates = inside or list(found)
    if not candidates:
        return "", None
    nearest = min(candidates, key=lambda name: np.abs(found[name] - ours).max())
    return nearest, found[nearest]


def _attention_section(
    comparison: Comparison, params: Mapping[str, Any], config: TransformerConfig, record: Record
) -> str:
    batch, row = chosen_row(record, config.bos_id)
    maps = attention_of_both(comparison, params, config, record.pad_id, batch, row)
    lead = (
        "How much each query position (down) attends to each key position (across), head by head. "
        "A stronger colour is a larger weight; the weights of a row sum to 1."
    )
    shown = [_attention(attention) for attention in maps]
    if batch.src.ndim == 2:
        source, target = (
            ", ".join(map(str, ids[:MOST_TOKENS])) + ", …" * (len(ids) > MOST_TOKENS)
            for ids in (batch.src[row], batch.tgt[row])
        )
        shown.append(f"<p>Source ids: {source}<br>Target ids: {target}</p>")
    return _section("Attention side by side", lead, *shown)


def _attention(attention: Attention) -> str:
    """Return the heat maps of one attention, a pair for each head."""
    heads = attention.ours.shape[0]
    both = {"yours": attention.theirs, "this library": attention.ours}
    known = {whose: weights for whose, weights in both.items() if weights is not None}
    strongest = max(float(weights.max()) for weights in known.values()) or 1.0
    if attention.theirs is None:
        note = (
            "Only this library's weights are shown: no output of a module in the record has the "
            f"shape of these weights, [rows, {heads}, {', '.join(attention.axes[::-1])}]. Modules "
            "that compute attention in one fused call do not return them."
        )
    else:
        difference = float(np.abs(attention.theirs - attention.ours).max())
        note = (
            f"Yours is the recorded output of {_code(attention.module)}. The largest difference "
            f"of a weight is {number(difference)}."
        )
    pictures = "\n".join(
        f"<figure>{heat_map(weights[head], strongest, attention.axes, f'head {head}, {whose}')}"
        f"<figcaption>head {head}, {whose}</figcaption></figure>"
        for head in range(min(heads, MOST_HEADS))
        for whose, weights in known.items()
    )
    count = f"first {MOST_HEADS} of {heads} heads" if heads > MOST_HEADS else f"{heads} heads"
    return (
        f'<div class="attention"><h3>{attention.title} <small>{_code(attention.name)}, {count}; '
        f"darkest: {strongest:.2f}</small></h3>\n<p>{note}</p>\n"
        f'<div class="maps">\n{pictures}\n</div></div>'
    )


def heat_map(weights: np.ndarray, strongest: float, axes: tuple[str, str], label: str) -> str:
    """Return an SVG picture of weights [queries, keys], from 0 to `strongest`."""
    cut = weights[:MOST_TOKENS, :MOST_TOKENS]
    rows, columns = cut.shape
    width, height = LEFT + CELL * columns, BELOW + CELL * rows
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">']
    for row in range(rows):
        y = CELL * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + CELL / 2 + 4:g}" class="end">{row}</text>')
        for column in range(columns):
            weight = float(cut[row, column])
            parts.append(
                f'<rect x="{LEFT + CELL * column}" y="{y}" width="{CELL - 1}" '
                f'height="{CELL - 1}" fill-opacity="{max(0.0, weight) / strongest:.3f}">'
                f"<title>{axes[1]} {row}, {axes[0]} {column}: {weight:.3f}</title></rect>"
            )
    for column in range(columns):
        x = LEFT + CELL * column + CELL / 2
        parts.append(f'<text x="{x:g}" y="{CELL * rows + 14}" class="middle">{column}</text>')
    return "".join([*parts, "</svg>"])


def _config_section(config: TransformerConfig) -> str:
    """Return the fields of the config, those that differ from their defaults first."""
    changed, unchanged = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        row = (_code(field.name), _code(repr(value)), _code(repr(field.default)))
        (unchanged if value == field.default else changed).append(row)
    lead = f"Fields of <code>TransformerConfig</code> that differ from the default: {len(changed)}."
    columns = ("Field", "Value", "Default")
    folded = (
        f"<details>\n<summary>Fields at their default <small>{len(unchanged)}</small></summary>\n"
        f"{_table(columns[:2], [row[:2] for row in unchanged])}\n</details>"
    )
    return _section("Config", lead, _table(columns, changed), folded)
