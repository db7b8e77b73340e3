"""A parallel text in files of any size: read in blocks of lines, and described by its facts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_transformer.errors import InputError
from jax_transformer.text.text_files import (
    LineReader,
    count_line_ends,
    decode_line,
    open_text,
    reading,
)

PACKED_SUFFIXES = (".gz", ".xz", ".zst")
FILE_CHUNK = 2**18  # bytes of a file that are digested at once


class Block(NamedTuple):
    r"""Lines of a parallel text that follow each other, as bytes without "\n".

    Attributes:
        first: Number of the first pair in the whole text, from 0.
        first_line: Number of its line in its files, from 1.
        source_name: Name of the source file in error messages.
        target_name: Name of the target file, or None where a source is a line of a .tsv file.
        sources: The source lines, or the whole lines of a .tsv file.
        targets: The target lines, as many as sources; none for a .tsv file.
        overlong: Indices of the pairs with a line above `LONGEST_LINE` bytes of `text_files`, in
            place of which b"" stands.
    """

    first: int
    first_line: int
    source_name: str
    target_name: str | None
    sources: list[bytes]
    targets: list[bytes]
    overlong: frozenset[int]


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """What tells whether a file of a text has changed.

    Attributes:
        path: Absolute path.
        bytes: Size of the file.
        mtime_ns: Time of its last change, in nanoseconds.
        sha256: SHA-256 of the bytes of the file, in hexadecimal digits.
        lines: Number of lines of its text, after decompression.
    """

    path: str
    bytes: int
    mtime_ns: int
    sha256: str
    lines: int

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name, of types that JSON has."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, attributes: dict[str, Any]) -> FileFacts:
        """Return the facts of which `to_json` made the attributes.

        Raises:
            InputError: The attributes are not those.
        """
        types = {"path": str, "bytes": int, "mtime_ns": int, "sha256": str, "lines": int}
        found = {name: type(value) for name, value in attributes.items()}
        if found != types:
            raise InputError(f"{attributes!r} are not the facts of a file; prepare the text again")
        return cls(**attributes)


@dataclasses.dataclass(frozen=True)
class ParallelText:
    """Files of a parallel text, whose pairs are numbered in the order of the files.

    Attributes:
        sources: Files with one source sentence on each line; without targets, .tsv files, each line
            of which holds a source, one tab and a target. UTF-8, plain or compressed.
        targets: For each source file, the file with the translations on the same lines.

    Raises:
        InputError: There are no sources, the numbers of files differ, or a .tsv file has a target
            file, or another file has none.
    """

    sources: tuple[Path, ...]
    targets: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not self.sources:
            raise InputError("a parallel text has no files; name at least one source file")
        if self.targets and len(self.sources) != len(self.targets):
            raise InputError(
                f"{len(self.sources)} source files and {len(self.targets)} target files; name as "
                "many target files as source files, in the same order"
            )
        for path in self.sources + self.targets:
            if self.targets and _is_tsv(path):
                raise InputError(f"{path}: a .tsv file holds pairs; name it without target files")
            if not self.targets and not _is_tsv(path):
                raise InputError(
                    f"{path}: has no target file; name one, or a .tsv file of sources and targets"
                )

    @property
    def names(self) -> str:
        """The names of the files, for messages."""
        return " and ".join(", ".join(map(str, side)) for side in self._sides())

    def blocks(self, pairs: int) -> Iterator[Block]:
        """Yield the lines in blocks, which depend on nothing but the text and `pairs`.

        A block ends after `pairs` pairs or at the end of a file. In memory are the lines of one
        block, none of them above `LONGEST_LINE` bytes.

        Args:
            pairs: Most pairs of a block.

        Yields:
            The blocks in the order of the text; none for a file without lines.

        Raises:
            InputError: A file cannot be read or decompressed, or two files differ in their numbers
                of lines; the last block of such files is not yielded.
        """
        first = 0
        for files in zip(*self._sides(), strict=True):
            for block in _file_blocks(files, first, pairs):
                yield block
                first = block.first + len(block.sources)

    def facts(
        self, known: Sequence[FileFacts] = (), progress: Callable[[int], None] | None = None
    ) -> tuple[FileFacts, ...]:
        """Return the facts of each file: of the sources, then of the targets.

        Args:
            known: Earlier facts. A file is not read again if its size and time have not changed.
            progress: Is called with the number of bytes of a file that were read or found known
                since the last call; their sum is the size of all files.

        Raises:
            InputError: A file cannot be read or decompressed, is not a regular file or changes
                while it is read, or two files differ in their numbers of lines.
        """
        earlier = {(fact.path, fact.bytes, fact.mtime_ns): fact for fact in known}
        found = {}
        for path in self.sources + self.targets:
            size, mtime_ns = _size_and_time(path)
            fact = earlier.get((str(path.absolute()), size, mtime_ns))
            if fact is None:
                fact = _read_facts(path, progress)
            elif progress is not None:
                progress(size)
            found[path] = fact
            earlier[fact.path, fact.bytes, fact.mtime_ns] = fact
        for files in zip(*self._sides(), strict=True):
            lines = [found[path].lines for path in files]
            if len(set(lines)) > 1:
                raise _misaligned(files, lines)
        return tuple(found[path] for path in self.sources + self.targets)

    def _sides(self) -> list[tuple[Path, ...]]:
        return [self.sources, self.targets] if self.targets else [self.sources]


def check_unchanged(facts: Sequence[FileFacts]) -> None:
    """Refuse files that have changed since their facts were found.

    Raises:
        InputError: The size or the time of a file is another one.
    """
    for fact in facts:
        if _size_and_time(Path(fact.path)) != (fact.bytes, fact.mtime_ns):
            raise InputError(
                f"{fact.path}: changed while it was encoded; start again when it is complete"
            )


def decode_pairs(block: Block, places: Sequence[int] | None = None) -> list[tuple[str, str]]:
    """Return the source and the target of pairs of a block; see `text_files.decode_lines`.

    Both are "" for the pairs that are overlong, whose other line may not be text.

    Args:
        block: The block.
        places: Indices of the pairs in the block; None decodes all.

    Raises:
        InputError: A line is not UTF-8 or contains a NUL character, or a line of a .tsv file has
            not exactly one tab; the message names it by file and number.
    """
    places = range(len(block.sources)) if places is None else places
    if block.target_name is None:
        return [
            _split_at_tab(block.sources[index], block.source_name, block.first_line + index)
            if index not in block.overlong
            else ("", "")
            for index in places
        ]
    return [
        (
            decode_line(block.sources[index], block.source_name, block.first_line + index),
            decode_line(block.targets[index], block.target_name, block.first_line + index),
        )
        if index not in block.overlong
        else ("", "")
        for index in places
    ]


def has_text(pair: tuple[str, str]) -> bool:
    """Return whether neither side of a pair is blank."""
    return all(map(str.strip, pair))


def _is_tsv(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix in PACKED_SUFFIXES else path
    return name.suffix == ".tsv"


def _file_blocks(files: tuple[Path, ...], first: int, pairs: int) -> Iterator[Block]:
    """Yield the blocks of two line-aligned files or of one .tsv file; see `ParallelText.blocks`."""
    names = [str(path) for path in files]
    with contextlib.ExitStack() as opened:
        readers = [LineReader(opened.enter_context(open_text(path)), str(path)) for path in files]
        for done in itertools.count(step=pairs):
            sides = [reader.take(pairs) for reader in readers]
            counts = [len(side) for side in sides]
            if len(set(counts)) > 1:
                rest = [reader.drop_rest() for reader in readers]
                totals = [done + count + more for count, more in zip(counts, rest, strict=True)]
                raise _misaligned(files, totals)
            if not counts[0]:
                return
            overlong = frozenset(
                index
                for side in sides
                if None in side
                for index, line in enumerate(side)
                if line is None
            )
            kept = [[line or b"" for line in side] if overlong else side for side in sides]
            yield Block(
                first + done,
                done + 1,
                source_name=names[0],
                target_name=names[1] if len(names) > 1 else None,
                sources=kept[0],
                targets=kept[1] if len(names) > 1 else [],
                overlong=overlong,
            )


def _misaligned(files: tuple[Path, ...], lines: list[int]) -> InputError:
    source, target = files
    return InputError(
        f"{source} and {target} must be line-aligned but have {lines[0]:,} and {lines[1]:,} lines"
    )


def _split_at_tab(line: bytes, name: str, number: int) -> tuple[str, str]:
    sides = decode_line(line, name, number).split("\t")
    if len(sides) != 2:
        raise InputError(
            f"{name}:{number}: has {len(sides) - 1} tabs; "
            "write a source, one tab and a target on each line"
        )
    return sides[0], sides[1]


def _size_and_time(path: Path) -> tuple[int, int]:
    with reading(str(path)):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"{path}: is not a regular file, which can be read again; write the text to a file"
        )
    return status.st_size, status.st_mtime_ns


def _read_facts(path: Path, progress: Callable[[int], None] | None) -> FileFacts:
    with open_text(path) as file:
        before = os.fstat(file.fileno())
        digested = _Digested(file, progress)
        stream = io.BufferedReader(digested, FILE_CHUNK)
        lines = count_line_ends(stream, str(path))
        after = os.fstat(file.fileno())
    unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if not unchanged or digested.bytes != after.st_size:
        raise InputError(f"{path}: changed while it was read; start again when it is complete")
    return FileFacts(
        path=str(path.absolute()),
        bytes=after.st_size,
        mtime_ns=after.st_mtime_ns,
        sha256=digested.sha256.hexdigest(),
        lines=lines,
    )


class _Digested(io.RawIOBase):
    """The bytes of a file, which are digested and counted as they are read."""

    def __init__(self, file: io.BufferedReader, progress: Callable[[int], None] | None) -> None:
        self._file, self._progress = file, progress
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def readable(self) -> bool:
        """Return True: the stream is for reading."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill the start of the buffer; return the number of bytes, 0 at the end of the file."""
        count = self._file.readinto(buffer)
        self.sha256.update(buffer[:count])
        self.bytes += count
        if self._progress is not None and count:
            self._progress(count)
        return count
