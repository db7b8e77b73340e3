"""Pairs that repeat an earlier pair: found on disk whatever the number of pairs."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt8, UInt64

from jax_transformer.errors import InputError

DIGEST_BYTES = 16  # among 10**12 pairs, two differing ones share a digest with probability 1.5e-15
PARTITIONS = 256  # one for each first byte of a digest
PENDING_RECORDS = 2**20  # records of 24 bytes that are in memory before they are written


def pair_digests(pairs: Sequence[tuple[str, str]]) -> UInt8[np.ndarray, "pairs 16"]:
    r"""Return the BLAKE2b digest of each pair: of the source, "\n", which no side has, and target.

    Args:
        pairs: Source and target of each pair, without "\n".
    """
    digests = b"".join(
        hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=DIGEST_BYTES).digest()
        for source, target in pairs
    )
    return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)


class DuplicateFinder:
    """Finds the pairs whose digest an earlier pair of the text has.

    The digests are written to files in a folder, 24 bytes a pair, each to that of its first byte.
    In memory are `PENDING_RECORDS` of them, then those of one file.

    Args:
        folder: Folder for the files, which is made if it does not exist. Files that an earlier
            finder left there are removed.

    Raises:
        InputError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: list[UInt64[np.ndarray, "_ 3"]] = []
        self._pairs = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.remove()
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, first: int, digests: UInt8[np.ndarray, "pairs 16"]) -> None:
        """Add the pairs with the numbers from `first` on, each number once and in any order.

        Args:
            first: Number of the first pair in the text, from 0.
            digests: Digest of each pair [pairs, 16].

        Raises:
            InputError: The files cannot be written, for instance because the disk is full.
        """
        records = np.empty((len(digests), 3), np.uint64)
        records[:, :2] = np.ascontiguousarray(digests).view(np.uint64)
        records[:, 2] = np.arange(first, first + len(digests), dtype=np.uint64)
        self._pending.append(records)
        self._pairs = max(self._pairs, first + len(digests))
        if sum(map(len, self._pending)) >= PENDING_RECORDS:
            self._write_pending()

    def repeats(self) -> Bool[np.ndarray, "pairs"]:
        """Return for each pair whether it repeats an earlier one.

        Returns:
            One byte a pair, up to the largest number that was added [pairs]; False for a number
            that was not added.

        Raises:
            InputError: The files cannot be written or read.
        """
        self._write_pending()
        repeated = np.zeros(self._pairs, bool)
        for path in self._paths():
            try:
                records = np.fromfile(path, np.uint64).reshape(-1, 3)
            except FileNotFoundError:
                continue  # no digest begins with this byte
            records = records[np.lexsort(records.T[::-1])]  # equal digests in the order of numbers
            equal = (records[1:, :2] == records[:-1, :2]).all(axis=1)
            repeated[records[1:, 2][equal]] = True
        return repeated

    def remove(self) -> None:
        """Remove the files."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return [self._folder / f"{first:02x}.digests" for first in range(PARTITIONS)]

    def _write_pending(self) -> None:
        if not self._pending:
            return
        records = np.concatenate(self._pending)
        self._pending = []
        first_bytes = records.view(np.uint8)[:, 0]
        records = records[np.argsort(first_bytes, kind="stable")]
        ends = np.cumsum(np.bincount(first_bytes, minlength=PARTITIONS))
        try:
            for path, part in zip(self._paths(), np.split(records, ends[:-1]), strict=True):
                if len(part):
                    with path.open("ab") as file:
                        file.write(part.data)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"{self._folder}: {error.strerror}; name a folder on a disk with room for 24 bytes for "
            "each pair"
        )
