"""The error of every block as a picture: bars on a logarithmic scale, with the bound as a line."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_transformer.porting.html_elements import code, folded, lines, number, section

if TYPE_CHECKING:
    from jax_transformer.porting.compare import BlockError, Comparison

MOST_BARS = 60  # with more blocks than this, there is a bar for each layer
MOST_FOLDED = 2000  # bars of single blocks under those of the layers
MOST_INTERVALS = 4  # of the axis: more labels would touch on a narrow screen
SMALLEST = 1e-18  # where the scale begins at most: below every error of float64
LAYER = re.compile(r"(.*layers\.\d+)\.")


def errors_section(comparison: Comparison, first: BlockError | None) -> str:
    """Return the section.

    Args:
        comparison: The errors.
        first: The first block whose error exceeds the bound; None where there is none.
    """
    blocks = comparison.blocks
    scale = Scale(blocks, comparison.bound)
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
    place = blocks.index(first) if first else None
    if len(blocks) <= MOST_BARS:
        return section("Error by block", lead, _chart(blocks, scale, place))
    every = _chart(blocks[:MOST_FOLDED], scale, place)
    if len(blocks) > MOST_FOLDED:
        every += f"<p>{len(blocks) - MOST_FOLDED:,} more blocks are not shown.</p>"
    lead += " A bar stands for the worst block of a layer; the blocks are listed below."
    summary = f"Every block ({len(blocks):,})"
    worst = _worst_of_layers(blocks)
    place = [block.name for block in worst].index(_layer(first)) if first else None
    layers = _chart(worst, scale, place)
    return section("Error by block", lead, layers, folded(summary, every))


class Scale:
    """A logarithmic axis that holds every error and the bound.

    Attributes:
        low: Its beginning, as an exponent of 10.
        high: Its end.
        bound: Where a bar exceeds the bound, as an error.
        step: Exponents from one tick to the next.
    """

    def __init__(self, blocks: Sequence[BlockError], bound: float) -> None:
        finite = [b.error for b in blocks if math.isfinite(b.error)]
        shown = [min(max(error, SMALLEST), 1e18) for error in (*finite, bound) if error > 0]
        self.bound = bound
        self.low = math.floor(math.log10(min(shown))) - 1
        high = math.ceil(math.log10(max(shown))) + 1
        self.step = max(1, math.ceil((high - self.low) / MOST_INTERVALS))
        self.high = self.low + self.step * math.ceil((high - self.low) / self.step)

    def percent(self, error: float) -> float:
        """Return how far along the axis an error lies, from 0 to 100."""
        if not math.isfinite(error):
            return 100.0
        if error <= 0:
            return 0.0
        place = (math.log10(error) - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, place)), 2)

    @property
    def ticks(self) -> range:
        """The exponents that are labelled."""
        return range(self.low, self.high + 1, self.step)


def _chart(blocks: Sequence[BlockError], scale: Scale, first: int | None) -> str:
    """Return the bars of blocks, of which one may be the first to differ."""
    intervals = len(scale.ticks) - 1
    style = f"--bound:{scale.percent(scale.bound)}%;--interval:{100 / intervals:.4f}%"
    ticks = "".join(
        f'<span style="left:{scale.percent(10.0**exponent)}%">{_power(exponent)}</span>'
        for exponent in scale.ticks
    )
    mark = '<span class="edge left" style="left:var(--bound)">'
    if scale.percent(scale.bound) > 50:
        mark = '<span class="edge right" style="right:calc(100% - var(--bound))">'
    axis = (
        '<div class="axis" aria-hidden="true"><div class="scale">'
        f'<div class="bound-label">{mark}bound {number(scale.bound)}</span></div>'
        f'<div class="ticks">{ticks}</div></div></div>'
    )
    bars = lines(_bar(block, scale, index == first) for index, block in enumerate(blocks))
    return f'<div class="chart" style="{style}">\n{axis}\n<ol>\n{bars}\n</ol>\n</div>'


def _power(exponent: int) -> str:
    """Return a power of 10 as HTML."""
    return f"10<sup>{exponent}</sup>".replace("-", "&minus;")


def _bar(block: BlockError, scale: Scale, is_first: bool) -> str:
    beyond = not block.error <= scale.bound
    value = number(block.error) if math.isfinite(block.error) else "not finite"
    foreign = f'<span class="foreign">{code(block.foreign)}</span>' if block.foreign else ""
    tag = '<span class="tag">first to differ</span>' if is_first else ""
    verdict = '<span class="mark" title="beyond the bound">▲</span> ' if beyond else ""
    kind = "beyond" if beyond else "within"
    width = scale.percent(block.error)
    bar = f'<div class="bar" style="width:{width}%"></div>' if block.error else ""
    return (
        f'<li class="{kind}"><div class="names"><span class="own">{code(block.name)}{tag}</span>'
        f'{foreign}</div><div class="track">{bar}</div>'
        f'<div class="value">{verdict}{value}</div></li>'
    )


def _worst_of_layers(blocks: Sequence[BlockError]) -> list[BlockError]:
    """Return the blocks with those of one layer replaced by the worst of them, under its name."""
    worst: dict[str, BlockError] = {}
    for block in blocks:
        name = _layer(block)
        if name not in worst or _size(block.error) > _size(worst[name].error):
            worst[name] = block._replace(name=name)
    return list(worst.values())


def _layer(block: BlockError) -> str:
    """Return the name of a block's layer; its own name where it is in none."""
    match = LAYER.match(block.name)
    return match[1] if match else block.name


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error
