"""What may become of a hostile input: a refusal in one line, or a right result; all else fails."""

import hashlib
import io
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from jax_transformer import InputError
from jax_transformer.commands.main import main
from jax_transformer.convert import ConversionError

REFUSED = "refused in one line"
SAME = "accepted with equal results"
OTHER = "accepted as another input"
LONGEST_REFUSAL = 1010  # characters of a line
REPORT_LINES = 20  # of a report on tensors that do not fit, as a command prints it
HASHED = 2**26  # bytes; of a longer file the size and the time are compared
MOST_GROWTH = 300 * 2**20  # bytes of memory that one attempt may take

# What returns `SAME` or `OTHER`, or raises; and what a refusal must leave as it is.
Attempt = tuple[Callable[[], str], tuple[Path, ...]]


class Fault(AssertionError):
    """A broken promise of the library."""


@dataclass
class Found:
    """Attempts by outcome, the seconds of the slowest and the bytes that the largest took."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    growth: int = 0

    def judge(self, run: Callable[[], str], guarded: tuple[Path, ...]) -> None:
        """Run an attempt and count what became of it; whatever else it raises is a fault."""
        before = {path: tree_digest(path) for path in guarded}
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        resident, started = memory("VmRSS"), time.monotonic()
        try:
            outcome = run()
        except InputError as error:
            changed = [path for path in guarded if tree_digest(path) != before[path]]
            if changed:
                raise Fault(f"refused ({error}) after it changed {changed}") from error
            if not is_short(error):
                raise Fault(f"refused in several lines: {error}") from error
            outcome = REFUSED
        self.seconds = max(self.seconds, time.monotonic() - started)
        self.growth = max(self.growth, memory("VmHWM") - resident)
        if self.growth > MOST_GROWTH:
            raise Fault(f"the memory grew by {self.growth >> 20} MiB")
        self.outcomes[outcome] += 1


def memory(name: str) -> int:
    """Return a number of bytes from /proc/self/status, for example VmRSS, VmHWM or VmSize."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def is_short(error: InputError) -> bool:
    """Return whether a refusal is one line, or a report on tensors."""
    lines = str(error).splitlines()
    if isinstance(error, ConversionError):
        return bool(lines)
    most = REPORT_LINES if lines and "nothing was converted" in lines[0] else 1
    return 0 < len(lines) <= most and max(map(len, lines)) <= LONGEST_REFUSAL


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


def command(arguments: Sequence[str], stdin: bytes = b"") -> bytes:
    """Run a command in this process; return what it prints, or raise its refusal."""
    code, out, error = None, io.BytesIO(), io.BytesIO()
    streams = {
        "stdin": io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin)), "utf-8"),
        "stdout": io.TextIOWrapper(out, "utf-8", write_through=True),
        "stderr": io.TextIOWrapper(error, "utf-8", "backslashreplace", write_through=True),
    }
    with mock.patch.multiple(sys, **streams):
        try:
            main(list(arguments))
        except SystemExit as left:
            code = left.code
        printed, written = out.getvalue(), error.getvalue().decode(errors="replace")
    if code in (None, 0):
        return printed
    if isinstance(code, str):
        code, written = 1, f"{written}{code}\n"
    message = written[written.find("error: ") :]  # notes may stand before it
    if code != 1 or not message.startswith("error: "):
        raise Fault(f"exit code {code} with this on standard error:\n{written[-3000:]}")
    raise InputError(*message.removesuffix("\n").split("\n"))
