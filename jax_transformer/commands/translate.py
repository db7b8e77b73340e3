"""`jax-transformer translate`: lines in, translations out."""

import contextlib
import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from jax_transformer.commands.compilation_cache import keep_compilations
from jax_transformer.convert.generation_config import DEFAULT_NEW_TOKENS, names_length
from jax_transformer.convert.huggingface import is_huggingface
from jax_transformer.errors import InputError
from jax_transformer.runtime.distributed import library_digest
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.hub import local_folder
from jax_transformer.text.corpus import BAD_LINES_NAMED
from jax_transformer.text.text_files import count_lines, decode_lines, open_stream
from jax_transformer.translation import alignment_plot
from jax_transformer.translation.model_folder import TrainedModel, load, model_digest
from jax_transformer.translation.resumable_file import check_input, check_output, resumable_file
from jax_transformer.translation.source_batches import FIRST_WINDOW, LARGEST_WINDOW, with_pauses
from jax_transformer.translation.translate import Translation, translate_windows
from jax_transformer.translation.translate import translate as translate_lines

LONGEST_LINE = 2**20  # bytes


def translate(
    folder: Path,
    /,
    input: Path | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    beam: int | None = None,
    length_penalty: float | None = None,
    nbest: int | None = None,
    scores: bool = False,
    max_new_tokens: int | None = None,
    ignore_generation_config: bool = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
    overlong: Literal["refuse", "cut"] = "refuse",
    bad_lines: Literal["refuse", "skip"] = "refuse",
    max_tokens: int = 4096,
    window: int = LARGEST_WINDOW,
    mesh: str | None = None,
    alignments: Path | None = None,
) -> None:
    """Translate lines, from standard input or a file: --nbest lines for each.

    Line i gives the output lines from (i - 1) * nbest + 1 to i * nbest, best first; a blank line
    gives blank lines. With --scores each output line begins with its score and a tab. Lines are
    translated in windows, small ones first, and are written in the order of the input; where a pipe
    pauses, what has come is translated at once. On a terminal, each line is translated when it is
    entered, and Ctrl-D ends. Otherwise progress is shown on standard error if that is a terminal.

    With --output a translation can be killed at any moment: the same command with --resume goes
    on, and ends with the same bytes.

    Args:
        folder: Folder of a trained model, or a Hugging Face folder of a family that this library
            knows; or the name of such a model on the Hugging Face hub (the extra [hub]).
        input: Text to translate, plain or gzip, or a FIFO; if None, standard input.
        output: File to write, named .part until it is finished; if None, standard output.
        resume: Go on with the unfinished --output, or begin it where there is none.
        overwrite: Replace an existing output or picture.
        beam: Hypotheses that beam search keeps, 1 is greedy search; if None, the model's default
            (of a model that was trained here: 1).
        length_penalty: Exponent of the divisor of the log-probability of n tokens, (5 + n) / 6, or
            n where the model's defaults say so; if None, the model's default (of a model that was
            trained here: 0.6).
        nbest: Translations of each line, at most --beam; if None, the model's default.
        scores: Write the score of each translation; a blank line has the score 0.
        max_new_tokens: Most tokens of a translation, EOS included; if None, the model's default,
            and for a model without one ten more than twice the tokens of the line.
        ignore_generation_config: Ignore the generation defaults of a Hugging Face folder.
        source_lang: Code of the language of the input; if None, the one that the folder names.
        target_lang: Code of the language to translate into; if None, the one that the folder names.
        overlong: Cut a line that has more tokens than the model takes, or refuse it: a bad line.
        bad_lines: Refuse the window of a line that is no UTF-8, has a NUL, is above 1 MiB, or is no
            source of the model; or skip the line: it gives blank lines, and is counted at the end.
        max_tokens: Most tokens, padding included (lines times beam times length), of a batch on a
            device: a higher number needs more memory and fewer batches.
        window: Most lines that are read, sorted by length and translated together: a higher number
            needs more memory and pads less.
        mesh: This machine's devices as axes, such as data=4,fsdp=2; if None, all on data.
        alignments: Picture to write of the attention to the first few lines: .png, .pdf or .svg.
    """
    if beam is not None:
        _check_nbest(nbest or 1, beam)
    if alignments is not None:
        alignment_plot.check_picture(alignments, overwrite)
    if output is not None:
        check_output(output, resume=resume, overwrite=overwrite)
    elif resume:
        raise InputError("--resume goes on with a file: name it by --output")
    elif sys.stdout is None:
        raise InputError("standard output is closed; name a file by --output")
    if input is None and sys.stdin is None:
        raise InputError("standard input is closed; name a file by --input")
    if output is not None:
        with contextlib.suppress(OSError):  # without a file; one that is missing is told later
            check_input(os.fstat(sys.stdin.fileno()) if input is None else input.stat(), output)
    keep_freed_memory()
    keep_compilations()
    devices = make_mesh(mesh or "data=-1", jax.local_devices())
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as files:
        text = sys.stdin.buffer if input is None else open_stream(input)
        typed = input is None and output is None and sys.stdin.isatty()
        pausing = output is None and not typed and _may_pause(text)
        # To close what a thread still reads would wait for its end.
        if input is None and pausing:
            text = open(text.fileno(), "rb", closefd=False)  # noqa: SIM115
        elif input is not None and not pausing:
            files.enter_context(text)
        folder = local_folder(folder)
        model = load(
            folder,
            ignore_generation_config=ignore_generation_config,
            source_lang=source_lang,
            target_lang=target_lang,
        )
        if nbest is None:
            nbest = model.generation.get("num_hypotheses", 1)
        _check_nbest(nbest, model.generation.get("beam_size", 1) if beam is None else beam)
        honoured = is_huggingface(folder) and not ignore_generation_config
        if honoured and max_new_tokens is None and not names_length(folder):
            console.print(
                f"{folder} limits no length, so a translation ends after {DEFAULT_NEW_TOKENS} "
                "tokens, as in transformers; --max-new-tokens sets another limit"
            )
        chosen = {"beam_size": beam, "num_hypotheses": nbest, "length_penalty": length_penalty}
        chosen |= {"max_new_tokens": max_new_tokens, "max_tokens": max_tokens}
        chosen |= {"overlong": overlong, "window": window}
        first: list[str] = []
        name, skipped = str(input or "standard input"), [] if bad_lines == "skip" else None
        lines = decode_lines(text, name, LONGEST_LINE, skipped)
        if alignments is not None:
            lines = _keeping(lines, first, FIRST_WINDOW)
        if pausing:
            lines = with_pauses(lines)
        counted = input is not None and input.is_file() and console.is_terminal
        total, done = count_lines(input) if counted else None, 0  # a FIFO can be read once only
        shown = {"console": console, "mesh": devices, "bad_lines": skipped}
        if output is None:
            if typed:
                translated = _translated_when_entered(model, lines, **chosen, mesh=devices)
            else:
                translated = translate_windows(model, lines, total=total, **chosen, **shown)
            _write(translated, sys.stdout.buffer.write, sys.stdout.buffer.flush, scores)
        else:
            facts = chosen | {"bad_lines": bad_lines, "scores": scores, "mesh": dict(devices.shape)}
            facts |= {"model": model_digest(model), "library": library_digest()}
            with resumable_file(output, facts, resume=resume, overwrite=overwrite) as file:
                done = file.lines
                shown |= {"skip": done, "total": total}
                if done:
                    console.print(f"resumed after {done:,} lines")
                translated = translate_windows(model, file.rest(lines), **chosen, **shown)
                _write(translated, file.write, file.commit, scores)
        if bad := sorted(number for number in skipped or () if number > done):
            named = ", ".join(f"{name}:{number}" for number in bad[:BAD_LINES_NAMED])
            console.print(f"{len(bad):,} bad lines gave blank lines, the first: {named}")
        if alignments is not None:
            best = list(translate_lines(model, first, **chosen, mesh=devices, bad_lines=skipped))
            most = alignment_plot.MAX_LINES
            drawn = alignment_plot.alignments(model, first, best, most)
            alignment_plot.draw(alignments, drawn, overwrite)


def _may_pause(file: io.BufferedReader) -> bool:
    """Return whether a file is a pipe or the like, whose lines come when somebody writes them."""
    try:
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # a file in memory
        return False


def _keeping(lines: Iterable[str], kept: list[str], most: int) -> Iterator[str]:
    """Yield lines, and append the first of them to a list."""
    for line in lines:
        if len(kept) < most:
            kept.append(line)
        yield line


def _translated_when_entered(
    model: TrainedModel, lines: Iterator[str], **options: Any
) -> Iterator[list[list[Translation]]]:
    """Yield the translations of each line that is typed; one that is refused is told at once."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = next(lines, None)
        if line is None:
            print(file=sys.stderr)
            return
        try:
            yield from translate_windows(model, [line], **options)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)


def _write(
    windows: Iterator[list[list[Translation]]],
    write: Callable[[bytes], object],
    commit: Callable[[], object],
    scores: bool,
) -> None:
    """Write the translations of windows; `commit` hands each over, or puts it on the disk."""
    for window in windows:
        for translation in chain.from_iterable(window):
            score = f"{translation.score:.6f}\t" if scores else ""
            text = translation.text.replace("\n", " ")  # one translation, one line
            write(f"{score}{text}\n".encode())
        commit()


def _check_nbest(nbest: int, beam: int) -> None:
    if not 1 <= nbest <= beam:
        raise InputError(f"--nbest {nbest} must be from 1 to --beam {beam}")
