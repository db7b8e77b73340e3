"""`jax-transformer translate`: lines in, translations out."""

import contextlib
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import jax
from rich.console import Console

from jax_transformer.commands.compilation_cache import keep_compilations
from jax_transformer.commands.translate_arguments import Arguments, named_arguments
from jax_transformer.convert.generation_config import DEFAULT_NEW_TOKENS, names_length
from jax_transformer.convert.huggingface import is_huggingface
from jax_transformer.decoding.generation_config import declared_options
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
from jax_transformer.translation.source_batches import FIRST_WINDOW, with_pauses
from jax_transformer.translation.translate import Translation, translate_windows
from jax_transformer.translation.translate import translate as translate_lines

LONGEST_LINE = 2**20  # bytes
# Arguments of `translate_windows` beside the options of a search.
OF_LINES = ("max_tokens", "overlong", "window", "seed", "split_sentences")


def translate(*argv: str) -> None:
    """Parse the command line and translate lines."""
    arguments = named_arguments(argv)
    _check_files(arguments)
    keep_freed_memory()
    keep_compilations()
    devices = make_mesh(arguments.mesh or "data=-1", jax.local_devices())
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    source, output, overwrite = arguments.input, arguments.output, arguments.overwrite
    with contextlib.ExitStack() as files:
        text = sys.stdin.buffer if source is None else open_stream(source)
        typed = source is None and output is None and sys.stdin.isatty()
        pausing = output is None and not typed and _may_pause(text)
        # To close what a thread still reads would wait for its end.
        if source is None and pausing:
            text = open(text.fileno(), "rb", closefd=False)  # noqa: SIM115
        elif source is not None and not pausing:
            files.enter_context(text)
        folder, ignored = local_folder(arguments.folder), arguments.ignore_generation_config
        languages = {name: getattr(arguments, name) for name in ("source_lang", "target_lang")}
        model = load(folder, ignore_generation_config=ignored, **languages)
        model = model.with_max_length(arguments.max_length, str(folder))
        is_limited = ignored or "max_new_tokens" in arguments.search
        if not is_limited and is_huggingface(folder) and not names_length(folder):
            console.print(
                f"{folder} limits no length, so a translation ends after {DEFAULT_NEW_TOKENS} "
                "tokens, as in transformers; --max-new-tokens sets another limit"
            )
        options = dict.fromkeys(declared_options()) | arguments.search
        options |= {name: getattr(arguments, name) for name in OF_LINES}
        first: list[str] = []
        name = str(source or "standard input")
        skipped: list[int] | None = [] if arguments.bad_lines == "skip" else None
        lines = decode_lines(text, name, LONGEST_LINE, skipped)
        if arguments.alignments is not None:
            lines = _keeping(lines, first, FIRST_WINDOW)
        if pausing:
            lines = with_pauses(lines)
        counted = source is not None and source.is_file() and console.is_terminal
        total = count_lines(source) if counted else None  # a FIFO can be read once only
        shown = {"console": None if typed else console, "total": total, "mesh": devices}
        shown["bad_lines"] = skipped
        if output is None:
            write, commit = sys.stdout.buffer.write, sys.stdout.buffer.flush
        else:
            facts = {**options, "bad_lines": arguments.bad_lines, "scores": arguments.scores}
            facts |= {"mesh": dict(devices.shape)}
            facts |= {"model": model_digest(model), "library": library_digest()}
            facts = json.loads(json.dumps(facts))  # as they are read again: lists for tuples
            kept = {"resume": arguments.resume, "overwrite": overwrite}
            file = files.enter_context(resumable_file(output, facts, **kept))
            if file.lines:
                console.print(f"resumed after {file.lines:,} lines")
            lines, shown["skip"] = file.rest(lines), file.lines
            write, commit = file.write, file.commit
        translated_by = _translated_when_entered if typed else translate_windows
        for window in translated_by(model, lines, **options, **shown):
            _write(window, write, arguments.scores)
            commit()
    if bad := sorted({number for number in skipped or () if number > shown.get("skip", 0)}):
        named = ", ".join(f"{name}:{number}" for number in bad[:BAD_LINES_NAMED])
        console.print(f"{len(bad):,} bad lines gave blank lines, the first: {named}")
    if arguments.alignments is not None:
        best = list(translate_lines(model, first, **options, mesh=devices, bad_lines=skipped))
        drawn = alignment_plot.alignments(model, first, best, alignment_plot.MAX_LINES)
        alignment_plot.draw(arguments.alignments, drawn, overwrite)


def _check_files(arguments: Arguments) -> None:
    """Refuse files that cannot be read or written, before the model is read."""
    source, output, overwrite = arguments.input, arguments.output, arguments.overwrite
    if arguments.alignments is not None:
        alignment_plot.check_picture(arguments.alignments, overwrite)
    if output is not None:
        check_output(output, resume=arguments.resume, overwrite=overwrite)
    elif arguments.resume:
        raise InputError("--resume goes on with a file: name it by --output")
    elif sys.stdout is None:
        raise InputError("standard output is closed; name a file by --output")
    if source is None and sys.stdin is None:
        raise InputError("standard input is closed; name a file by --input")
    if output is not None:
        with contextlib.suppress(OSError):  # without a file; one that is missing is told later
            check_input(os.fstat(sys.stdin.fileno()) if source is None else source.stat(), output)


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


def _write(window: list[list[Translation]], write: Callable[[bytes], object], scores: bool) -> None:
    for translation in chain.from_iterable(window):
        score = f"{translation.score:.6f}\t" if scores else ""
        text = translation.text.replace("\n", " ")  # one translation, one line
        write(f"{score}{text}\n".encode())
