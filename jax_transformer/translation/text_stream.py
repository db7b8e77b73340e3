"""Translation of a file, a pipe or what is typed, into a file or to standard output."""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console

from jax_transformer.errors import BAD_LINES_NAMED, InputError
from jax_transformer.storage.reading import library_digest
from jax_transformer.text.text_files import (
    LONGEST_LINE,
    count_lines,
    decode_lines,
    open_stream,
)
from jax_transformer.translation import alignment_plot
from jax_transformer.translation.model_folder import model_digest
from jax_transformer.translation.resumable_file import check_input, check_output, resumable_file
from jax_transformer.translation.sources import FIRST_WINDOW, LARGEST_WINDOW, windows
from jax_transformer.translation.translate import TextSearch, Translation, translate_windows

PAUSE = 0.1  # seconds without another line
UNWRITTEN = (".xz", ".zst", ".bz2", ".zip")  # suffixes of compressed files that are not written


@dataclasses.dataclass(frozen=True)
class Files:
    """What is read and written.

    Attributes:
        input: Text to translate, plain or gzip, or a FIFO; without it, standard input.
        output: File to write, with gzip if its name ends in .gz, named .part until it is finished;
            without it, standard output.
        resume: Go on with the unfinished --output, or begin it where there is none.
        overwrite: Replace an existing output or picture.
        bad_lines: Refuse the window of a line that is not UTF-8, has a NUL, is above 1 MiB, or
            cannot be a source of the model; or skip the line: it gives blank lines, and is counted
            at the end.
        scores: Write the score of each translation; a blank line has the score 0.
        alignments: Picture to write of the attention to the first few lines: .png, .pdf or .svg.
    """

    input: Path | None = None
    output: Path | None = None
    resume: bool = False
    overwrite: bool = False
    bad_lines: Literal["refuse", "skip"] = "refuse"
    scores: bool = False
    alignments: Path | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the output is compressed with gzip."""
        return self.output is not None and self.output.suffix == ".gz"

    def check(self) -> None:
        """Refuse files that cannot be read or written; changes nothing on the disk."""
        source, output = self.input, self.output
        if self.alignments is not None:
            alignment_plot.check_picture(self.alignments, self.overwrite)
        if output is not None:
            if output.suffix in UNWRITTEN:
                raise InputError(
                    f"{output}: is written plain, or with gzip as .gz; name one of these"
                )
            check_output(output, resume=self.resume, overwrite=self.overwrite)
        elif self.resume:
            raise InputError("--resume goes on with a file: name it by --output")
        elif sys.stdout is None:
            raise InputError("standard output is closed; name a file by --output")
        if source is None and sys.stdin is None:
            raise InputError("standard input is closed; name a file by --input")
        if output is not None:
            # Standard input may be no file; a missing one is refused where it is opened.
            with contextlib.suppress(OSError):
                here = os.fstat(sys.stdin.fileno()) if source is None else source.stat()
                check_input(here, output)


class OpenText(NamedTuple):
    """An open text."""

    file: io.BufferedReader
    name: str
    is_typed: bool  # on a terminal: each line is translated when it is entered
    may_pause: bool  # it is a pipe or the like, whose lines come when somebody writes them


@contextlib.contextmanager
def open_input(files: Files) -> Iterator[OpenText]:
    """Open the text to translate."""
    source, shown = files.input, files.output is None
    file = sys.stdin.buffer if source is None else open_stream(source)
    is_typed = source is None and shown and sys.stdin.isatty()
    try:
        is_pipe = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # a file in memory
        is_pipe = False
    may_pause = shown and not is_typed and is_pipe
    # To close what a thread still reads would wait for its end.
    if source is None and may_pause:
        file = open(file.fileno(), "rb", closefd=False)  # noqa: SIM115
    closing = source is not None and not may_pause
    with file if closing else contextlib.nullcontext():
        yield OpenText(file, str(source or "standard input"), is_typed, may_pause)


def translate_text(search: TextSearch, text: OpenText, files: Files, console: Console) -> None:
    """Translate the lines of a text, and write the translations of each window at once.

    Raises:
        InputError: As `translate_windows`; a line is not text; or the unfinished output was made of
            something else.
    """
    bad: list[int] | None = [] if files.bad_lines == "skip" else None
    first: list[str] = []  # lines, for the picture
    lines: Iterable[str | None] = decode_lines(text.file, text.name, LONGEST_LINE, bad)
    if files.alignments is not None:
        lines = _keeping(lines, first)
    if text.may_pause:
        lines = with_pauses(lines)
    is_counted = files.input is not None and files.input.is_file() and console.is_terminal
    total = count_lines(files.input) if is_counted else None  # a FIFO can be read once only
    translate = partial(translate_windows, search, bad_lines=bad)
    with contextlib.ExitStack() as opened:
        if files.output is None:
            begun, write, commit = 0, sys.stdout.buffer.write, sys.stdout.buffer.flush
        else:
            part = resumable_file(
                files.output,
                _facts(search, files),
                resume=files.resume,
                overwrite=files.overwrite,
            )
            file = opened.enter_context(part)
            begun, write, commit, lines = file.lines, file.write, file.commit, file.rest(lines)
        if files.is_packed and not begun:
            write(gzip.compress(b"", mtime=0))  # of an input without lines, too
        if begun:
            console.print(f"resumed after {begun:,} lines")
        if text.is_typed:
            translated = _translated_when_entered(translate, lines)
        else:
            of_lines = windows(lines, search.lines.window, begun)
            translated = translate(of_lines, skip=begun, total=total, console=console)
        for window in translated:
            written = []
            for translation in chain.from_iterable(window):
                score = f"{translation.score:.6f}\t" if files.scores else ""
                one_line = translation.text.replace("\n", " ")
                written.append(f"{score}{one_line}\n")
            content = "".join(written).encode()
            # Each window is a member, behind which a resumed output goes on (RFC 1952).
            write(gzip.compress(content, mtime=0) if files.is_packed else content)
            commit()
    if numbers := sorted({number for number in bad or () if number > begun}):
        named = ", ".join(f"{text.name}:{number}" for number in numbers[:BAD_LINES_NAMED])
        console.print(f"{len(numbers):,} bad lines gave blank lines, the first: {named}")
    if files.alignments is not None:
        (best,) = translate([first])
        most, model = alignment_plot.MAX_LINES, search.models[0]
        drawn = alignment_plot.alignments(model, first, best, most)
        alignment_plot.draw(files.alignments, drawn, files.overwrite)


def _facts(search: TextSearch, files: Files) -> dict[str, Any]:
    """Return what decides the translations, beside the lines."""
    facts = dataclasses.asdict(search.generation)
    facts["max_new_tokens"] = search.generation.max_new_tokens if search.is_limited else None
    facts |= dataclasses.asdict(search.lines)
    facts |= {"seed": search.seed, "bad_lines": files.bad_lines, "scores": files.scores}
    facts |= {"mesh": dict(search.mesh.shape), "library": library_digest()}
    facts |= {"model": model_digest(search.models[0])}
    return json.loads(json.dumps(facts))  # as they are read again: lists for tuples


def with_pauses(lines: Iterable[str]) -> Iterator[str | None]:
    """Yield lines as they arrive, and None after each `PAUSE` without one; a thread reads them."""
    arrived: queue.Queue[str | BaseException] = queue.Queue(LARGEST_WINDOW)

    def read() -> None:
        try:
            for line in lines:
                arrived.put(line)
            arrived.put(StopIteration())
        except BaseException as error:
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=PAUSE)
        except queue.Empty:
            line = None
        if isinstance(line, StopIteration):
            return
        if isinstance(line, BaseException):
            raise line
        yield line


def _keeping(lines: Iterable[str], first: list[str]) -> Iterator[str]:
    for line in lines:
        if len(first) < FIRST_WINDOW:
            first.append(line)
        yield line


def _translated_when_entered(
    translate: Callable[[list[list[str]]], Iterator[list[list[Translation]]]], lines: Iterator[str]
) -> Iterator[list[list[Translation]]]:
    """Yield the translations of each line that is typed; one that is refused is told at once."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = next(lines, None)
        if line is None:
            print(file=sys.stderr)
            return
        try:
            yield from translate([[line]])
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
