"""`jax-transformer translate`: lines in, translations out."""

import itertools
import sys
from pathlib import Path
from typing import Literal

import jax
import tyro
from rich.console import Console

from jax_transformer.data.corpus import split_lines
from jax_transformer.errors import InputError
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.translation import alignment_plot
from jax_transformer.translation.model_folder import load
from jax_transformer.translation.translate import translate as translate_lines


def translate(
    folder: tyro.conf.Positional[Path],
    /,
    beam: int | None = None,
    length_penalty: float | None = None,
    nbest: int = 1,
    scores: bool = False,
    max_new_tokens: int | None = None,
    overlong: Literal["refuse", "cut"] = "refuse",
    max_tokens: int = 4096,
    mesh: str | None = None,
    alignments: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Translate the lines of standard input: --nbest lines for each on standard output.

    Line i gives the output lines from (i - 1) * nbest + 1 to i * nbest, best first; a blank line
    gives blank lines. With --scores each output line begins with its score and a tab. Progress is
    shown on standard error if that is a terminal.

    Args:
        folder: Folder of a trained model.
        beam: Hypotheses that beam search keeps, 1 is greedy search; if None, the model's default.
        length_penalty: Exponent alpha of ((5 + n) / 6)**alpha, by which the log-probability of a
            translation of n tokens is divided; if None, the model's default.
        nbest: Translations of each line, at most --beam.
        scores: Write the score of each translation; a blank line has the score 0.
        max_new_tokens: Most tokens of a translation, EOS included; if None, the model's default,
            and for a model without one ten more than twice the tokens of the line.
        overlong: If a line has more tokens than the model takes, refuse all lines, or cut it.
        max_tokens: Most tokens, padding included (lines times beam times length), of a batch on a
            device: a higher number needs more memory and fewer batches.
        mesh: This machine's devices as axes, such as data=4,fsdp=2; if None, all on data.
        alignments: Picture to write of the attention to the first few lines: .png, .pdf or .svg.
        overwrite: Replace an existing picture.
    """
    if beam is not None:
        _check_nbest(nbest, beam)
    if alignments is not None:
        alignment_plot.check_picture(alignments, overwrite)
    keep_freed_memory()
    devices = make_mesh(mesh or "data=-1", jax.local_devices())
    model = load(folder)
    _check_nbest(nbest, beam or model.generation.get("beam_size", 1))
    lines = split_lines(sys.stdin.buffer.read(), "standard input")
    translations = translate_lines(
        model,
        lines,
        beam_size=beam,
        num_hypotheses=nbest,
        length_penalty=length_penalty,
        max_new_tokens=max_new_tokens,
        overlong=overlong,
        max_tokens=max_tokens,
        console=Console(stderr=True, markup=False, highlight=False, soft_wrap=True),
        mesh=devices,
    )
    for translation in itertools.chain.from_iterable(translations):
        score = f"{translation.score:.6f}\t" if scores else ""
        sys.stdout.buffer.write(f"{score}{translation.text}\n".encode())
    if alignments is not None:
        drawn = alignment_plot.alignments(model, lines, translations)
        alignment_plot.draw(alignments, drawn, overwrite)


def _check_nbest(nbest: int, beam: int) -> None:
    if not 1 <= nbest <= beam:
        raise InputError(f"--nbest {nbest} must be from 1 to --beam {beam}")
