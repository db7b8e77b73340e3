"""What can become of a try, and the checks that decide it."""

import contextlib
import dataclasses
import enum
import hashlib
import io
import os
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from jax_transformer import InputError
from jax_transformer.commands.main import main
from jax_transformer.convert import ConversionError

LONGEST_REFUSAL = 1010  # characters of a line
USAGE_LINES = 40  # of the parser's message about a flag, which shows the flags that are like it
REPORT_LINES = 20  # of a report on tensors that do not fit, as a command prints it
HASHED = 2**26  # bytes; of a longer file the size and the time are compared
PACKAGES = ("jax_transformer", "torch_reference")


class Outcome(enum.StrEnum):
    """What became of a try; the ones after `OTHER` are faults."""

    REFUSED = "refused in one line"
    SAME = "accepted with equal results"
    OTHER = "accepted as another input"
    LONG = "refused in many lines"
    WRONG = "wrong results"
    TRACEBACK = "tracebacks"
    HANG = "hangs"
    CRASH = "crashes"
    MEMORY = "memory above the bound"
    CHANGED = "files changed on failure"
    UNPREPARED = "tries that could not be made"

    @property
    def is_fault(self) -> bool:
        """Whether the library broke a promise."""
        return self not in (Outcome.REFUSED, Outcome.SAME, Outcome.OTHER)


class WrongResult(Exception):
    """An input was accepted and gave what it must not give."""


class UsageError(Exception):
    """The parser of the command line refused a flag; the message is what it printed."""


class Attempt(NamedTuple):
    """A try that is ready to run.

    Attributes:
        what: What is done, in words.
        run: Does it: returns `Outcome.SAME` or `Outcome.OTHER`, or raises.
        guarded: Files and folders that a refusal must leave as they are.
    """

    what: str
    run: Callable[[], Outcome]
    guarded: tuple[Path, ...] = ()


@dataclasses.dataclass
class Result:
    """What became of a try.

    Attributes:
        kind: Its kind.
        seed: Its seed.
        what: What was done.
        outcome: What became of it.
        detail: The message, the traceback, or what differs.
        cause: What two results of one fault have in common.
        seconds: How long it ran.
        growth: Bytes by which the memory of the process grew at most.
    """

    kind: str
    seed: int
    what: str
    outcome: Outcome
    detail: str = ""
    cause: str = ""
    seconds: float = 0.0
    growth: int = 0


def judge(attempt: Attempt) -> tuple[Outcome, str, str]:
    """Run an attempt; return its outcome, the detail and the cause."""
    before = {path: tree_digest(path) for path in attempt.guarded}
    try:
        return attempt.run(), "", ""
    except (InputError, UsageError) as error:
        message = str(error)
        changed = [str(path) for path in attempt.guarded if tree_digest(path) != before[path]]
        if changed:
            return Outcome.CHANGED, f"{message}\nchanged: {', '.join(changed)}", "changed"
        if not is_short(error):
            return Outcome.LONG, message, f"{type(error).__name__}: {message[:60]!r}"
        return Outcome.REFUSED, message, ""
    except WrongResult as error:
        return Outcome.WRONG, str(error), str(error)[:60]
    except Exception as error:
        return Outcome.TRACEBACK, traceback.format_exc(), place_of(error)


def is_short(error: InputError | UsageError) -> bool:
    """Return whether a refusal is as promised: one line that can be read.

    A message about a flag has a frame around it. The report on tensors that do not fit has a line
    for each of the first faults where a command prints it, and for each of them as an exception.
    """
    message = str(error)
    if isinstance(error, UsageError):
        return 0 < len(message.splitlines()) <= USAGE_LINES
    if isinstance(error, ConversionError):
        return bool(message)
    lines = message.splitlines()
    most = REPORT_LINES if lines and "nothing was converted" in lines[0] else 1
    return 0 < len(lines) <= most and max(map(len, lines)) <= LONGEST_REFUSAL


def place_of(error: BaseException) -> str:
    """Return the type of an exception and the last line of the library that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    root = Path(__file__).parents[2]
    ours = [frame for frame in frames if any(f"/{name}/" in frame.filename for name in PACKAGES)]
    place = "outside the library"
    if ours:
        name = os.path.relpath(ours[-1].filename, root)
        place = f"{name}:{ours[-1].lineno} in {ours[-1].name}"
    return f"{type(error).__name__} at {place}"


def tree_digest(path: Path) -> str:
    """Return the sha256 of the names, kinds and contents of all that is at a path."""
    digest = hashlib.sha256()
    for name in [path, *sorted(path.rglob("*"))] if path.is_dir() else [path]:
        status = name.lstat() if os.path.lexists(name) else None
        kind = stat.S_IFMT(status.st_mode) if status else 0
        digest.update(f"{name.relative_to(path)} {kind} ".encode(errors="surrogateescape"))
        if stat.S_ISLNK(kind):
            digest.update(os.readlink(name).encode(errors="surrogateescape"))
        elif stat.S_ISREG(kind) and status.st_size <= HASHED:
            digest.update(hashlib.sha256(name.read_bytes()).digest())
        elif stat.S_ISREG(kind):
            digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def captured(stdin: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Yield what is written to standard output and to standard error; give a standard input."""
    out, error = io.BytesIO(), io.BytesIO()
    streams = {
        "stdin": io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin)), "utf-8"),
        "stdout": io.TextIOWrapper(out, "utf-8", write_through=True),
        "stderr": io.TextIOWrapper(error, "utf-8", "backslashreplace", write_through=True),
    }
    with mock.patch.multiple(sys, **streams):
        yield out, error


def command(arguments: Sequence[str], stdin: bytes = b"") -> bytes:
    """Run a command of `jax-transformer` in this process; return its standard output.

    Raises:
        InputError: The command left with exit code 1 and a message on standard error.
        UsageError: The parser refused a flag.
        WrongResult: It left with another code or without a message.
    """
    return call_program(lambda: main(list(arguments)), stdin)


def call_program(program: Callable[[], object], stdin: bytes = b"") -> bytes:
    """Run a function as a program, which may leave by `sys.exit`; as `command`."""
    code: object = None
    with captured(stdin) as (out, error):
        try:
            program()
        except SystemExit as left:
            code = left.code
        printed, written = out.getvalue(), error.getvalue().decode(errors="replace")
    if code in (None, 0):
        return printed
    if isinstance(code, str):
        code, written = 1, f"{written}{code}\n"
    if code == 2:
        raise UsageError(written)
    message = written[written.find("error: ") :]  # notes may stand before it
    if code != 1 or not message.startswith("error: "):
        raise WrongResult(f"exit code {code} with this on standard error:\n{written[-3000:]}")
    raise InputError(*message.removesuffix("\n").split("\n"))
