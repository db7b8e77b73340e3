"""Parity by block: both models with the same random weights, on the same ragged batch."""

import re

import jax
import numpy as np
import torch
from matplotlib.figure import Figure

from docs.draw.style import FAINT, INK, JAX, TORCH, save
from jax_transformer import parity, porting
from tests.models import random_tokens, small_config
from tests.parity.ladder import BOUNDS
from tests.parity.measure import make_pair

PRESET = "vaswani2017"
PARTS = re.compile(r"[.#]|residual|projection|dropout")  # of blocks, which are not drawn
SMALLEST = 1e-17  # where an error of 0 is drawn: a logarithm has no place for it


def errors(dtype: str) -> dict[str, float]:
    """Return the largest error of each kind of block, max|a - b| / max|b|."""
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        config, params, module = make_pair(small_config(PRESET), dtype)
        src, tgt = random_tokens(config, dtype=dtype)
        theirs = parity.record(
            module.eval(),
            lambda model: {"logits": model(torch.from_numpy(src), torch.from_numpy(tgt))},
        )
    found = parity.compare(porting.record_model(params, config, src, tgt), theirs)
    worst: dict[str, float] = {}
    for pair in found.blocks:
        kind = re.sub(r"\.layers\.\d+$", " layer", pair.b or "")
        kind = (
            re.sub(r"\.layers\.\d+\.", " ", kind)
            .replace("_residual.norm", " norm")
            .replace("_", " ")
        )
        if kind and not PARTS.search(kind) and pair.error is not None:
            worst[kind] = max(pair.error, worst.get(kind, 0.0))
    return worst


def draw() -> None:
    """Draw a row for each block, a marker for each precision, and a line for float64's bound.

    No fixed bound judges float32: `tests.parity.ladder` does so by float64.
    """
    measured = {dtype: errors(dtype) for dtype in ("float64", "float32")}
    names = list(measured["float64"])
    figure = Figure(figsize=(5.6, 0.21 * len(names) + 1), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(names))[::-1]
    for dtype, (marker, colour) in {"float64": ("o", JAX), "float32": ("D", TORCH)}.items():
        values = [max(SMALLEST, measured[dtype][name]) for name in names]
        axes.plot(values, rows, marker, color=colour, markeredgecolor=INK, label=dtype)
    bound = BOUNDS["block"][0]
    axes.axvline(bound, color=INK, linestyle="dotted", linewidth=1)
    axes.text(1.6 * bound, len(names) - 0.4, f"bound of float64: {bound:.0e}", fontsize=8)
    axes.hlines(rows, SMALLEST, 1e-5, color=FAINT, linewidth=0.5, zorder=0)
    axes.set_yticks(rows, names, fontsize=9)
    axes.set(xscale="log", xlim=(SMALLEST / 2, 1e-5), ylim=(-0.8, len(names) + 0.7))
    axes.set_xlabel("largest relative difference of JAX and PyTorch")
    ticks = [SMALLEST, 1e-15, 1e-13, 1e-11, 1e-9, 1e-7]
    axes.set_xticks(ticks, ["equal", *(f"1e{round(np.log10(tick))}" for tick in ticks[1:])])
    axes.minorticks_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.55, 0.65))
    save(figure, "parity")
