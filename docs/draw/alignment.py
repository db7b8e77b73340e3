"""Attention as an alignment over words: where the decoder looked when it wrote each word."""

import numpy as np
from matplotlib.figure import Figure

from docs.draw.dates import translator
from docs.draw.style import INK, PAPER, save

LINE = "november 9, 1989"


def words(tokens: list[str]) -> tuple[list[str], np.ndarray]:
    """Return the words that tokens spell, and the first token of each."""
    begins = [0] + [i for i, token in enumerate(tokens) if i and token[:1] in "▁ <"]
    pieces = np.split(np.array(tokens, object), begins[1:])
    return ["".join(part).strip("▁ ") for part in pieces], np.array(begins)


def draw() -> None:
    """Draw the weights summed over the tokens of a source word, and averaged over a target word."""
    found = translator()(LINE, alignments=True).alignment
    (sources, columns), (targets, rows) = words(found.source), words(found.target)
    weights = np.add.reduceat(found.weights, columns, axis=1)
    sizes = np.diff([*rows, len(found.target)])
    weights = np.add.reduceat(weights, rows, axis=0) / sizes[:, None]
    figure = Figure(figsize=(4.6, 3), layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    for (row, column), weight in np.ndenumerate(weights):
        colour = PAPER if weight > 0.5 else INK
        axes.text(column, row, f"{weight:.2f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(sources)), sources)
    axes.set_yticks(range(len(targets)), targets)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.set(ylabel="written word")
    axes.set_title("weight on each word of the source")
    save(figure, "alignment")
