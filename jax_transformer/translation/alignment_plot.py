"""Alignments of a line and its translation by cross-attention weights, and a picture of them."""

import importlib.util
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jax_transformer.decoding import cross_attention_weights
from jax_transformer.errors import InputError
from jax_transformer.storage.faults import check_path, faults_named
from jax_transformer.storage.writing import staged_file
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.translate import Translation

MAX_LINES = 6  # lines in one picture
MAX_TOKENS = 60  # tokens of a line or of a translation in a picture
WORD_BEGINNING = "▁"  # drawn for the space that a token begins with
CELL = 0.25  # side of one weight, in inches


class Alignment(NamedTuple):
    """How much the model attended to each source token when it chose each target token."""

    line: int  # from 1
    source: list[str]  # the text of each token, EOS included
    target: list[str]
    weights: Float[np.ndarray, "target source"]  # mean over decoder layers and heads; rows sum to 1


def check_picture(path: Path, overwrite: bool) -> None:
    """Refuse a file that `draw` would refuse; changes nothing on the disk."""
    check_path(path)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(f"{path}: the name of a picture must end in .png, .pdf or .svg")
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        raise InputError(f"{path}: exists already; name another picture or overwrite it")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise InputError(f"{path}: {path.parent} is not a writable folder; name another")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{path}: drawing needs matplotlib; install jax-transformer[train]")


def alignments(
    model: TrainedModel, lines: Sequence[str], translations: Sequence[Sequence[Translation]]
) -> list[Alignment]:
    """Return the alignments of the first `MAX_LINES` lines with text with their translations."""
    config, params, tokenizer, _ = model
    shown = [index for index, line in enumerate(lines) if line.strip()][:MAX_LINES]
    if not shown:
        return []
    sources = tokenizer.encode_source([lines[index] for index in shown], config.max_length)
    targets = [translations[index][0].tokens.tolist() for index in shown]
    src, tgt = (
        np.array([*zip_longest(*ids, fillvalue=config.pad_id)]).T for ids in (sources, targets)
    )
    weights = cross_attention_weights(params, config, src, tgt).mean(axis=(1, 2))
    return [
        Alignment(
            index + 1,
            [text.replace(" ", WORD_BEGINNING) for text in tokenizer.source_texts(source)],
            [text.replace(" ", WORD_BEGINNING) for text in tokenizer.target_texts(target)],
            of_line[: len(target), : len(source)],
        )
        for index, source, target, of_line in zip(
            shown, sources, targets, jax.device_get(weights), strict=True
        )
    ]


def draw(path: Path, alignments: Sequence[Alignment], overwrite: bool = False) -> None:
    """Write one picture with a panel for each alignment, of its first `MAX_TOKENS` tokens."""
    check_picture(path, overwrite)
    if not alignments:
        raise InputError(f"{path}: not drawn, because no line holds text")
    # Not pyplot, which keeps global state and may open a window.
    from matplotlib.figure import Figure

    shown = [
        Alignment(line, source[:MAX_TOKENS], target[:MAX_TOKENS], weights[:MAX_TOKENS, :MAX_TOKENS])
        for line, source, target, weights in alignments
    ]
    width, heights = max(len(cut.source) for cut in shown), [len(cut.target) for cut in shown]
    height = CELL * sum(heights) + 1.5 * len(shown)
    figure = Figure(figsize=(CELL * width + 3, height), layout="constrained")
    panels = figure.subplots(len(shown), squeeze=False, height_ratios=heights)[:, 0]
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
    with faults_named(path, "cannot be written", OSError), staged_file(path) as scratch:
        figure.savefig(scratch)
