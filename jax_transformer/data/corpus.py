"""Line-aligned parallel text, from plain or gzip-compressed UTF-8 files."""

from __future__ import annotations

import dataclasses
import gzip
import os
import zlib
from pathlib import Path

from jax_transformer.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True)
class ParallelCorpus:
    """Sentences and their translations: `targets[i]` translates `sources[i]`.

    Attributes:
        sources: Source sentences.
        targets: Target sentences, as many.
        dropped_empty: Pairs left out because a side was blank.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    dropped_empty: int = 0

    def report(self) -> str:
        """Return one line for the reader: how many pairs were read and how many were dropped."""
        pairs = len(self.sources) + self.dropped_empty
        return f"{pairs:,} pairs read, {self.dropped_empty:,} dropped for an empty side"


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    r"""Read the lines of a UTF-8 text file, plain or gzip-compressed.

    Gzip is recognised by its first two bytes, whatever the name. Only "\n" ends a line: a lone
    "\r", U+0085 or U+2028 is a character like any other, so that two files stay aligned. A
    byte-order mark and the "\r" before a "\n" are dropped; a last line needs no "\n".

    Args:
        path: The file.

    Returns:
        The lines without their ends, as many as `grep -c ''` counts.

    Raises:
        InputError: The file cannot be read or unpacked, or a line is not UTF-8 or holds a NUL;
            such a line is named as FILE:LINE:BYTE, counted from 1.
    """
    name = os.fspath(path)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}; name a readable text file") from error
    return split_lines(content, name)


def split_lines(content: bytes, name: str) -> list[str]:
    """Return the lines of a text that has been read; see `read_lines`.

    Args:
        content: UTF-8 text, plain or gzip-compressed.
        name: What messages call it.

    Raises:
        InputError: As for `read_lines`.
    """
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"{name}: damaged gzip file ({error}); fetch or pack it again"
            ) from error
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts = [_decode(line, name, number) for number, line in enumerate(lines, start=1)]
    if texts:
        texts[0] = texts[0].removeprefix("\ufeff")
    return texts


def read_parallel(
    source_path: str | os.PathLike[str], target_path: str | os.PathLike[str]
) -> ParallelCorpus:
    """Read two line-aligned files; a pair with a blank side is dropped whole, and counted.

    Args:
        source_path: File of source sentences, one a line; see `read_lines`.
        target_path: File of their translations, line beside line.

    Returns:
        The pairs of which both sides hold text, in the order of the files.

    Raises:
        InputError: A file is unreadable, the line counts differ, or no pair is left.
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
            "name files that do"
        )
    kept_sources, kept_targets = zip(*pairs, strict=True)
    return ParallelCorpus(kept_sources, kept_targets, dropped_empty=len(sources) - len(pairs))


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
        raise InputError(f"{name}:{number}:{column}: NUL character; name a file of text")
    return text
