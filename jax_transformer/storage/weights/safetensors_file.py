"""The .safetensors format: a checked header with digests, followed by the tensors.

The readers of the safetensors library accept repeated names, names that look like paths and headers
of any size, and they hold the file in memory twice. This reader checks the header, then reads each
tensor from its place in the file. The writer of the library wants all tensors contiguous in memory;
this one writes a tensor after the other, so that only one is ever copied.
"""

import contextlib
import gc
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jax_transformer.errors import shorten
from jax_transformer.storage.faults import faults_named, unique_names
from jax_transformer.storage.weights.checks import (
    DTYPES,
    MAX_HEADER,
    WeightFileError,
    check_name,
    check_shape,
)

_DIGEST = "sha256"
_PIECE = 2**24  # bytes that are compared at a time


def read(path: Path, file: BinaryIO) -> dict[str, np.ndarray]:
    """Return the arrays of an open file; digests in the file are verified.

    Raises:
        WeightFileError: The file is damaged or hostile, or changes while it is read.
    """
    arrays = {}
    with faults_named(path, "changed while it was read", ValueError, error=WeightFileError):
        metadata, entries = _read_header(path, file)
        digests = _stored_digests(path, metadata, entries)
        for name, (dtype, shape) in entries.items():
            arrays[name] = np.fromfile(file, dtype, math.prod(shape)).reshape(shape)
            if digests and digests[name] != _tensor_digest(name, arrays[name]):
                raise WeightFileError(
                    f"{path}: {name} differs from its {_DIGEST}; the file is damaged, fetch or "
                    "convert it again"
                )
    return arrays


def first_difference(path: Path, file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return the name of the first tensor whose bits in the file differ, or None.

    It reads the file in pieces, so that the arrays are not in memory a second time.
    """
    _, entries = _read_header(path, file)
    if entries.keys() != arrays.keys():
        return min(entries.keys() ^ arrays.keys())
    for name, form in entries.items():
        if form != (arrays[name].dtype, list(arrays[name].shape)):
            return name
        expected = arrays[name].reshape(-1).view(np.uint8)
        for begin in range(0, expected.size, _PIECE):
            piece = expected[begin : begin + _PIECE]
            if not np.array_equal(np.fromfile(file, np.uint8, piece.size), piece):
                return name
    return None


def read_metadata(path: Path, file: BinaryIO) -> dict[str, str]:
    """Return the header's free text, without the digests."""
    metadata, entries = _read_header(path, file)
    _stored_digests(path, metadata, entries)
    return _free_text(metadata)


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays of any strides, with a digest of each and of the metadata.

    The header is written again at the end: a digest is known when its tensor has been written.
    """
    if _free_text(metadata) != metadata:
        raise WeightFileError(f"{path}: names in the metadata must not begin with {_DIGEST!r}")
    # As the library sorts them: a tensor begins at a multiple of its items' size.
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    text = {**metadata, **{f"{_DIGEST}:{name}": "0" * 64 for name in names}}
    text[_DIGEST] = _text_digest(metadata)
    with path.open("wb") as file:
        file.write(_header(arrays, names, text))
        for name in names:
            array = np.asarray(arrays[name], order="C")
            text[f"{_DIGEST}:{name}"] = _tensor_digest(name, array)
            file.write(array.reshape(-1).view(np.uint8))
        file.seek(0)
        file.write(_header(arrays, names, text))


def _header(
    arrays: Mapping[str, np.ndarray], names: Sequence[str], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a file with these tensors in this order, its length before it."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        array, begin = arrays[name], end
        end += array.nbytes
        entries[name] = {
            "dtype": kinds[array.dtype],
            "shape": array.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _read_header(
    path: Path, file: BinaryIO
) -> tuple[dict[str, str], dict[str, tuple[np.dtype, list[int]]]]:
    """Return metadata and, in the order of the data, (dtype, shape) by name.

    Leaves `file` at the first byte of the first tensor.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise WeightFileError(
            f"{path}: the header claims {length} bytes from offset 8, but the file ends at {size}; "
            "it is truncated or no .safetensors file"
        )
    if length > MAX_HEADER:
        raise WeightFileError(f"{path}: the header of {length} bytes is longer than {MAX_HEADER}")
    fault = "has a header at offset 8 that is not JSON"
    with (
        faults_named(path, fault, ValueError, RecursionError, error=WeightFileError),
        _no_garbage_collection(),
    ):
        header = json.loads(file.read(length).decode(), object_pairs_hook=tuple)
    fields = _unique(path, header)
    metadata = _unique(path, fields.pop("__metadata__", ()))
    if not all(isinstance(text, str) for text in metadata.values()):
        raise WeightFileError(f"{path}: __metadata__ must map names to text")
    entries = [_check_entry(path, name, entry) for name, entry in fields.items()]
    end = 0
    for begin, stop, name, _, _ in sorted(entries, key=lambda entry: entry[:2]):
        if begin != end:
            raise WeightFileError(
                f"{path}: {name} begins at byte {begin} of the data, where {end} is due; tensors "
                "must neither overlap nor leave holes"
            )
        end = stop
    if 8 + length + end != size:
        raise WeightFileError(
            f"{path}: the tensors end at offset {8 + length + end}, but the file at {size}"
        )
    return metadata, {name: (dtype, shape) for _, _, name, dtype, shape in sorted(entries)}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off: creating many lists would start it again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unique(path: Path, pairs: object) -> dict[str, Any]:
    """Return a JSON object's pairs as a dict; refuse what is no object, and repeated names."""
    if not isinstance(pairs, tuple):
        raise WeightFileError(f"{path}: the header must be a JSON object of objects")
    return unique_names(path, pairs, WeightFileError)


def _check_entry(path: Path, name: str, entry: object) -> tuple[int, int, str, np.dtype, list[int]]:
    """Return (begin, end, name, dtype, shape) of one tensor's entry in the header."""
    check_name(path, name)
    fields = _unique(path, entry)
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    sound = lists and isinstance(dtype, str) and len(fields) == 3
    if not sound or {type(number) for number in shape + offsets} != {int}:
        raise WeightFileError(f"{path}: {name} must have a dtype, a shape and two data_offsets")
    if dtype not in DTYPES:
        raise WeightFileError(
            f"{path}: {name} has dtype {shorten(dtype)}, which is none of {', '.join(DTYPES)}"
        )
    begin, end = offsets
    check_shape(path, name, shape, end)
    claimed = math.prod(shape) * DTYPES[dtype].itemsize
    if begin < 0 or claimed != end - begin:
        raise WeightFileError(
            f"{path}: {name} claims {shorten(claimed)} bytes, but lies from {begin} to {end}"
        )
    return begin, end, name, DTYPES[dtype], shape


def _tensor_digest(name: str, array: np.ndarray) -> str:
    """Return the SHA-256 of a tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(f"{name} {array.dtype.name} {list(array.shape)} ".encode())
    digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _text_digest(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _free_text(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in metadata.items() if not name.startswith(_DIGEST)}


def _stored_digests(
    path: Path, metadata: Mapping[str, str], names: Mapping[str, object]
) -> dict[str, str]:
    """Return the digest of each tensor, or {} of a file without digests; checks the metadata."""
    free_text = _free_text(metadata)
    if free_text == metadata:
        return {}
    due = {_DIGEST, *(f"{_DIGEST}:{name}" for name in names)}
    if metadata.keys() - free_text.keys() != due or metadata[_DIGEST] != _text_digest(free_text):
        raise WeightFileError(
            f"{path}: the metadata differ from their {_DIGEST}; the file is damaged, fetch or "
            "convert it again"
        )
    return {name: metadata[f"{_DIGEST}:{name}"] for name in names}
