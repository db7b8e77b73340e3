"""Alignments of a line and its translation by cross-attention weights, and a picture of them."""

import importlib.util
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import cross_attention_weights
from jax_transformer.errors import InputError
from jax_transformer.storage.reading import errors_naming
from jax_transformer.storage.writing import check_new_file, staged_file
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.pools import power_of_two
from jax_transformer.translation.translate import Translation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LINES = 6  # lines in one picture
MAX_TOKENS = 60  # tokens of a line or of a translation in a picture
WORD_BEGINNING = "▁"  # drawn for the space that a token begins with
ROWS = 8  # lines whose weights are computed together
CELL = 0.25  # side of one weight, in inches


class Alignment(NamedTuple):
    """How much the model attended to each source token when it chose each target token.

    A notebook draws it.

    Attributes:
        line: Number of the line, from 1.
        source: The text of each source token, EOS included.
        target: The text of each target token, EOS included.
        weights: Mean over decoder layers and heads [target, source]; rows sum to 1.
    """

    line: int
    source: list[str]
    target: list[str]
    weights: Float[np.ndarray, "target source"]

    def __repr__(self) -> str:
        """Return one line without the weights."""
        lengths = f"{len(self.target)} target tokens x {len(self.source)} source tokens"
        return f"Alignment(line={self.line}, {lengths})"

    def _repr_html_(self) -> str:
        """Return the picture of `draw` for a notebook, as SVG."""
        picture = io.StringIO()
        figure_of([self]).savefig(picture, format="svg")
        return picture.getvalue().partition("?>")[2]


def check_picture(path: Path, overwrite: bool) -> None:
    """Refuse a file that `draw` would refuse; changes nothing on the disk."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"{path}: the name of a picture must end in .png, .pdf or .svg")
    check_new_file(path, overwrite, "picture")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{path}: drawing needs matplotlib; install jax-transformer[train]")


def alignments(
    model: TrainedModel,
    lines: Sequence[str],
    translations: Sequence[Sequence[Translation]],
    most: int | None = None,
    skip: int = 0,
) -> list[Alignment | None]:
    """Return the alignment of each line with its best translation; None for a blank one.

    Args:
        most: Lines with text that are aligned, the first ones; None is all.
        skip: Number of lines before them.
    """
    config, params, tokenizer, _ = model
    aligned: list[Alignment | None] = [None] * len(lines)
    filled = [index for index, best in enumerate(translations) if best[0].tokens.size][:most]
    # Few rows at a time, of few shapes: each layer and head has a weight for each pair of tokens.
    for first in range(0, len(filled), ROWS):
        shown = filled[first : first + ROWS]
        sources = tokenizer.encode_source([lines[index] for index in shown], config.max_length)
        sources = [*map(tokenizer.without_padding, sources)]
        targets = [translations[index][0].tokens.tolist() for index in shown]
        src, tgt = (_padded(ids, config) for ids in (sources, targets))
        weights = cross_attention_weights(params, config, src, tgt).mean(axis=(1, 2))
        rows = zip(shown, sources, targets, jax.device_get(weights), strict=False)
        for index, source, target, of_line in rows:
            aligned[index] = Alignment(
                skip + index + 1,
                [text.replace(" ", WORD_BEGINNING) for text in tokenizer.source_texts(source)],
                [text.replace(" ", WORD_BEGINNING) for text in tokenizer.target_texts(target)],
                of_line[: len(target), : len(source)],
            )
    return aligned


def _padded(rows: Sequence[Sequence[int]], config: TransformerConfig) -> Int[np.ndarray, "rows _"]:
    """Return ids as an array whose length is a power of two where the model takes that."""
    longest = max(map(len, rows))
    length = max(longest, min(power_of_two(longest), config.max_length))
    return np.array([[*ids, *[config.pad_id] * (length - len(ids))] for ids in rows])


def draw(path: Path, alignments: Sequence[Alignment | None], overwrite: bool = False) -> None:
    """Write one picture with a panel for each alignment, of its first `MAX_TOKENS` tokens.

    A symbolic link at the path is replaced, not followed.
    """
    check_picture(path, overwrite)
    alignments = [alignment for alignment in alignments if alignment is not None]
    if not alignments:
        raise InputError(f"{path}: not drawn, because no line holds text")
    figure = figure_of(alignments)
    with errors_naming(path, "cannot be written", OSError), staged_file(path) as scratch:
        figure.savefig(scratch)


def figure_of(alignments: Sequence[Alignment]) -> "Figure":
    """Return a figure with a panel for each alignment, of its first `MAX_TOKENS` tokens."""
    # Not pyplot, which keeps global state and may open a window.
    from matplotlib.figure import Figure

    shown = [
        Alignment(line, source[:MAX_TOKENS], target[:MAX_TOKENS], weights[:MAX_TOKENS, :MAX_TOKENS])
        for line, source, target, weights in alignments
    ]
    columns = math.isqrt(len(shown))
    rows = [shown[start : start + columns] for start in range(0, len(shown), columns)]
    heights = [max(len(cut.target) for cut in row) for row in rows]
    widths = [max(len(cut.source) for cut in shown[start::columns]) for start in range(columns)]
    figsize = CELL * sum(widths) + 1.5 * columns + 1.5, CELL * sum(heights) + 1.5 * len(rows)
    figure = Figure(figsize=figsize, layout="constrained")
    panels = figure.subplots(
        len(rows), columns, squeeze=False, width_ratios=widths, height_ratios=heights
    )
    panels = list(panels.flat)
    while len(panels) > len(shown):
        panels.pop().remove()
    strongest = max(cut.weights.max() for cut in shown)
    for panel, cut, whole in zip(panels, shown, alignments, strict=True):
        image = panel.imshow(cut.weights, cmap="Blues", vmin=0, vmax=strongest)
        panel.set_anchor("NW")
        ending = "" if cut.weights.shape == whole.weights.shape else ", its first tokens"
        panel.set_title(f"line {cut.line}{ending}", loc="left")
        panel.set_xticks(range(len(cut.source)), cut.source, rotation=90, parse_math=False)
        panel.set_yticks(range(len(cut.target)), cut.target, parse_math=False)
        panel.set(xlabel="source", ylabel="translation")
    figure.colorbar(image, ax=panels, label="cross-attention weight, mean over layers and heads")
    return figure
