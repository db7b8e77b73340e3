"""Lines of UTF-8 text files: plain, or compressed with gzip, xz or zstd."""

from __future__ import annotations

import functools
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import errors_naming, open_regular

MAGICS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# Frames that hold no text, with which parallel zstd programs start a file (RFC 8878, section 3.1.2)
MAGICS |= {bytes([low]) + b"\x2a\x4d\x18": "zstd" for low in range(0x50, 0x60)}
PACKED_SUFFIXES = (".gz", ".xz", ".zst")  # of names; what is unpacked is told by the content
COMPRESSED_CHUNK = 2**13  # bytes; zstd makes up to 2**15 times as many of them
TEXT_CHUNK = 2**18  # bytes of text that are read at once
LONGEST_LINE = 2**20  # bytes
FAULT = "is no readable text; name a text file"
ONE_A_LINE = "write the texts of one column to a file, one a line"
NO_TEXTS = {  # by the end of a file's name, what it is, and the remedy
    ".tmx": (
        "a translation memory (TMX), which is XML and no lines of text",
        'write its pairs to a .tsv file: the page "Text: from files to batches" has a program '
        "for it",
    ),
    ".csv": ("a table and no lines of text", ONE_A_LINE),
    ".jsonl": ("a table and no lines of text", ONE_A_LINE),
    ".json": ("no lines of text", "write each record as a line of a .jsonl file"),
    ".parquet": ("a table and no lines of text", "write its columns to a .csv or .jsonl file"),
}


class BadLine(InputError):
    """A line that cannot be used; its place is the file, its number from 1 and perhaps a byte."""

    def __init__(self, place: str, fault: str) -> None:
        super().__init__(f"{place}: {fault}, or set bad_lines to 'skip'")
        self.place, self.fault = place, fault

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Return how another process makes it anew."""
        return type(self), (self.place, self.fault)


def open_text(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a text file for `decode_lines`."""
    check_lines(path)
    return open_regular(path, FAULT)


def unpacked_suffix(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a file's name in lower case, without that of a compressed file."""
    name = os.fspath(path).lower()
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return Path(name).suffix


def check_lines(path: str | os.PathLike[str]) -> None:
    """Refuse a file whose name says that its lines are not texts."""
    if (suffix := unpacked_suffix(path)) in NO_TEXTS:
        what, remedy = NO_TEXTS[suffix]
        raise InputError(f"{path}: is {what}; {remedy}")


def open_stream(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a text that is read once: a file as `open_text` does, or a FIFO, for which it waits."""
    with errors_naming(Path(path), FAULT, OSError):
        return Path(path).open("rb") if Path(path).is_fifo() else open_text(path)


def count_lines(path: str | os.PathLike[str]) -> int:
    """Return the number of lines that `decode_lines` yields of a file, which it need not accept."""
    with open_text(path) as file:
        return sum(1 for _ in read_lines(file, os.fspath(path)))


def decode_lines(
    file: io.BufferedReader, name: str, longest: int = LONGEST_LINE, bad: list[int] | None = None
) -> Iterator[str]:
    r"""Yield the lines of UTF-8 text, plain or compressed, as they are read.

    A lone "\r", U+0085 or U+2028 is an ordinary character, so that two files stay aligned. A
    byte-order mark at the start and a "\r" before "\n" are removed.

    Args:
        file: The file, open for reading bytes.
        longest: Most bytes of a line.
        bad: Takes the numbers of bad lines, from 1; each gives "". None refuses the first.
    """
    for number, line in enumerate(read_lines(file, name, longest), start=1):
        try:
            yield decode_line(line, name, number, longest)
        except BadLine:
            if bad is None:
                raise
            bad.append(number)
            yield ""


def read_lines(
    file: io.BufferedReader, name: str, longest: int = LONGEST_LINE
) -> Iterator[bytes | None]:
    r"""Yield the lines of a text as bytes; only "\n" ends a line. An overlong line is None."""
    stream = _unpacked(file, name)
    with errors_naming(Path(name), FAULT, OSError):
        while line := stream.readline(longest + 1):
            is_whole = len(line) <= longest or line.endswith(b"\n")
            yield line.removesuffix(b"\n") if is_whole else None
            while not is_whole and (line := stream.readline(TEXT_CHUNK)):
                is_whole = line.endswith(b"\n")


def decode_line(line: bytes | None, name: str, number: int, longest: int = LONGEST_LINE) -> str:
    r"""Return the text of a line without "\n", by its number from 1; see `decode_lines`."""
    if line is None:
        raise overlong_line(f"{name}:{number}", longest)
    try:
        text = line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        fault = f"byte 0x{line[error.start]:02x} is not UTF-8; convert the file to UTF-8"
        raise BadLine(f"{name}:{number}:{error.start + 1}", fault) from error
    if "\0" in text:
        place = f"{name}:{number}:{line.index(0) + 1}"
        raise BadLine(place, "NUL character; name a text file")
    return text.removeprefix("\ufeff") if number == 1 else text


def overlong_line(place: str, longest: int) -> BadLine:
    """Return the error for a line of more than `longest` bytes."""
    return BadLine(place, f"is longer than {longest:,} bytes; split the line")


def is_blank(line: str) -> bool:
    """Return whether a line has only whitespace, controls and (Unicode) default ignorables."""
    return not any(map(_is_seen, line))


@functools.lru_cache(maxsize=2**16)
def _is_seen(character: str) -> bool:
    # The category Cf is another set: it has signs that are seen, and lacks variation selectors.
    unseen = Regex(r"[\s\p{Cc}\p{Default_Ignorable_Code_Point}]")
    is_half = "\ud800" <= character <= "\udfff"  # of a pair of surrogates: the tokenizer refuses it
    return is_half or bool(normalizers.Replace(unseen, "").normalize_str(character))


def _unpacked(file: io.BufferedReader, name: str) -> io.BufferedReader:
    """Return the bytes of the text: of the file itself, or decompressed as they are read.

    The first bytes, not the name, show gzip, xz or zstd. A file may consist of several compressed
    parts (members of gzip, streams of xz, frames of zstd) and zeros between them.
    """
    with errors_naming(Path(name), FAULT, OSError):
        start = file.peek(max(map(len, MAGICS)))
    for magic, kind in MAGICS.items():
        if start.startswith(magic):
            return io.BufferedReader(_Decompressed(file, kind, name), TEXT_CHUNK)
    return file


class _Decompressed(io.RawIOBase):
    """Text decompressed from a file as it is read; a damaged or cut file raises `InputError`."""

    def __init__(self, file: io.BufferedReader, kind: str, name: str) -> None:
        self._file, self._kind, self._name = file, kind, name
        self._new_decompressor, self._error = _decompression(kind, name)
        self._decompressor: Any = None  # of the part that is being read; None between two parts
        self._packed = b""  # was read and not yet decompressed
        self._text = memoryview(b"")  # was decompressed and not yet read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill the start of the buffer; return the number of bytes, 0 at the end of the text."""
        while not self._text:
            packed = self._packed or self._file.read1(COMPRESSED_CHUNK)
            try:
                if not packed and self._decompressor is not None:
                    raise EOFError("it ends too early")
                if not packed:
                    return 0
                self._packed = b""
                self._decompress(packed)
            except (EOFError, self._error) as error:
                fault = f"damaged {self._kind} file ({error}); fetch or compress it again"
                raise InputError(f"{self._name}: {fault}") from error
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _decompress(self, packed: bytes) -> None:
        if self._decompressor is None:
            packed = packed.lstrip(b"\0")
            if not packed:
                return
            self._decompressor = self._new_decompressor()
        self._text = memoryview(self._decompressor.decompress(packed))
        if self._decompressor.eof:
            self._packed = self._decompressor.unused_data
            self._decompressor = None


def _decompression(kind: str, name: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return what makes a decompressor of one part of a file, and the error of damaged bytes."""
    if kind == "gzip":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    try:
        import zstandard
    except ImportError as error:
        raise InputError(
            f"{name}: is compressed with zstd; pip install zstandard, or decompress it"
        ) from error
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
