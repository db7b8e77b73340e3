"""Attention weights of both models side by side, as heat maps.

Letters in shapes: B batch, S source length, T target length, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.model.transformer import Transformer
from jax_transformer.porting.html_elements import code, lines, number, plural, section, text
from jax_transformer.porting.record import Batch, Record

if TYPE_CHECKING:
    from jax_transformer.porting.compare import Comparison

MOST_HEADS = 8
MOST_TOKENS = 12  # of a side, in one heat map
CELL, LEFT, BELOW = 22, 26, 18  # side of one weight, room for the numbers of positions


class Attention(NamedTuple):
    """The attention of one block for one row of a batch.

    Attributes:
        title: What it is called in the report.
        name: The block's own name, as "decoder.layers.5.cross_attention".
        axes: What the keys and the queries are, as ("source", "target").
        ours: Weights of this library [H, queries, keys].
        theirs: Weights that the user's program recorded [H, queries, keys]; None where it
            recorded none.
        module: Module of the user's program that they are an output of, or "".
    """

    title: str
    name: str
    axes: tuple[str, str]
    ours: np.ndarray
    theirs: np.ndarray | None
    module: str


def attention_section(
    comparison: Comparison, params: Mapping[str, Any], config: TransformerConfig, record: Record
) -> str:
    """Return the section."""
    batch, row = chosen_row(record)
    maps = attention_of_both(comparison, params, config, record.pad_id, batch, row)
    lead = (
        "How much each query position (down) attends to each key position (across), head by head. "
        "A stronger colour is a larger weight; the weights of a row sum to 1."
    )
    shown = [_figure(attention) for attention in maps]
    if batch.src.ndim == 2:
        source, target = _ids(batch.src[row]), _ids(batch.tgt[row])
        shown.append(f"<p>Source ids: {source}<br>Target ids: {target}</p>")
    return section("Attention side by side", lead, *shown)


def chosen_row(record: Record) -> tuple[Batch, int]:
    """Return the longest row without padding, where masks make no difference, and its batch."""
    best = (record.batches[0], 0)
    most = -1
    for batch in record.batches:
        for row in range(len(batch.src)):
            sides = (batch.src, batch.tgt)
            whole = not any(_is_padding(side, record.pad_id)[row].any() for side in sides)
            length = (batch.src.shape[1] + batch.tgt.shape[1]) * whole
            if length > most:
                best, most = (batch, row), length
    return best


def attention_of_both(
    comparison: Comparison,
    params: Mapping[str, Any],
    config: TransformerConfig,
    pad_id: int | None,
    batch: Batch,
    row: int,
) -> list[Attention]:
    """Return the first encoder layer's self-attention and the last decoder layer's to the source.

    Args:
        comparison: Its blocks tell which module of the user's program belongs to which block.
        params: Parameters of the whole model.
        pad_id: Id of padding in the batch, or None.
        batch: What the user's program computed.
        row: Row of the batch.
    """
    source, target = ~_is_padding(batch.src, pad_id)[row], ~_is_padding(batch.tgt, pad_id)[row]
    causal = np.tril(np.ones((len(target), len(target)), bool))
    if "not causal" in comparison.masks:
        causal = np.ones_like(causal)
    inputs = (
        batch.src[row : row + 1],
        batch.tgt[row : row + 1],
        source[None, None, None],
        (target & causal)[None, None],
    )
    variables, inputs = jax.tree.map(jnp.asarray, ({"params": dict(params)}, inputs))
    model = Transformer(config)
    recording = {"capture_intermediates": _drops_attention, "mutable": "intermediates"}
    run = jax.jit(lambda variables, *inputs: model.apply(variables, *inputs, **recording)[1])
    with jax.default_matmul_precision("highest"):
        captured = run(variables, *inputs)
    last = config.num_decoder_layers - 1
    wanted = {
        f"decoder.layers.{last}.cross_attention": ("Last decoder layer to the source", "target"),
        "encoder.layers.0.self_attention": ("First encoder layer to itself", "source"),
    }
    modules = {block.name: block.foreign for block in comparison.blocks}
    maps = []
    for name, (title, queries) in wanted.items():
        stack, _, index, block = name.split(".")
        layer = captured["intermediates"][stack][f"layers_{index}"]
        ours = np.asarray(layer[block]["dropout"]["__call__"][0])[0]
        module, theirs = _recorded(batch, row, ours, modules.get(name, ""))
        maps.append(Attention(title, name, ("source", queries), ours, theirs, module))
    return maps


def _drops_attention(module: nn.Module, method: str) -> bool:
    """Return whether the method's output is the weights of an attention after their dropout."""
    attention = len(module.path) > 1 and module.path[-2].endswith("_attention")
    return attention and module.path[-1] == "dropout" and method == "__call__"


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


def _is_padding(tokens: np.ndarray, pad_id: int | None) -> np.ndarray:
    """Return which positions are padding [B, L]; of vectors, none."""
    if tokens.ndim == 3 or pad_id is None:
        return np.zeros(tokens.shape[:2], bool)
    return tokens == pad_id


def _figure(attention: Attention) -> str:
    """Return the heat maps of one attention, a pair for each head."""
    heads = attention.ours.shape[0]
    known = [weights for weights in (attention.theirs, attention.ours) if weights is not None]
    strongest = max(float(weights.max()) for weights in known) or 1.0
    count = f"first {MOST_HEADS} of {heads} heads" if heads > MOST_HEADS else plural(heads, "head")
    caption = f"<h3>{text(attention.title)} <small>{code(attention.name)}, {count}</small></h3>"
    if attention.theirs is None:
        note = (
            "Only this library's weights are shown: no output of a module in the record has the "
            f"shape of these weights, [rows, {heads}, {', '.join(attention.axes[::-1])}]. Modules "
            "that compute attention in one fused call do not return them."
        )
    else:
        difference = np.abs(attention.theirs - attention.ours).max()
        note = (
            f"Yours is the recorded output of {code(attention.module)}. The largest difference "
            f"of a weight is {number(float(difference))}."
        )
    columns = "pairs" if attention.theirs is not None else "singles"
    cells = []
    for head in range(min(heads, MOST_HEADS)):
        both = {"yours": attention.theirs, "this library": attention.ours}
        drawn = lines(
            f"<figure>{heat_map(weights[head], strongest, attention.axes, f'head {head}, {whose}')}"
            f"<figcaption>{whose}</figcaption></figure>"
            for whose, weights in both.items()
            if weights is not None
        )
        cells.append(f'<div class="head"><h4>head {head}</h4><div class="both">{drawn}</div></div>')
    legend = (
        '<div class="legend" aria-hidden="true"><span>0</span><i></i>'
        f"<span>{strongest:.2f}</span></div>"
    )
    return (
        f'<div class="attention">{caption}\n<p>{note}</p>\n{legend}\n'
        f'<div class="{columns}">\n{lines(cells)}\n</div></div>'
    )


def heat_map(weights: np.ndarray, strongest: float, axes: tuple[str, str], label: str) -> str:
    """Return an SVG picture of weights [queries, keys].

    Args:
        weights: From 0 to `strongest`; only the first `MOST_TOKENS` of each axis are drawn.
        strongest: The weight of the darkest cell.
        axes: What the keys and the queries are.
        label: What a reader who does not see the picture is told.
    """
    cut = weights[:MOST_TOKENS, :MOST_TOKENS]
    rows, columns = cut.shape
    width, height = LEFT + CELL * columns, BELOW + CELL * rows
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{text(label)}" '
        f'style="max-width:{1.4 * width:.0f}px">'
    ]
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


def _ids(ids: np.ndarray) -> str:
    shown = [str(index) for index in ids[:MOST_TOKENS]]
    return ", ".join(shown) + ", …" * (len(ids) > MOST_TOKENS)
