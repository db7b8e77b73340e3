"""Weight files: .safetensors, .npz, and .pt, .pth, .bin and .ckpt of torch.save.

Nothing in a file is trusted: no code in it runs, memory stays below the size of the file, and every
fault is a `WeightFileError` that names the file and the tensor.
"""

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jax_transformer.storage.reading import errors_naming, open_regular
from jax_transformer.storage.weights import npz_file, safetensors_file, torch_file
from jax_transformer.storage.weights.arrays import as_numpy
from jax_transformer.storage.weights.checks import (
    WeightFileError,
    check_dtype,
    check_name,
    check_shape,
    check_target,
)
from jax_transformer.storage.writing import staged_file

NPZ = ".npz"
TORCH = (".pt", ".pth", ".bin", ".ckpt")
FORMATS = {".safetensors": safetensors_file, NPZ: npz_file, **dict.fromkeys(TORCH, torch_file)}


def read(
    path: str | os.PathLike,
    *,
    key: str | None = None,
    reads: Callable[[str], bool] | None = None,
) -> dict[str, np.ndarray]:
    """Read the tensors of a weight file, bit for bit.

    Digests that `write` left in a .safetensors file, and the checksums of a torch.save archive,
    are verified. torch is imported only for the files of torch.save.

    Args:
        path: A .safetensors, .npz, .pt, .pth, .bin or .ckpt file.
        key: The entry of a torch.save file that holds the state_dict, where it holds more.
        reads: Whether a tensor of this name is read; None reads all.

    Returns:
        C-contiguous arrays by name; bfloat16 is the type of ml_dtypes. Tensors that are tied in
        a torch.save file are one array.

    Raises:
        WeightFileError: The file is missing, damaged, hostile or holds something other than named
            tensors.
    """
    path = Path(path)
    with _opened(path) as file:
        kind = _format(path)
        if kind is torch_file:
            tensors = torch_file.read(path, file, key)
        elif key is None:
            tensors = kind.read(path, file, reads)
        else:
            raise WeightFileError(f"{path}: key={key!r} is for torch.save files; leave it out")
    if tensors and not any(array.size for array in tensors.values()):
        raise WeightFileError(f"{path}: all {len(tensors):,} tensors are empty")
    return {name: x for name, x in tensors.items() if reads is None or reads(name)}


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """Return the metadata that `write` was given for the file at `path`; torch.save has none.

    Raises:
        WeightFileError: The file is missing, or its header is damaged.
    """
    path = Path(path)
    with _opened(path) as file:
        kind = _format(path)
        return safetensors_file.read_metadata(path, file) if kind is safetensors_file else {}


def write(
    path: str | os.PathLike,
    tensors: Mapping[str, Any],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named arrays to a temporary file, then rename it.

    Args:
        path: A .safetensors, .npz, .pt, .pth, .bin or .ckpt file. A link at this path is replaced,
            never followed.
        tensors: Arrays of numpy, jax or torch by name.
        overwrite: Whether an existing file is replaced.
        metadata: Free text for the header of a .safetensors file.

    Raises:
        WeightFileError: The file exists, its folder does not, or a tensor cannot be stored.
    """
    path, metadata = Path(path), dict(metadata or {})
    check_target(path, overwrite)
    kind = _format(path)
    if metadata and kind is not safetensors_file:
        raise WeightFileError(f"{path}: only .safetensors files hold metadata; leave it out")
    storable: dict[int, np.ndarray] = {}
    for name, tensor in tensors.items():
        check_name(path, name)
        if id(tensor) not in storable:
            array = storable[id(tensor)] = as_numpy(tensor)
            check_dtype(path, name, array.dtype)
            check_shape(path, name, array.shape, array.size)
    arrays = {name: storable[id(tensor)] for name, tensor in tensors.items()}  # ties stay
    with (
        errors_naming(path, "cannot be written", OSError, RuntimeError, error=WeightFileError),
        staged_file(path) as temporary,
    ):
        if kind is safetensors_file:
            safetensors_file.write(temporary, arrays, metadata)
        else:
            kind.write(temporary, arrays)


def _opened(path: Path) -> io.BufferedReader:
    return open_regular(path, "cannot be read", error=WeightFileError)


def _format(path: Path) -> ModuleType:
    """Return the module that reads and writes files of this name; refuse an unknown ending."""
    if path.suffix not in FORMATS:
        raise WeightFileError(
            f"{path}: the name must end in .safetensors, .npz, .pt, .pth, .bin or .ckpt"
        )
    return FORMATS[path.suffix]
