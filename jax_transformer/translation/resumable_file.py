"""An output file that is written in parts, by a process that may be killed at any moment.

While the output is unfinished, it is in FILE.part, and FILE.part.json says how many lines of the
input it covers and what it was made of. The finished output gets its name in one step.
"""

import contextlib
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.reading import errors_naming, read_json
from jax_transformer.storage.writing import WRITING, check_path, exists_already, lock, replace_file

Count = Annotated[int, Meta(ge=0, lt=2**62)]


class _State(Struct):
    """The content of FILE.part.json."""

    lines: Count  # of the input
    bytes: Count  # of the output
    input_sha256: str  # of these lines
    replaces: bool  # a finished output
    facts: dict[str, Any]


class ResumableFile:
    """An unfinished output that is open for writing; `resumable_file` opens it."""

    def __init__(self, path: Path, part: IO[bytes], state: _State) -> None:
        self._path, self._part, self._state = path, part, state
        self._digest, self._read = hashlib.sha256(), 0

    @property
    def lines(self) -> int:
        """Number of input lines whose output is on the disk."""
        return self._state.lines

    def rest(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield those lines of the whole input whose output is missing."""
        lines, done = iter(lines), self.lines
        for line in itertools.islice(lines, done):
            self._update(line)
        if done and self._digest.hexdigest() != self._state.input_sha256:
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
        self._part.flush()
        os.fsync(self._part.fileno())
        state = self._state
        state.lines, state.bytes = self._read, self._part.tell()
        state.input_sha256 = self._digest.hexdigest()
        replace_file(_state_of(self._path), json.dumps(to_builtins(state), indent=2).encode())

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
    part, state = _part_of(path), _state_of(path)
    has_part, has_state = os.path.lexists(part), os.path.lexists(state)
    remedy = "move it, or name another output"
    if has_part and not has_state and os.lstat(part).st_size:
        raise InputError(f"{part}: is in the way, because {state.name} is missing; {remedy}")
    if has_state and not stat.S_ISREG(os.lstat(state).st_mode):
        raise InputError(f"{state}: is in the way, and not a regular file; {remedy}")
    if has_state and not has_part:  # of a process that was killed at its end, or a user's file
        _read_state(state, "is in the way", remedy)
    if overwrite:
        return
    is_resumed = resume and has_part and has_state
    if os.path.lexists(path) and not (is_resumed and _read_state(state).replaces):
        raise exists_already(path)
    if has_part and not resume:
        raise InputError(f"{part}: is an unfinished output; resume it, overwrite it, or move it")


@contextlib.contextmanager
def resumable_file(
    path: Path, facts: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> Iterator[ResumableFile]:
    """Open an output for writing; when the block ends without an error, it is finished.

    After an error the unfinished output stays, unless nothing was committed. A symbolic link at the
    path is replaced, not followed.

    Args:
        facts: What decides the output, by name, ready for JSON.
        resume: Continue an unfinished output of the same facts; without one, begin a new one.
        overwrite: Replace an output, finished or not; one that is resumed keeps its own value.
    """
    check_output(path, resume=resume, overwrite=overwrite)
    part_path, state_path = _part_of(path), _state_of(path)
    resume = resume and os.path.lexists(part_path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        errors_naming(path, "cannot be written", OSError),
        os.fdopen(os.open(part_path, flags, 0o666), "r+b") as part,
    ):
        busy = "another process is writing it; wait until that process ends"
        lock(part.fileno(), f"{part_path}: {busy}")
        # The file may have become the finished output of that process just before it was locked.
        opened, is_there = os.fstat(part.fileno()), os.path.lexists(part_path)
        if not (is_there and os.path.samestat(opened, os.lstat(part_path))):
            raise InputError(f"{part_path}: another process has just finished it")
        state = _State(0, 0, "", overwrite, dict(facts))
        if resume and os.path.lexists(state_path):  # else killed before the first commit
            state = _read_state(state_path)
            for name in facts:
                if state.facts.get(name) != facts[name]:
                    raise InputError(
                        f"{name}={facts[name]!r} is not that of the unfinished output, which has "
                        f"{shorten(state.facts.get(name))}; resume it with that, or overwrite it"
                    )
        if os.path.lexists(path) and not state.replaces:  # by a process that has just finished it
            if not resume:
                part_path.unlink()
            raise exists_already(path)
        if opened.st_size < state.bytes:
            raise InputError(f"{part_path}: is shorter than it was; overwrite it")
        part.truncate(state.bytes)
        part.seek(state.bytes)
        file = ResumableFile(path, part, state)
        try:
            if not resume:
                file.commit()  # from here on FILE.part is known as one of ours
            yield file
        except BaseException:
            if file.lines == 0:  # nothing to go on with
                part_path.unlink()
                state_path.unlink(missing_ok=True)
            raise
        file.commit()
        os.replace(part_path, path)
        state_path.unlink()


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _state_of(path: Path) -> Path:
    return path.with_name(path.name + ".part.json")


def _read_state(
    path: Path, fault: str = "is damaged", remedy: str = "overwrite the unfinished output"
) -> _State:
    try:
        return convert(read_json(path), _State)
    except (InputError, ValidationError) as error:
        raise InputError(f"{path}: {fault} ({error}); {remedy}") from error
