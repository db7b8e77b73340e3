"""Line-aligned parallel text from UTF-8 files, plain or compressed with gzip."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from jax_transformer.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True)
class ParallelCorpus:
    """Sentences and their translations: `targets[i]` translates `sources[i]`.

    Attributes:
        sources: Source sentences.
        targets: Target sentences, as many as sources.
        dropped_empty: Number of pairs that were dropped because a side was blank.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    dropped_empty: int = 0

    def report(self) -> str:
        """Return one line: the number of pairs that were read and that were dropped."""
        pairs = len(self.sources) + self.dropped_empty
        return f"{pairs:,} pairs read, {self.dropped_empty:,} dropped for an empty side"


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Read the lines of a UTF-8 text file, plain or compressed with gzip; see `decode_lines`.

    Raises:
        InputError: The file cannot be read, or `decode_lines` refuses it.
    """
    with open_text(path) as file:
        return list(decode_lines(file, os.fspath(path)))


def open_text(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a text file for `decode_lines`.

    Raises:
        InputError: The file cannot be opened.
    """
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InputError(
            f"{os.fspath(path)}: {error.strerror}; name a readable text file"
        ) from error


def count_lines(path: str | os.PathLike[str]) -> int:
    """Return the number of lines that `decode_lines` yields of a file, which it need not accept."""
    with open_text(path) as file:
        count, last = 0, b"\n"
        stream = _unpacked(file)
        while block := stream.read(2**20):
            count, last = count + block.count(b"\n"), block[-1:]
        return count + (last != b"\n")


def decode_lines(file: io.BufferedReader, name: str, longest: int | None = None) -> Iterator[str]:
    r"""Yield the lines of UTF-8 text, plain or compressed with gzip, as they are read.

    The first two bytes, not the name, tell a gzip file. Only "\n" ends a line: a lone "\r", U+0085
    or U+2028 is an ordinary character, so that two files stay aligned. A byte-order mark at the
    start and a "\r" before "\n" are removed. The last line may lack its "\n".

    Args:
        file: The file, open for reading bytes.
        name: Name of the text in error messages.
        longest: Most bytes of a line; None sets no limit.

    Yields:
        The lines without "\n", as many as `grep -c ''` counts.

    Raises:
        InputError: The file cannot be read or decompressed, or a line is too long, not UTF-8 or
            contains a NUL character; the message names such a line as FILE:LINE:BYTE, counted
            from 1.
    """
    most = -1 if longest is None else longest + 1
    try:
        stream = _unpacked(file)
        for number, line in enumerate(iter(lambda: stream.readline(most), b""), start=1):
            if longest is not None and len(line.removesuffix(b"\n")) > longest:
                raise InputError(
                    f"{name}:{number}: is longer than {longest:,} bytes; split the line"
                )
            text = _decode(line.removesuffix(b"\n"), name, number)
            yield text.removeprefix("\ufeff") if number == 1 else text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{name}: damaged gzip file ({error}); fetch or compress it again"
        ) from error
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}; name a readable text file") from error


def read_parallel(
    source_path: str | os.PathLike[str], target_path: str | os.PathLike[str]
) -> ParallelCorpus:
    """Read two line-aligned files; drop and count the pairs with a blank side.

    Args:
        source_path: File with one source sentence on each line; see `read_lines`.
        target_path: File with the translation of each source sentence on the same line.

    Returns:
        The pairs with text on both sides, in the order of the files.

    Raises:
        InputError: A file is unreadable, the numbers of lines differ, or every pair was dropped.
    """
    sources, targets = read_lines(source_path), read_lines(target_path)
    files = f"{os.fspath(source_path)} and {os.fspath(target_path)}"
    if len(sources) != len(targets):
        raise InputError(
            f"{files} must be line-aligned but have {len(sources):,} and {len(targets):,} lines"
        )
    pairs = [pair for pair in zip(sources, targets, strict=True) if all(map(str.strip, pair))]
    if not pairs:
        raise InputError(
            f"{files} hold no pair with text on both sides in {len(sources):,} lines; "
            "name other files"
        )
    kept_sources, kept_targets = zip(*pairs, strict=True)
    return ParallelCorpus(kept_sources, kept_targets, dropped_empty=len(sources) - len(pairs))


def _unpacked(file: io.BufferedReader) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=file) if file.peek(2).startswith(GZIP_MAGIC) else file


def _decode(line: bytes, name: str, number: int) -> str:
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}:{number}:{error.start + 1}: byte 0x{line[error.start]:02x} is not UTF-8; "
            "convert the file to UTF-8"
        ) from error
    if "\0" in text:
        column = line.index(0) + 1
        raise InputError(f"{name}:{number}:{column}: NUL character; name a text file")
    return text
