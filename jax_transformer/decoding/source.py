"""Checks of what enters decoding: a model of token ids, ids of its vocabulary, and numbers."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model import functional
from jax_transformer.model.checks import check_id_batch, check_ids, check_whole_number, shown

Scalar = float | int | Float[Array | np.ndarray, ""]


def check_generates(config: TransformerConfig) -> None:
    """Refuse a model without token embeddings or without an output projection.

    Raises:
        InputError: The model has no token embeddings or no output projection.
    """
    for name in ("token_embeddings", "output_projection"):
        if getattr(config, name) == "none":
            raise InputError(f"{name}='none': a model needs them to turn text into text")


def check_id(name: str, token: int, vocab_size: int) -> None:
    """Refuse what is no id of the vocabulary.

    Raises:
        InputError: It is no whole number, or out of range.
    """
    check_whole_number(name, token)
    if not 0 <= token < vocab_size:
        raise InputError(
            f"{name}={shown(token)} is outside the vocabulary; ids go from 0 to {vocab_size - 1}"
        )


def as_tuple(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return a sequence of ids as a tuple of Python's whole numbers.

    Raises:
        InputError: It is no sequence, or holds what is no id of the vocabulary.
    """
    if not isinstance(ids, list | tuple | range | np.ndarray):
        raise InputError(f"{name}={shown(ids)} must be a tuple of ids")
    for index, token in enumerate(ids):
        check_id(f"{name}[{index}]", token, vocab_size)
    return tuple(int(token) for token in ids)


def as_ids(
    name: str, ids: Integer[Array | np.ndarray, "B L"], vocab_size: int
) -> Int32[Array, "B L"]:
    """Return token ids as int32, refused first where one is outside the vocabulary.

    Raises:
        InputError: They are no whole numbers [B, L]; or an id is out of range, where the ids are
            concrete (not traced by `jit`).
    """
    check_id_batch(name, ids)
    if not isinstance(ids, jax.core.Tracer):
        check_ids(name, np.asarray(ids), vocab_size)
    return functional.cast_ids(ids, vocab_size)


def as_scalar(
    name: str, value: Scalar, valid: Callable[[Scalar], bool], wanted: str
) -> Float32[Array, ""] | Float32[np.ndarray, ""]:
    """Return a number as float32, refused first where it is not valid.

    Raises:
        InputError: It is no real number, or in float32 it is not `wanted`, where it is concrete
            (not traced by `jit`).
    """
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        kinds = (jnp.floating, jnp.integer)
        real = value.shape == () and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    else:
        real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real:
        raise InputError(f"{name}={shown(value)} must be a number")
    if isinstance(value, jax.core.Tracer):
        return value.astype(np.float32)
    with np.errstate(over="ignore"):  # infinity is refused
        number = np.asarray(min(value, 1e300), np.float32)
    if not valid(number):
        raise InputError(f"{name}={shown(value)} must be {wanted}")
    return number
