"""The .npz format of numpy, as Marian writes it: a zip archive of arrays, not compressed."""

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jax_transformer.storage.reading import errors_naming
from jax_transformer.storage.weights.checks import (
    WeightFileError,
    check_dtype,
    check_name,
    check_shape,
)

_ENDING = ".npy"
FAULTS = (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError)


def read(
    path: Path, file: BinaryIO, reads: Callable[[str], bool] | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays of an open file that `reads` names; nothing in it is unpickled."""
    arrays: dict[str, np.ndarray] = {}
    with (
        errors_naming(path, "is damaged; copy it again", *FAULTS, error=WeightFileError),
        zipfile.ZipFile(file) as archive,
    ):
        for entry in archive.infolist():
            name = entry.filename.removesuffix(_ENDING)
            check_name(path, name)
            if name in arrays or entry.compress_type != zipfile.ZIP_STORED:
                fault = "twice" if name in arrays else "compressed"
                raise WeightFileError(f"{path}: has {name} {fault}; save it with numpy.savez")
            if reads is None or reads(name):
                with archive.open(entry) as member:
                    arrays[name] = _read_array(path, name, member, entry.file_size)
    return arrays


def _read_array(path: Path, name: str, member: io.BufferedIOBase, size: int) -> np.ndarray:
    """Return an array whose header agrees with the bytes that the archive has of it."""
    version = np.lib.format.read_magic(member)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise WeightFileError(f"{path}: {name} is of version {version}; save it with numpy.savez")
    shape, by_columns, dtype = read_header(member)
    check_dtype(path, name, dtype)
    check_shape(path, name, shape, size)
    count = math.prod(shape)
    content = member.read(count * dtype.itemsize + 1)
    if len(content) != count * dtype.itemsize:
        raise WeightFileError(f"{path}: {name} has not the size of its shape {list(shape)}")
    array = np.frombuffer(content, dtype)
    return array.reshape(shape[::-1]).T.copy() if by_columns else array.reshape(shape).copy()


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}{_ENDING}")
            entry.file_size = array.nbytes + 2**16  # tells zipfile whether it needs longer headers
            with archive.open(entry, "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
