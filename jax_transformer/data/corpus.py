"""Line-aligned parallel text from UTF-8 files, plain or compressed with gzip."""

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
    r"""Read the lines of a UTF-8 text file, plain or compressed with gzip.

    The first two bytes, not the name, tell a gzip file. Only "\n" ends a line: a lone "\r", U+0085
    or U+2028 is an ordinary character, so that two files stay aligned. A byte-order mark at the
    start and a "\r" before "\n" are removed. The last line may lack its "\n".

    Args:
        path: The file.

    Returns:
        The lines without "\n", as many as `grep -c ''` counts.

    Raises:
        InputError: The file cannot be read or decompressed, or a line is not UTF-8 or contains a
            NUL character; the message names such a line as FILE:LINE:BYTE, counted from 1.
    """
    name = os.fspath(path)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}; name a readable text file") from error
    return split_lines(content, name)


def split_lines(content: bytes, name: str) -> list[str]:
    """Return the lines of the content of a file; see `read_lines`.

    Args:
        content: UTF-8 text, plain or compressed with gzip.
        name: Name of the text in error messages.

    Raises:
        InputError: As for `read_lines`.
    """
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"{name}: damaged gzip file ({error}); fetch or compress it again"
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
