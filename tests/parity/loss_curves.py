"""Train on number words in both frameworks, draw the losses: python -m tests.parity.loss_curves.

The model and the batches are those of `python train.py`, in float64, for its first 300 steps; the
objective has the paper's label smoothing. Writes docs/loss_curves.png and a section of
docs/parity.md.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from docs.draw.style import INK, JAX, STYLE, TORCH
from jax_transformer import TransformerConfig
from jax_transformer.evaluation.scores import exact_match
from jax_transformer.runs.arguments import NUMBER_WORDS
from jax_transformer.tokenizers import BYTE_PAIR_IDS
from tests.parity.document import write_section
from tests.parity.training_run import run

COMMAND = "python -m tests.parity.loss_curves"
DOCUMENT = Path("docs/parity.md")
PICTURE = Path("docs/loss_curves.png")
STEPS = 300
HELD_OUT = 200


def draw(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Draw both curves in one picture and their difference in another below it."""
    figure = Figure(figsize=(5.6, 4.4), layout="constrained")
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = np.arange(1, len(ours) + 1)
    curves.plot(steps, theirs, color=TORCH, linewidth=5, label="PyTorch")
    curves.plot(steps, ours, color=JAX, linewidth=1.5, linestyle="dashed", label="JAX")
    curves.set_ylabel("loss, nats a token")
    curves.legend()
    # A logarithm has no room for 0, the difference of equal numbers.
    difference.semilogy(steps, np.maximum(np.abs(ours - theirs), 1e-17), color=INK)
    difference.set_ylabel("difference")
    difference.set_xlabel("step")
    figure.savefig(PICTURE, dpi=160, metadata={"Software": None})


def main() -> None:
    """Train, draw, print, and write the section of the document."""
    jax.config.update("jax_enable_x64", True)
    defaults = NUMBER_WORDS
    config = TransformerConfig(
        **defaults.model,
        src_vocab_size=defaults.vocab_size,
        tgt_vocab_size=defaults.vocab_size,
        pad_id=BYTE_PAIR_IDS["pad_id"],
        bos_id=BYTE_PAIR_IDS["bos_id"],
        eos_id=BYTE_PAIR_IDS["eos_id"],
    )
    # Section 5.3's schedule alone: torch_reference.training has no cooldown.
    settings = dataclasses.replace(
        defaults.training,
        steps=STEPS,
        cooldown_steps=0,
        label_smoothing=0.1,
        learning_rate_factor=0.25,
    )
    result = run(config, settings, HELD_OUT)
    ours, theirs = result.trained.our_losses, result.trained.their_losses
    with rc_context(STYLE):
        draw(ours, theirs)
    same = np.mean(np.equal(result.our_translations, result.their_translations))
    correct = exact_match(result.our_translations, [result.references])
    text = (
        f"{STEPS} steps in float64: the loss falls from {ours[0]:.3f} to {ours[-1]:.3f} nats a "
        f"token in both frameworks, at most {np.abs(ours - theirs).max():.1e} apart at any step. "
        f"Afterwards {same:.0%} of {len(result.sources)} greedy translations of held-out numbers "
        f"are the same string ({correct:.0%} are already right)."
    )
    print(text)
    write_section(DOCUMENT, COMMAND, text)


if __name__ == "__main__":
    main()
