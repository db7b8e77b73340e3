"""What every reader of weight files refuses, and the one error it refuses it with."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError

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
# Bytes of a safetensors header or a pickle. Those of a model name some hundred tensors in about a
# hundred bytes each; parsing a hostile one takes up to 25 times its size in memory.
MAX_HEADER = 2**20
MAX_NAME = 255  # characters of a tensor's name


class WeightFileError(InputError):
    """A weight file that cannot be read or written; names the file and, in it, the tensor."""


def check_name(path: Path, name: object) -> None:
    """Refuse a tensor name that a careless program could take for a path or print raw."""
    sound = isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()
    if not sound or "/" in name or "\\" in name:
        raise WeightFileError(
            f"{path}: the tensor name {shorten(name)} must be 1 to {MAX_NAME} printable "
            "characters without slashes"
        )


def check_dtype(path: Path, name: str, dtype: object) -> None:
    """Refuse a dtype that weight files do not share."""
    if dtype not in DTYPES.values():
        known = ", ".join(known.name for known in DTYPES.values())
        raise WeightFileError(f"{path}: {name} has dtype {dtype}, which is none of {known}")


def check_shape(path: Path, name: str, shape: Sequence[int], limit: int) -> None:
    """Refuse a tensor without elements, or with an axis longer than `limit`.

    An axis of length 0 lets any other axis be of any length, and a tensor cost no byte.
    """
    if not all(1 <= length <= limit for length in shape):
        raise WeightFileError(
            f"{path}: {name} has shape {shorten(list(shape))}; every axis of a weight is at least "
            "1 long and no longer than the file"
        )


def shorten(value: object) -> str:
    """Return what a message shows of a value from a file: at most 80 characters, escaped."""
    text = ascii(value if not isinstance(value, str) else value[:80])
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextlib.contextmanager
def faults_named(path: Path, fault: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into the one error; the original stays attached as its cause.

    Args:
        path: The file at fault.
        fault: What is wrong with it.
        *kinds: What the libraries called inside raise on it; their messages name no file.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        reason = f": {error.strerror}" if isinstance(error, OSError) else ""
        raise WeightFileError(f"{path} {fault} ({type(error).__name__}{reason})") from error
