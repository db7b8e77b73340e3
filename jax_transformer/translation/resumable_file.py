"""An output file that is written in parts, by a process that may be killed at any moment.

While the output is unfinished, it is in FILE.part, and FILE.part.json says how many lines of the
input it covers and what it was made of. The finished output gets its name in one step.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.faults import check_path, faults_named
from jax_transformer.storage.reading import read_json
from jax_transformer.storage.writing import WRITING, lock, replace_file


class ResumableFile:
    """An unfinished output that is open for writing; `resumable_file` opens it.

    Attributes:
        lines: Number of input lines whose output is on the disk.
    """

    def __init__(
        self,
        path: Path,
        part: IO[bytes],
        facts: Mapping[str, Any],
        lines: int,
        input_sha256: str,
        replaces: bool,
    ) -> None:
        self.lines = lines
        self._replaces = replaces
        self._path, self._part, self._facts = path, part, facts
        self._input_sha256 = input_sha256
        self._digest = hashlib.sha256()
        self._read = 0

    def rest(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield those lines of the whole input whose output is missing."""
        lines, done = iter(lines), self.lines
        for line in itertools.islice(lines, done):
            self._update(line)
        if done and self._digest.hexdigest() != self._input_sha256:
            raise InputError(
                f"{_part_of(self._path)}: was made of another input, because the first {done:,} "
                "lines differ; give the same input, or overwrite the unfinished output"
            )
        for line in lines:
            self._update(line)
            yield line

    def write(self, content: bytes) -> None:
        """Add to the output; `commit` puts it on the disk."""
        self._part.write(content)

    def commit(self) -> None:
        """Put the output on the disk; it must cover all lines that `rest` has yielded so far."""
        self.lines = self._read
        self._part.flush()
        os.fsync(self._part.fileno())
        state = {
            "lines": self.lines,
            "bytes": self._part.tell(),
            "input_sha256": self._digest.hexdigest(),
            "replaces": self._replaces,
            "facts": dict(self._facts),
        }
        replace_file(_state_of(self._path), json.dumps(state, indent=2).encode())

    def _update(self, line: str) -> None:
        self._digest.update(line.encode() + b"\n")
        self._read += 1


def check_input(source: os.stat_result, path: Path) -> None:
    """Refuse an input that is the file of an output, or one that is written beside it."""
    for place in (path, _part_of(path), _state_of(path)):
        if os.path.exists(place) and os.path.samestat(source, os.stat(place)):
            raise InputError(f"{place}: is the input and would be written; name another output")


def check_output(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse an output that `resumable_file` would refuse; changes nothing on the disk."""
    check_path(path, f"{WRITING}.part.json")
    if resume and overwrite:
        raise InputError("resume=True continues an output and overwrite=True replaces it: name one")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: is a folder, or lies in no writable folder; name another output")
    _check_part(path)
    if overwrite:
        return
    if os.path.lexists(path) and not (resume and _may_replace(path)):
        raise InputError(f"{path}: exists already; name another output or overwrite it")
    if os.path.lexists(_part_of(path)) and not resume:
        raise InputError(
            f"{_part_of(path)}: is an unfinished output; resume it, overwrite it, or name another "
            "output"
        )


@contextlib.contextmanager
def resumable_file(
    path: Path, facts: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> Iterator[ResumableFile]:
    """Open an output for writing; when the block ends without an error, it is finished.

    After an error the unfinished output stays, unless nothing was committed.

    Args:
        path: The finished output; a symbolic link there is replaced, not followed.
        facts: What decides the output, by name, ready for JSON.
        resume: Whether an unfinished output of the same facts is continued; without one, a new
            output begins.
        overwrite: Whether an output, finished or not, is replaced; one that is resumed keeps what
            it was begun with.
    """
    if os.path.lexists(path) and not os.path.lexists(_part_of(path)) and _is_state(_state_of(path)):
        _state_of(path).unlink()  # of a process that was killed at its end
    check_output(path, resume=resume, overwrite=overwrite)
    resume = resume and os.path.lexists(_part_of(path))
    overwrite = overwrite or (resume and _may_replace(path))
    with faults_named(path, "cannot be written", OSError), _locked(_part_of(path)) as part:
        lines, size, digest = _resumed(path, facts) if resume else (0, 0, "")
        if os.path.lexists(path) and not overwrite:  # by a process that has just finished it
            if not resume:
                _part_of(path).unlink()
            raise InputError(f"{path}: exists already; name another output or overwrite it")
        if os.fstat(part.fileno()).st_size < size:
            raise InputError(f"{_part_of(path)}: is shorter than it was; overwrite it")
        part.truncate(size)
        part.seek(size)
        file = ResumableFile(path, part, facts, lines, digest, overwrite)
        try:
            if not resume:
                file.commit()  # from here on FILE.part is known as one of ours
            yield file
        except BaseException:
            if file.lines == 0:  # nothing to go on with
                _part_of(path).unlink()
                _state_of(path).unlink(missing_ok=True)
            raise
        file.commit()
        os.replace(_part_of(path), path)
        _state_of(path).unlink()


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _state_of(path: Path) -> Path:
    return path.with_name(path.name + ".part.json")


def _check_part(path: Path) -> None:
    """Refuse a file that has the name of an unfinished output and is none."""
    part, state = _part_of(path), _state_of(path)
    if os.path.lexists(part) and not os.path.lexists(state) and os.lstat(part).st_size:
        raise InputError(
            f"{part}: is in the way, and not an unfinished output, because {state.name} is "
            "missing; move it, or name another output"
        )
    # Without FILE.part there is a state only of a process that was killed at its end.
    if not os.path.lexists(part) and os.path.lexists(state) and not _is_state(state):
        raise InputError(
            f"{state}: is in the way, and not the state of an unfinished output; move it, or name "
            "another output"
        )


def _is_state(path: Path) -> bool:
    with contextlib.suppress(InputError):
        return path.is_file() and not path.is_symlink() and "input_sha256" in read_json(path)
    return False


def _may_replace(path: Path) -> bool:
    """Return whether an unfinished output was begun in order to replace a finished one."""
    with contextlib.suppress(InputError):  # a state that is missing or damaged is told later
        return os.path.lexists(_part_of(path)) and bool(read_json(_state_of(path)).get("replaces"))
    return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing, created if it is missing, and keep other processes out of it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        lock(descriptor, f"{path}: another process is writing it; wait until that process ends")
        # The file may have become the finished output of that process just before it was locked.
        if not (os.path.lexists(path) and os.path.samestat(os.fstat(descriptor), os.lstat(path))):
            raise InputError(f"{path}: another process has just finished it")
        yield file


def _resumed(path: Path, facts: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the lines, the bytes and the sha256 of the input of an unfinished output."""
    state_path = _state_of(path)
    if not os.path.lexists(state_path):  # killed before the first commit
        return 0, 0, ""
    try:
        state = read_json(state_path)
        lines, size, digest = int(state["lines"]), int(state["bytes"]), str(state["input_sha256"])
        recorded = dict(state["facts"])
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{state_path}: is damaged ({error}); overwrite the unfinished output"
        ) from error
    for name in facts:
        if recorded.get(name) != facts[name]:
            raise InputError(
                f"{name}={facts[name]!r} is not that of the unfinished output, which has "
                f"{shorten(recorded.get(name))}; resume it with the same {name}, or overwrite it"
            )
    return lines, size, digest
