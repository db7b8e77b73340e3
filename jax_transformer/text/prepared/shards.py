"""Shards on disk: the ids of many pairs in one .npy file, and an index of them in another.

Measured on one AMD EPYC core, for a million pairs of 60 ids of 16 bits: `os.pread` reads 980,000
pairs a second from a .npy file, a slice of its memory map 780,000. ArrayRecord in batches reads
150,000, and takes half as much space again. What `os.pread` reads stays in the cache of the system;
the pages of a memory map would count as memory of the process.
"""

import json
import os
import threading
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import MAX_RECORDS, open_regular, read_bytes
from jax_transformer.storage.writing import staged_file
from jax_transformer.text.encoded import Tokens

INDEX_TYPE = np.dtype(
    [("start", "<u4"), ("source", "<u4"), ("target", "<u4"), ("crc32", "<u4")]
)  # first id, number of source and of target ids, checksum of ids, these two and the shard
HEADER_BYTES = 192  # of a .npy file, before its array
IDS, INDEX = 0, 1  # places in `shard_files`
OPEN_SHARDS = 256  # of which files are kept open


class ShardFacts(NamedTuple):
    """What the manifest says of a shard.

    Attributes:
        key: Key of the corpus that it belongs to.
        pairs: Pairs that it holds.
        ids: Ids that it holds.
        dtype: Type of the ids, as NumPy writes it.
        tokens: Tokens of an epoch: sources and shifted targets, EOS included.
        unknown: Unknown tokens among the ids.
        dropped: Pairs of the text that are not in the shard, by reason.
        length_counts: Pairs by the columns of their longer side.
    """

    key: str
    pairs: int
    ids: int
    dtype: str
    tokens: int
    unknown: int
    dropped: dict[str, int]
    length_counts: list[int]


def shard_files(folder: Path, number: int) -> tuple[Path, Path, Path]:
    """Return where the ids, the index and the facts of a shard are."""
    endings = ("ids.npy", "index.npy", "json")
    return tuple(folder / f"{number:06d}.{ending}" for ending in endings)


def sealed(content: Any) -> bytes:
    """Return a value as JSON with its checksum, for `unsealed`."""
    return json.dumps(
        {"crc32": zlib.crc32(json.dumps(content).encode()), "content": content}
    ).encode()


def unsealed(text: bytes) -> Any:
    """Return the value of which `sealed` made a text.

    Raises:
        ValueError: The text is another one.
    """
    read = json.loads(text)
    if not isinstance(read, dict) or read.keys() != {"crc32", "content"}:
        raise ValueError("not what was written")
    if zlib.crc32(json.dumps(read["content"]).encode()) != read["crc32"]:
        raise ValueError("differs from its checksum")
    return read["content"]


def write_shard(
    folder: Path,
    number: int,
    sides: list[tuple[Integer[np.ndarray, "_"], Integer[np.ndarray, "_"]]],
    facts: ShardFacts,
) -> None:
    """Write the sources and targets of a shard, and its facts last: with them it is whole.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    index = np.zeros(len(sides), INDEX_TYPE)
    contents, start, seed = [], 0, _seed(facts.key, number)
    for row, (source, target) in enumerate(sides):
        content = np.concatenate([source, target]).astype(facts.dtype).tobytes()
        checksum = _checksum(content, len(source), len(target), seed)
        index[row] = (start, len(source), len(target), checksum)
        contents.append(content)
        start += len(source) + len(target)
    ids = _npy(b"".join(contents), np.dtype(facts.dtype))
    text = sealed(facts._asdict())
    files = shard_files(folder, number)
    for path, content in zip(files, (ids, _npy(index.tobytes(), INDEX_TYPE), text), strict=True):
        with staged_file(path) as scratch:
            scratch.write_bytes(content)


def read_facts(folder: Path, number: int, key: str) -> ShardFacts | None:
    """Return the facts of a shard; None if it is not whole, or belongs to another corpus."""
    ids, index, facts = shard_files(folder, number)
    try:
        found = ShardFacts(**unsealed(read_bytes(facts, "is no shard", MAX_RECORDS)))
        _check_size(ids, found.ids, np.dtype(found.dtype))
        _check_size(index, found.pairs, INDEX_TYPE)
    except (OSError, ValueError, TypeError, InputError):
        return None
    return found if found.key == key else None


class Shards:
    """The pairs of all shards of a folder by number, read at random; threads may share it."""

    def __init__(self, folder: Path, facts: list[ShardFacts]) -> None:
        """Check that the files of the shards have the size that the manifest says.

        Raises:
            InputError: A file is missing or has another size.
        """
        self._folder, self._facts = folder, facts
        self._ends = np.cumsum([shard.pairs for shard in facts], dtype=np.int64)
        self._seeds = [_seed(shard.key, number) for number, shard in enumerate(facts)]
        counts = (np.flatnonzero(shard.length_counts) for shard in facts)
        self._longest = max(lengths.max(initial=0) for lengths in counts)
        self._open: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._lock = threading.Lock()  # no thread closes a file that another one reads
        self.bytes_read = 0
        for number, shard in enumerate(facts):
            ids, index, _ = shard_files(folder, number)
            _check_size(ids, shard.ids, np.dtype(shard.dtype))
            _check_size(index, shard.pairs, INDEX_TYPE)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return int(self._ends[-1])

    def index(self, pairs: Integer[np.ndarray, "pairs"]) -> Shaped[np.ndarray, "pairs"]:
        """Return the rows of the index, of `INDEX_TYPE`, of some pairs.

        Raises:
            InputError: A file cannot be read, or a side has no id or more than any pair has.
        """
        content, size = [], INDEX_TYPE.itemsize
        with self._lock:
            for shard, row in self._places(pairs):
                opened = self._opened(shard, INDEX)
                content.append(os.pread(opened, size, HEADER_BYTES + row * size))
                if len(content[-1]) != size:
                    raise self._damaged(shard, INDEX, row)
            found = np.frombuffer(self._counted(content), INDEX_TYPE)
        # A plan would leave out a pair of impossible lengths; `read` finds wrong ones by checksum.
        longest = np.maximum(found["source"], found["target"] - 1)
        shortest = np.minimum(found["source"], found["target"] - 1)
        impossible = np.flatnonzero((longest > self._longest) | (shortest < 1))
        if len(impossible):
            shard, row = self._places(pairs[impossible[:1]])[0]
            raise self._damaged(shard, INDEX, row)
        return found

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """Return the columns that source and target of each pair need, EOS included."""
        found = self.index(pairs)
        columns = found["source"].astype(np.int64), found["target"].astype(np.int64) - 1
        return np.stack(columns, axis=1)

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """Return the ids of some pairs.

        Raises:
            InputError: A pair differs from its checksum, or a file cannot be read.
        """
        found, content = self.index(pairs), []
        width = np.dtype(self._facts[0].dtype).itemsize
        with self._lock:
            for row, (shard, number) in zip(found.tolist(), self._places(pairs), strict=True):
                start, source, target, checksum = row
                opened = self._opened(shard, IDS)
                size = (source + target) * width
                ids = os.pread(opened, size, HEADER_BYTES + start * width)
                if _checksum(ids, source, target, self._seeds[shard]) != checksum:
                    raise self._damaged(shard, IDS, number)
                content.append(ids)
            joined = np.frombuffer(self._counted(content), self._facts[0].dtype)
        lengths = found["source"].astype(np.int64), found["target"].astype(np.int64)
        return Tokens(joined, *lengths)

    def _places(self, pairs: Integer[np.ndarray, "pairs"]) -> list[tuple[int, int]]:
        """Return the shard of each pair, and its row there."""
        shards = np.searchsorted(self._ends, pairs, side="right")
        begins = np.concatenate([[0], self._ends])[shards]
        return list(zip(shards.tolist(), (pairs - begins).tolist(), strict=True))

    def _counted(self, content: list[bytes]) -> bytes:
        """Return the contents as one and count them; under the lock, as threads count."""
        joined = b"".join(content)
        self.bytes_read += len(joined)
        return joined

    def _damaged(self, shard: int, kind: int, row: int) -> InputError:
        return InputError(
            f"{shard_files(self._folder, shard)[kind]}: pair {row} is damaged; "
            f"delete {self._folder} and start again: the text is encoded once more"
        )

    def _opened(self, shard: int, kind: int) -> int:
        """Return an open file of a shard."""
        found = self._open.get((shard, kind))
        if found is not None:
            return found
        path = shard_files(self._folder, shard)[kind]
        with open_regular(path, _again(self._folder)) as file:
            opened = os.dup(file.fileno())
        while len(self._open) >= 2 * OPEN_SHARDS:
            os.close(self._open.popitem(last=False)[1])
        self._open[shard, kind] = opened
        return opened


def _npy(content: bytes, dtype: np.dtype) -> bytes:
    """Return the file of an array. `np.save` does not notice a disk that is full."""
    return _header(len(content) // dtype.itemsize, dtype) + content


def _header(count: int, dtype: np.dtype) -> bytes:
    """Return the start of the file of an array: format 1.0 of .npy, of the same size for all."""
    descr = np.lib.format.dtype_to_descr(dtype)
    text = repr({"descr": descr, "fortran_order": False, "shape": (count,)})
    start = np.lib.format.magic(1, 0) + (HEADER_BYTES - 10).to_bytes(2, "little")
    return start + text.ljust(HEADER_BYTES - len(start) - 1).encode() + b"\n"


def _seed(key: str, number: int) -> int:
    """Return what the checksums of a shard begin with: another shard has others."""
    return zlib.crc32(f"{key} {number}".encode())


def _checksum(ids: bytes, source: int, target: int, seed: int) -> int:
    return zlib.crc32(ids, seed ^ source << 16 ^ target)


def _again(folder: Path) -> str:
    return f"cannot be read; delete {folder} and start again: the text is encoded once more"


def _check_size(path: Path, count: int, dtype: np.dtype) -> None:
    with open_regular(path, _again(path.parent)) as file:
        header = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    # Compared and not parsed: of a damaged header, NumPy's parser raises what it likes.
    if header != _header(count, dtype) or size != HEADER_BYTES + count * dtype.itemsize:
        raise InputError(
            f"{path}: is not as it was written; delete {path.parent} and start again: the text is "
            "encoded once more"
        )
