"""The .safetensors format: read where the safetensors library finds each tensor, with digests.

The library refuses tensors that overlap or leave holes and headers that do not fit the file. Names
that look like paths and huge headers are refused here. Its writer wants all tensors contiguous in
memory; this one copies one tensor at a time.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from jax_transformer.errors import one_line
from jax_transformer.storage.reading import errors_naming, json_digest
from jax_transformer.storage.weights.checks import (
    DTYPES,
    MAX_HEADER,
    WeightFileError,
    check_name,
    check_shape,
)

_DIGEST = "sha256"


def read(path: Path, file: BinaryIO, reads: Callable[[str], bool] | None) -> dict[str, np.ndarray]:
    """Return the arrays of an open file that `reads` names; digests in the file are verified."""
    metadata, entries = _read_header(path, file)
    digests = _stored_digests(path, metadata, entries)
    arrays = {}
    with errors_naming(path, "changed while it was read", ValueError, error=WeightFileError):
        for name, (dtype, shape) in entries.items():  # a file is mapped at the risk of a SIGBUS
            if reads is not None and not reads(name):
                file.seek(dtype.itemsize * math.prod(shape), os.SEEK_CUR)
                continue
            arrays[name] = np.fromfile(file, dtype, math.prod(shape)).reshape(shape)
            if digests and digests[name] != _tensor_digest(name, arrays[name]):
                raise WeightFileError(
                    f"{path}: {name} differs from its {_DIGEST}; the file is damaged, fetch or "
                    "convert it again"
                )
    return arrays


def read_metadata(path: Path, file: BinaryIO) -> dict[str, str]:
    """Return the header's free text, without the digests."""
    metadata, entries = _read_header(path, file)
    _stored_digests(path, metadata, entries)
    return _free_text(metadata)


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays of any strides, with a digest of each and of the metadata."""
    if _free_text(metadata) != metadata:
        raise WeightFileError(f"{path}: names in the metadata must not begin with {_DIGEST!r}")
    # As the library sorts them: a tensor begins at a multiple of its items' size.
    arrays = dict(sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])))
    text = {**metadata, **{f"{_DIGEST}:{name}": "0" * 64 for name in arrays}}
    text[_DIGEST] = json_digest(metadata)
    with path.open("wb") as file:
        file.write(_header(arrays, text))
        for name, array in arrays.items():
            contiguous = np.asarray(array, order="C")
            text[f"{_DIGEST}:{name}"] = _tensor_digest(name, contiguous)
            file.write(contiguous.reshape(-1).view(np.uint8))
        file.seek(0)  # each digest is known now
        file.write(_header(arrays, text))


def _header(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors in this order, its length before it."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": kinds[array.dtype],
            "shape": array.shape,
            "data_offsets": (begin, begin + array.nbytes),
        }
        begin += array.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _read_header(
    path: Path, file: BinaryIO
) -> tuple[dict[str, str], dict[str, tuple[np.dtype, list[int]]]]:
    """Return metadata and (dtype, shape) by name; leaves `file` at the first byte of the data."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MAX_HEADER):
        raise WeightFileError(
            f"{path}: the header claims {length} bytes, but the file has {size} and a header at "
            f"most {MAX_HEADER}; it is damaged or not a .safetensors file"
        )
    entries: dict[str, tuple[np.dtype, list[int]]] = {}
    try:
        with safe_open(path, "np") as header:
            metadata = header.metadata() or {}
            slices = {name: header.get_slice(name) for name in header.offset_keys()}
            described = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    except SafetensorError as error:
        raise WeightFileError(
            f"{path} is damaged or hostile: {one_line(str(error), 300)}"
        ) from error
    except (OSError, MemoryError) as error:  # the library maps the whole file into memory
        raise WeightFileError(f"{path} cannot be read: {one_line(str(error), 300)}") from error
    for name, (dtype, shape) in described.items():
        check_name(path, name)
        check_shape(path, name, shape, size)
        if dtype not in DTYPES:
            raise WeightFileError(
                f"{path}: {name} has dtype {dtype}, which is none of {', '.join(DTYPES)}"
            )
        entries[name] = DTYPES[dtype], shape
    file.seek(8 + length)
    return metadata, entries


def _tensor_digest(name: str, array: np.ndarray) -> str:
    """Return the SHA-256 of a tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(f"{name} {array.dtype.name} {list(array.shape)} ".encode())
    digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


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
    if metadata.keys() - free_text.keys() != due or metadata[_DIGEST] != json_digest(free_text):
        raise WeightFileError(
            f"{path}: the metadata differ from their {_DIGEST}; the file is damaged, fetch or "
            "convert it again"
        )
    return {name: metadata[f"{_DIGEST}:{name}"] for name in names}
