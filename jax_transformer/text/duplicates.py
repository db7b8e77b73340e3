"""Pairs that repeat an earlier pair: searched on disk whatever the number of pairs."""

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt64

from jax_transformer.text.parallel_text import Block, has_text

DIGEST_BYTES = 16  # among 10**12 pairs, two differing ones share a digest with probability 1.5e-15
PARTITIONS = 256  # files, one for each first byte of a digest


def repeated_pairs(blocks: Iterable[Block], folder: Path) -> Int64[np.ndarray, "_"]:
    """Return the numbers of the pairs that repeat an earlier one, ascending; blank ones do not.

    A digest and a number for each pair, 24 bytes, are written to the file of its first byte. In
    memory are those of one block, then those of one file. Files of a killed process are replaced.
    """
    paths = [folder / f"{first:02x}.digests" for first in range(PARTITIONS)]
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(path.open("wb")) for path in paths]
        for block in blocks:
            records = pair_records(block)
            first_bytes = records.view(np.uint8)[:, 0]
            for first in np.unique(first_bytes):
                files[first].write(records[first_bytes == first].data)
    repeated = [repeated_numbers(np.fromfile(path, np.uint64).reshape(-1, 3)) for path in paths]
    for path in paths:
        path.unlink()
    return np.sort(np.concatenate(repeated)).astype(np.int64)


def pair_records(block: Block) -> UInt64[np.ndarray, "_ 3"]:
    r"""Return a digest, as two numbers, and the number of each pair that is not blank.

    The digest is BLAKE2b of source, "\n", which neither side contains, and target.
    """
    pairs = block.pairs()
    places = [place for place, pair in enumerate(pairs) if has_text(pair)]
    digests = b"".join(
        hashlib.blake2b("\n".join(pairs[place]).encode(), digest_size=DIGEST_BYTES).digest()
        for place in places
    )
    records = np.empty((len(places), 3), np.uint64)
    records[:, :2] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    records[:, 2] = np.array(places, np.uint64) + np.uint64(block.first)
    return records


def repeated_numbers(records: UInt64[np.ndarray, "_ 3"]) -> UInt64[np.ndarray, "_"]:
    """Return the numbers of the records whose digest is that of an earlier one."""
    records = records[np.lexsort(records.T[::-1])]  # equal digests in the order of numbers
    return records[1:, 2][(records[1:, :2] == records[:-1, :2]).all(axis=1)]
