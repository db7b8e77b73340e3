"""One HTML file that shows how a model was carried over: what agrees, what differs, and where.

The page needs no network and no script; its content policy allows neither, because names of
tensors come from files that others wrote.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Layout
from jax_transformer.errors import InputError
from jax_transformer.porting.html_attention import attention_section
from jax_transformer.porting.html_elements import (
    code,
    folded,
    lines,
    number,
    plural,
    section,
    table,
    text,
)
from jax_transformer.porting.html_errors import errors_section
from jax_transformer.porting.html_weights import weights_section
from jax_transformer.porting.record import Record
from jax_transformer.storage.writing import replace_file

if TYPE_CHECKING:
    from jax_transformer.porting.compare import BlockError, Comparison

MOST_EXPLANATIONS, LONGEST_EXPLANATION = 20, 400  # of these characters
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
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
        comparison: The errors, as `compare_record` returns them.
        params: Parameters of the whole model, nested dicts of arrays.
        layout: The names and shapes of the user's program.
        record: What the user's program computed.
    """
    path = Path(path)
    check_report(path, overwrite)
    page = PAGE.format(
        title=f"Porting report: {text(layout.name)}",
        style=importlib.resources.files(__package__).joinpath("report.css").read_text("utf-8"),
        content=lines(
            (
                _headline(comparison, layout, record),
                errors_section(comparison, comparison.first_differing),
                weights_section(config, layout),
                attention_section(comparison, params, config, record),
                _config_section(config),
            )
        ),
    )
    replace_file(path, page.encode())


def _headline(comparison: Comparison, layout: Layout, record: Record) -> str:
    """Return the verdict in words, and the facts that it rests on."""
    first = comparison.first_differing
    agreeing = sum(block.error <= comparison.bound for block in comparison.blocks)
    logits, masks = comparison.blocks[-1].error, comparison.masks
    rows = sum(len(batch.src) for batch in record.batches)
    facts = {
        "Error of the logits": number(logits),
        "Bound": number(comparison.bound),
        "Blocks within it": f"{agreeing} of {len(comparison.blocks)}",
        "Recorded": plural(rows, "row"),
        "Masks": "as in the config" if masks == "default" else text(masks),
        "Your program returns": text(comparison.output),
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    kind = "agrees" if first is None else "differs"
    sign = "✓" if first is None else "✗"
    return lines(
        (
            f'<header class="{kind}">',
            f'<p class="kicker">Porting report · layout {code(layout.name)}</p>',
            f'<h1><span class="sign" aria-hidden="true">{sign}</span>{_verdict(first)}</h1>',
            f'<p class="lead">{_reason(comparison, first)}</p>',
            _explanations(comparison.explanations),
            f"<dl>{listed}</dl>",
            "</header>",
        )
    )


def _verdict(first: BlockError | None) -> str:
    if first is None:
        return "The converted model agrees with yours"
    return f"The models differ, first in {code(first.name)}"


def _reason(comparison: Comparison, first: BlockError | None) -> str:
    blocks, bound = comparison.blocks, number(comparison.bound)
    if first is None:
        compared = f"each of the {len(blocks)} outputs" if len(blocks) > 1 else "the logits"
        return (
            f"The difference of {compared} stays within {bound}, the largest that rounding causes."
        )
    module = f", your module {code(first.foreign)}," if first.foreign else ""
    before = blocks.index(first)
    earlier = f"The {plural(before, 'block')} before it agree." if before > 1 else ""
    earlier = "The block before it agrees." if before == 1 else earlier
    return (
        f"The output of {code(first.name)}{module} is off by {number(first.error)}, and rounding "
        f"causes at most {bound}. {earlier}"
    )


def _explanations(explanations: tuple[str, ...]) -> str:
    """Return what would make the models agree."""
    if not explanations:
        return ""
    longest = LONGEST_EXPLANATION
    items = "".join(f"<li>{text(one, longest)}</li>" for one in explanations[:MOST_EXPLANATIONS])
    return f'<div class="explanations"><h2>What would explain it</h2><ul>{items}</ul></div>'


def _config_section(config: TransformerConfig) -> str:
    """Return the fields of the config, those that differ from their defaults first."""
    changed, others = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        row = (code(field.name), code(repr(value)), code(repr(field.default)))
        (others if value == field.default else changed).append(row)
    lead = (
        f"{plural(len(changed), 'field')} of <code>TransformerConfig</code> "
        f"{'differs' if len(changed) == 1 else 'differ'} from the default."
    )
    columns = ("Field", "Value", "Default")
    rest = folded(
        f"Fields at their default <small>{len(others)}</small>",
        table(columns[:2], [row[:2] for row in others]),
    )
    return section("Config", lead, table(columns, changed) if changed else "", rest)
