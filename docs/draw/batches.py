"""Buckets and packing: the same pairs, laid out for fixed shapes in two ways."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.draw.style import FILLS, INK, MIDDLE, PAPER, save
from jax_transformer.text.pieces import Piece, fill_rows
from jax_transformer.text.plan import bucket_lengths

PAIRS, BUCKETS, PACKED = 36, 3, 32


def lay(axes: Axes, rows: list[tuple[int, list[int]]], title: str) -> None:
    """Draw rows of a width, each filled by sentences of some lengths; hatched is padding."""
    used = sum(sum(lengths) for _, lengths in rows)
    area = sum(width for width, _ in rows)
    number = 0
    for row, (width, lengths) in enumerate(rows):
        axes.barh(-row, width, 0.8, color=PAPER, edgecolor=MIDDLE, hatch="////", linewidth=0.5)
        left = 0
        for length in lengths:
            fill = FILLS[number % len(FILLS)]
            axes.barh(-row, length, 0.8, left, color=fill, edgecolor=INK, linewidth=0.5)
            left, number = left + length, number + 1
    axes.set(yticks=[], ylim=(-PAIRS, 1), xlim=(0, PACKED + 1), xlabel="tokens of a row")
    axes.set_title(f"{title}\n{len(rows)} rows, {1 - used / area:.0%} padding")


def draw() -> None:
    """Draw one batch of the longest length, the buckets of the library, and its packed rows."""
    lengths = np.random.default_rng(0).gamma(5, 2.2, PAIRS).astype(int).clip(3, PACKED - 2)
    ends = bucket_lengths(np.bincount(lengths), BUCKETS)
    places = np.searchsorted(ends, lengths)
    order = np.argsort(places, kind="stable")
    buckets = [(ends[places[pair]], [lengths[pair]]) for pair in order]
    pairs = ((Piece(i, 0, 0, 0, n, n), None) for i, n in enumerate(lengths.tolist()))
    packed = [[piece.number for piece in row] for row in fill_rows(pairs, (PACKED, PACKED))]
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    lay(left, [(lengths.max(), [length]) for length in lengths], "one shape")
    lay(middle, buckets, f"buckets: {len(ends)} shapes")
    lay(right, [(PACKED, lengths[row].tolist()) for row in packed], "packed: 1 shape")
    save(figure, "batches")
