"""Conversion between arrays of numpy, jax and torch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

from jax_transformer.errors import InputError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # bytes
PIECE = 2**22  # elements of a piece of an array
FLOATS = ("float16", "bfloat16", "float32", "float64")


def as_numpy(value: Any) -> np.ndarray:
    """Return an array of the same bits in native byte order; bfloat16 is of ml_dtypes.

    It may be a strided view of `value`: copy it before keeping it.
    """
    if not (getattr(value, "is_fully_addressable", True) or value.is_fully_replicated):
        raise InputError(
            f"{type(value).__name__} of shape {value.shape} lies on the devices of several "
            "processes; gather it first: multihost_utils.process_allgather(array, tiled=True)"
        )
    try:
        array = _from_torch(value) if hasattr(value, "detach") else np.asarray(value)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InputError(f"{type(value).__name__} is no dense array: {error}") from error
    if array.dtype.byteorder in "<>":  # not native: native order is "="
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def own_copy(array: np.ndarray) -> np.ndarray:
    """Return a C-contiguous array of the same bits that owns its memory."""
    return np.array(array, order="C")


def as_jax(array: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Return a jax array of the same bits that shares no memory with this one.

    Args:
        sharding: Where it lies; None is the default device.
    """
    if array.dtype == np.float64 and not jax.config.jax_enable_x64:
        raise InputError("float64 tensors need jax_enable_x64, or give dtype='float32'")
    # On CPU, jax uses aligned memory without a copy; it would copy other memory a second time.
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return jax.device_put(copy, sharding)


def as_torch(array: np.ndarray) -> torch.Tensor:
    """Return a contiguous torch tensor of the same bits; it may share the memory of the array."""
    import torch

    array = np.require(array, requirements=("C", "OWNDATA", "WRITEABLE"))
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def pieces(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield an array in pieces of some million elements: the index of the first row, the rows."""
    if array.size <= PIECE:
        yield 0, array
        return
    rows = max(1, PIECE * len(array) // array.size)
    for begin in range(0, len(array), rows):
        yield begin, array[begin : begin + rows]


def _from_torch(tensor: torch.Tensor) -> np.ndarray:
    import torch

    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise TypeError("it is sparse, quantized or without data")
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16: pass the bits as integers
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
