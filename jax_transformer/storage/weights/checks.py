"""The checks that both readers of weight files share, and the one error that they raise."""

import os
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError, shorten

DTYPES = {  # by their name in a safetensors header
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# Bytes of a safetensors header or a pickle. A model names some hundred tensors, in about a hundred
# bytes each. Parsing a hostile header takes up to 25 times its size in memory.
MAX_HEADER = 2**20
MAX_AXES = 64  # of an array of NumPy
MAX_NAME = 255  # characters of a tensor's name


class WeightFileError(InputError):
    """A weight file that cannot be read or written; names the file and, in it, the tensor."""


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse the path of a new file whose folder is missing, or where something is already."""
    if not path.parent.is_dir():
        raise WeightFileError(f"{path}: the folder {path.parent} does not exist; create it first")
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        raise WeightFileError(f"{path} already exists; choose another name or set overwrite=True")


def check_name(path: Path, name: object) -> None:
    """Refuse a tensor name that a program could use as a path or print with control characters."""
    is_text = isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()
    if not is_text or "/" in name or "\\" in name:
        raise WeightFileError(
            f"{path}: the tensor name {shorten(name)} must be 1 to {MAX_NAME} printable "
            "characters without slashes"
        )


def check_dtype(path: Path, name: str, dtype: object) -> None:
    """Refuse a dtype that not every kind of weight file can hold."""
    if dtype not in DTYPES.values():
        names = ", ".join(kind.name for kind in DTYPES.values())
        raise WeightFileError(f"{path}: {name} has dtype {dtype}, which is none of {names}")


def check_shape(path: Path, name: str, shape: Sequence[int], limit: int) -> None:
    """Refuse a tensor with too many axes, with one longer than `limit`, or without elements.

    A tensor with an axis of length 0 takes no byte, so its other axes could have any length; one
    that has no other axis is an empty buffer.
    """
    if [*shape] != [0] and (len(shape) > MAX_AXES or not all(1 <= n <= limit for n in shape)):
        raise WeightFileError(
            f"{path}: {name} has shape {shorten(list(shape))}; a weight has at most {MAX_AXES} "
            "axes, each at least 1 long and no longer than the file"
        )
