"""A parallel or plain text in memory, or in files of any size, which are read in blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import math
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.reading import errors_naming, json_digest, open_regular
from jax_transformer.text.tables import has_header, read_records, table_suffix
from jax_transformer.text.text_files import (
    FAULT,
    LONGEST_LINE,
    BadLine,
    decode_line,
    is_blank,
    overlong_line,
    read_lines,
)

BLOCK_PAIRS = 2**16  # pairs of a text that are read, and encoded by a process, at a time
LINES_OF_A_DOCUMENT = 2**8  # so many times fewer documents are read at a time

# A document is a line, or what stands between "blank_lines"; or lines are "joined": an example may
# go on from one to the next.
Documents = Literal["lines", "blank_lines", "joined"]


class Reading(NamedTuple):
    """How the lines of files become pairs, or documents of one side."""

    # Of source and target in a table, or of the documents in one: see `tables.read_records`.
    columns: tuple[str, ...] | None = None
    bad_lines: Literal["refuse", "skip"] = "refuse"  # skip drops the pairs of bad lines
    documents: Documents | None = None  # of a plain text; None: the text is parallel


USUAL_READING = Reading()


class Block(NamedTuple):
    r"""Lines of a text that follow each other, as bytes without "\n".

    A line above `LONGEST_LINE` bytes is None. The lines of a table are sources without targets, and
    so are documents, which may have "\n" between their lines.
    """

    first: int  # number of the first pair in the whole text, from 0
    first_line: int  # number of its line in its files, from 1
    source_name: str  # name of the file in error messages
    target_name: str | None
    sources: list[bytes | BadLine | None]
    targets: list[bytes | BadLine | None]
    reading: Reading = USUAL_READING

    def pairs(self, places: Sequence[int] | None = None) -> list[tuple[str, ...] | BadLine | None]:
        """Return some pairs, or all; None for an overlong line, an error for a skipped bad line.

        A document is a tuple of one.
        """
        return [self._pair(i) for i in (range(len(self.sources)) if places is None else places)]

    def place(self, place: int) -> str:
        """Return the files and the number of a line or document, for a message."""
        names = " or ".join(filter(None, (self.source_name, self.target_name)))
        return f"{names}:{self.first_line + place}"

    def _pair(self, place: int) -> tuple[str, ...] | BadLine | None:
        number = self.first_line + place
        sides = [side[place] for side in (self.sources, self.targets) if side]
        if None in sides:
            return None
        try:
            if isinstance(sides[0], BadLine):
                raise sides[0]
            source = decode_line(sides[0], self.source_name, number)
            if self.reading.documents is not None:
                return (source,)
            if self.target_name is not None:
                return source, decode_line(sides[1], self.target_name, number)
            columns, chosen = source.split("\t"), tuple(map(int, self.reading.columns or ()))
            if len(columns) >= max(chosen) if chosen else len(columns) == 2:
                first, second = chosen or (1, 2)
                return columns[first - 1], columns[second - 1]
            tabs = f"has {len(columns) - 1} tabs"
            remedy = "write a source, one tab and a target, name their columns by columns"
            raise BadLine(f"{self.source_name}:{number}", f"{tabs}; {remedy}")
        except BadLine as error:
            if self.reading.bad_lines == "refuse":
                raise
            return error


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """What shows whether a file of a text has changed."""

    path: str  # absolute
    bytes: int  # size of the file
    mtime_ns: int  # time of its last change, which archives and rsync set
    sha256: str  # of the bytes of the file, as hexadecimal digits
    lines: int  # of its text, after decompression
    ctime_ns: int = 0  # time of the last change of its content or its entry; 0: not known
    inode: int = 0

    @property
    def state(self) -> tuple[int, int, int, int]:
        """What a change of the file changes."""
        return self.bytes, self.mtime_ns, self.ctime_ns, self.inode


@dataclasses.dataclass(frozen=True)
class Text:
    """Sentences and their translations in memory: `targets[i]` translates `sources[i]`.

    A plain text has documents as sources, and no targets.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...] = ()
    dropped_empty: int = 0  # pairs that were dropped because a side was blank
    bad_lines: tuple[str, ...] = ()  # places of pairs that were dropped because of a bad line

    names = "the sources and targets"  # for messages
    reading = USUAL_READING

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return len(self.sources)

    @property
    def sha256(self) -> str:
        """Digest of the lines, as 64 hex digits."""
        return json_digest([self.sources, self.targets])

    def blocks(self, pairs: int) -> Iterator[Block]:
        """Yield the text in blocks of so many pairs."""
        for first in range(0, self.pairs, pairs):
            yield Block(
                first=first,
                first_line=first + 1,
                source_name="sources",
                target_name="targets",
                sources=[line.encode() for line in self.sources[first : first + pairs]],
                targets=[line.encode() for line in self.targets[first : first + pairs]],
            )


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Files of a text, in order; a table (.tsv, .csv, .jsonl) holds sources and targets."""

    sources: tuple[Path, ...]
    targets: tuple[Path, ...] = ()  # the translations of each source file that is no table
    facts: tuple[FileFacts, ...] = ()  # of the sources, then of the targets; see `with_facts`
    reading: Reading = USUAL_READING

    def __post_init__(self) -> None:
        for path in self.sources + self.targets:
            kind, columns = table_suffix(path), self.reading.columns
            if kind and (path in self.targets or (kind == ".tsv" and self.reading.documents)):
                raise InputError(f"{path}: a {kind} file holds pairs; name it as a source alone")
            if kind not in (None, ".tsv") and columns is None:
                first = _first_line(path)
                raise InputError(f"{path}: name two of its columns by columns; it begins {first}")
            if kind == ".jsonl" and any(map(str.isdecimal, columns)):
                raise InputError(f"{path}: columns={' '.join(columns)} must be keys of its records")
        if self.reading.documents:
            return
        sources = sum(not table_suffix(path) for path in self.sources)
        if sources != len(self.targets):
            raise InputError(
                f"{sources} source files that are no tables, and {len(self.targets)} target files; "
                "name a target file for each of these, in the same order; a .tsv, .csv or .jsonl "
                "file holds pairs"
            )

    @property
    def names(self) -> str:
        """The names of the files, for messages."""
        return ", ".join(map(str, self.sources + self.targets))

    @property
    def pairs(self) -> int:
        """Number of lines (of documents, in a plain text) of the sources, by their facts."""
        return sum(fact.lines for fact in self.facts[: len(self.sources)])

    @property
    def sha256(self) -> str:
        """Digest of the files and of how they are read, as 64 hex digits."""
        reading = self.reading[: None if self.reading.documents else -1]
        return json_digest([[fact.sha256 for fact in self.facts], *reading])

    def blocks(self, pairs: int) -> Iterator[Block]:
        """Yield the lines in blocks; a block ends after `pairs` pairs or with its file.

        One block is in memory at a time, without lines above `LONGEST_LINE` bytes. Files that have
        changed since their facts were read are refused.
        """
        first = 0
        for files in self.aligned():
            for block in _file_blocks(files, first, pairs, self.reading):
                self._check_unchanged()
                yield block
                first = block.first + len(block.sources)

    def read(self) -> Text:
        """Return the whole text; drop and count the pairs with a blank side.

        A line above `LONGEST_LINE` bytes is a bad line here.
        """
        pairs, bad, lines = [], [], 0
        for block in self.blocks(BLOCK_PAIRS):
            for place, pair in enumerate(block.pairs()):
                if has_text(pair):
                    pairs.append(pair)
                elif not isinstance(pair, tuple):
                    error = pair or overlong_line(block.place(place), LONGEST_LINE)
                    if self.reading.bad_lines == "refuse":
                        raise error
                    bad.append(error.place)
            lines += len(block.sources)
        if not pairs:
            raise no_pairs(self.names, lines)
        dropped_empty = lines - len(pairs) - len(bad)
        return Text(*zip(*pairs, strict=True), dropped_empty=dropped_empty, bad_lines=tuple(bad))

    def with_facts(self, earlier: Sequence[FileFacts] = ()) -> TextFiles:
        """Return the text with the facts of its files; only a changed file is read again."""
        read = {(fact.path, fact.state): fact for fact in earlier}
        facts = {}
        for path in self.sources + self.targets:
            known = read.get((str(path.absolute()), _state(path)))
            facts[path] = fact = known or _read_facts(path, self.reading)
            read[fact.path, fact.state] = fact
        for files in self.aligned():
            lines = [facts[path].lines for path in files]
            if len(set(lines)) > 1:
                raise _misaligned(files, lines)
        ordered = tuple(facts[path] for path in self.sources + self.targets)
        return dataclasses.replace(self, facts=ordered)

    def aligned(self) -> list[tuple[Path, ...]]:
        """Return each table or plain file, and each source file with its target file, in order."""
        targets, alone = iter(self.targets), self.reading.documents is not None
        return [
            (path,) if alone or table_suffix(path) else (path, next(targets))
            for path in self.sources
        ]

    def _check_unchanged(self) -> None:
        for fact in self.facts:
            if _state(Path(fact.path)) != fact.state:
                raise InputError(
                    f"{fact.path}: changed while it was encoded; start again when it is complete"
                )


def has_text(pair: tuple[str, ...] | BadLine | None) -> bool:
    """Return whether no side of a pair is blank, and it is neither overlong nor a bad line."""
    return isinstance(pair, tuple) and not any(map(is_blank, pair))


def no_pairs(names: str, lines: int) -> InputError:
    """Return the error for a text in which each pair has a blank side."""
    fault = f"hold no pair with text on both sides in {lines:,} lines"
    return InputError(f"{names} {fault}; name other files")


def _file_blocks(
    files: tuple[Path, ...], first: int, pairs: int, reading: Reading
) -> Iterator[Block]:
    """Yield the blocks of two line-aligned files or of one alone; see `TextFiles.blocks`."""
    pairs = math.ceil(pairs / LINES_OF_A_DOCUMENT) if reading.documents else pairs
    with contextlib.ExitStack() as opened:
        readers = [
            _units(opened.enter_context(open_regular(path, FAULT)), path, reading) for path in files
        ]
        is_table = _holds_records(files[0], reading)
        first_line = 1 + (is_table and has_header(files[0], reading.columns))
        for done in itertools.count(step=pairs):
            sides = [list(itertools.islice(reader, pairs)) for reader in readers]
            counts = [done + len(side) for side in sides]
            if len(set(counts)) > 1:
                unread = [sum(1 for _ in reader) for reader in readers]
                raise _misaligned(files, [sum(both) for both in zip(counts, unread, strict=True)])
            if not sides[0]:
                return
            is_pair = len(files) == 2
            yield Block(
                first=first + done,
                first_line=first_line + done,
                source_name=str(files[0]),
                target_name=str(files[1]) if is_pair else None,
                sources=sides[0],
                targets=sides[1] if is_pair else [],
                reading=reading._replace(columns=None) if is_table else reading,
            )


def _first_line(path: Path) -> str:
    with open_regular(path, FAULT) as file:
        line = next(read_lines(file, str(path)), None) or b""
        return shorten(line.decode(errors="replace").rstrip())


def _holds_records(path: Path, reading: Reading) -> bool:
    """Return whether fields are taken out of records here; else a .tsv file's are by a worker."""
    kind, columns = table_suffix(path), reading.columns
    return kind not in (None, ".tsv") or bool(kind and columns and has_header(path, columns))


def _units(
    file: io.BufferedReader, path: Path, reading: Reading
) -> Iterator[bytes | BadLine | None]:
    """Yield lines, records, or the documents between blank lines, of at most `LONGEST_LINE`."""
    lines = read_lines(file, str(path))
    if _holds_records(path, reading):
        yield from read_records(lines, path, reading.columns)
        return
    if reading.documents != "blank_lines":
        yield from lines
        return
    document, size = [], 0
    for line in itertools.chain(lines, [b""]):
        is_text = line is not None and bool(line.strip())
        if document and (not is_text or size + len(line) > LONGEST_LINE):
            yield b"\n".join(document)
            document, size = [], 0
        if line is None:
            yield None
        elif is_text:
            document.append(line.removesuffix(b"\r"))
            size += len(line) + 1


def _misaligned(files: tuple[Path, ...], lines: list[int]) -> InputError:
    source, target = files
    return InputError(
        f"{source} and {target} must be line-aligned but have {lines[0]:,} and {lines[1]:,} lines"
    )


def _state(path: Path) -> tuple[int, int, int, int]:
    with errors_naming(path, FAULT, OSError):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"{path}: is not a regular file, which can be read again; write the text to a file"
        )
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _read_facts(path: Path, reading: Reading) -> FileFacts:
    before = _state(path)
    with open_regular(path, FAULT) as file, errors_naming(path, FAULT, OSError):
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        lines = sum(1 for _ in _units(file, path, reading))
    if before != _state(path):
        raise InputError(f"{path}: changed while it was read; start again when it is complete")
    size, mtime_ns, ctime_ns, inode = before
    return FileFacts(str(path.absolute()), size, mtime_ns, sha256, lines, ctime_ns, inode)
