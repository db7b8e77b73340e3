"""Which foreign tensor became which parameter, as tables whose rows stand for all layers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import LAYER, Layout, Pair, expand
from jax_transformer.porting.html_elements import code, folded, plural, section, table

MOST_ROWS = 400  # of one table, and names of one sentence
NUMBERS = re.compile(r"(\d+)")
PARTS = {
    "Embeddings and output": "",
    "Encoder": "encoder",
    "Decoder": "decoder",
}


def weights_section(config: TransformerConfig, layout: Layout) -> str:
    """Return the section."""
    pairs = expand(layout, config)
    parameters = {
        path: shape for pair in pairs for path, shape in zip(pair.paths, pair.shapes, strict=True)
    }
    inside = f"{layout.scope}/" if layout.scope else ""
    lead = (
        f"{plural(len(pairs), 'tensor')} of your model became "
        f"{plural(len(parameters), 'parameter')} with "
        f"{plural(sum(map(math.prod, parameters.values())), 'number')}. "
        "A row stands for the same tensor of all layers."
    )
    content = []
    for title, stack in PARTS.items():
        own = [pair for pair in pairs if _stack(f"{inside}{pair.paths[0]}") == stack]
        if own:
            summary = f"{title} <small>{plural(len(own), 'tensor')}</small>"
            content.append(folded(summary, _table(grouped(own)), is_open=True))
    if layout.buffers:
        names = ", ".join(code(buffer.foreign) for buffer in layout.buffers[:MOST_ROWS])
        content.append(f"<p>Computed and compared, not learned: {names}.</p>")
    if layout.unused:
        listed = ", ".join(map(code, layout.unused[:MOST_ROWS]))
        content.append(f"<p>Without a meaning here, and not read: {listed}.</p>")
    return section("Weights that went where", lead, *content)


def grouped(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs in groups that are alike in all but the number of the layer."""
    groups: dict[tuple, list[Pair]] = {}
    for pair in pairs:
        has_layers = bool(LAYER.search(pair.paths[0]))
        foreign = NUMBERS.sub("#", pair.foreign) if has_layers else pair.foreign
        own = tuple(LAYER.sub("layers_#", path) for path in pair.paths)
        key = (foreign, own, pair.operation, pair.stack, pair.parts)
        groups.setdefault(key, []).append(pair)
    return [sorted(group, key=_layer_number) for group in groups.values()]


def _layer_number(pair: Pair) -> int:
    match = LAYER.search(pair.paths[0])
    return int(match[1]) if match else 0


def template(names: Sequence[str]) -> str:
    """Return names that differ in one number as one name, as "layers.{0..5}.norm.weight".

    Names that differ in more than a number are shown by their first and last.
    """
    split = [NUMBERS.split(name) for name in names]
    if len({len(pieces) for pieces in split}) > 1:
        return f"{names[0]} … {names[-1]}"
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    return "".join(column[0] if len(column) == 1 else _range(column) for column in columns)


def _range(values: Sequence[str]) -> str:
    """Return numbers as "{0..5}", or as "{0,2,5}" where they are not in sequence."""
    if all(value.isdecimal() for value in values):
        first, last = int(values[0]), int(values[-1])
        if len(values) > 2 and [*map(int, values)] == list(range(first, last + 1)):
            return f"{{{first}..{last}}}"
    shown = [*values[:8], "…"] if len(values) > 9 else values
    return "{" + ",".join(shown) + "}"


def _stack(path: str) -> str:
    first = path.partition("/")[0]
    return first if first in ("encoder", "decoder") else ""


def _table(groups: Sequence[Sequence[Pair]]) -> str:
    """Return the table of groups, a row for each."""
    rows = [
        (
            code(template([pair.foreign for pair in group])),
            f'<span class="shape">{" &times; ".join(map(str, group[0].shape))}</span>',
            operation(group[0]),
            _parameters(group),
        )
        for group in groups[:MOST_ROWS]
    ]
    columns = ("Your tensor", "Shape", "Operation", "Parameter")
    drawn = table(columns, rows, "weights")
    if more := len(groups) - len(rows):
        return f"{drawn}\n<p>{plural(more, 'more row')} are not shown.</p>"
    return drawn


def operation(pair: Pair) -> str:
    """Return in words how the parameters of a pair are read from its foreign tensor."""
    change = "transposed" if pair.operation.transposed else ""
    if pair.operation.shape:
        change += " and reshaped" if change else "reshaped"
    if len(pair.paths) == 1:
        return change or "as it is"
    along = {"rows": "rows", "columns": "columns", "heads": "rows of each head"}[pair.stack]
    split = f"split in {len(pair.paths)} by {along}"
    return f"{split}, each {change}" if change else split


def _parameters(group: Sequence[Pair]) -> str:
    """Return the parameters, the differing parts of several paths in braces and in order."""
    paths = [
        template([pair.paths[index] for pair in group]).split("/")
        for index in range(len(group[0].paths))
    ]
    if len({len(path) for path in paths}) > 1:
        return ", ".join(code("/".join(path)) for path in paths)
    columns = [list(dict.fromkeys(column)) for column in zip(*paths, strict=True)]
    return code("/".join(c[0] if len(c) == 1 else "{" + ",".join(c) + "}" for c in columns))
