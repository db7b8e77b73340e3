"""The compressions that text files may have, and their lines."""

import gzip
import lzma

import pytest

from jax_transformer.text.text_files import decode_lines, open_text

PACK = {  # for each kind, a function that returns the one that compresses bytes
    "gzip": lambda: gzip.compress,
    "xz": lambda: lzma.compress,
    "zstd": lambda: pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress,
}


def read_lines(path):
    with open_text(path) as file:
        return list(decode_lines(file, str(path)))
