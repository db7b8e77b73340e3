"""The compressions that text files may have."""

import gzip
import lzma

import pytest

PACK = {  # for each kind, a function that returns the one that compresses bytes
    "gzip": lambda: gzip.compress,
    "xz": lambda: lzma.compress,
    "zstd": lambda: pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress,
}
