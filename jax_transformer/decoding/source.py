"""Checks of what enters decoding: a model of token ids, ids of its vocabulary, and numbers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Integer

from jax_transformer.checks import check_ids
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError

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
    """Refuse an id outside the vocabulary.

    Raises:
        InputError: The id is out of range.
    """
    if not 0 <= token < vocab_size:
        raise InputError(
            f"{name}={token} is outside the vocabulary; ids go from 0 to {vocab_size - 1}"
        )


def as_ids(
    name: str, ids: Integer[Array | np.ndarray, "B L"], vocab_size: int
) -> Int32[Array, "B L"]:
    """Return token ids as int32, refused first where one is outside the vocabulary.

    Raises:
        InputError: An id is out of range, where the ids are concrete (not traced by `jit`).
    """
    if not isinstance(ids, jax.core.Tracer):
        check_ids(name, np.asarray(ids), vocab_size)
    return jnp.asarray(ids, jnp.int32)


def as_scalar(
    name: str, value: Scalar, valid: Callable[[Scalar], bool], wanted: str
) -> Float32[Array, ""] | Float32[np.ndarray, ""]:
    """Return a number as float32, refused first where it is not valid.

    Raises:
        InputError: The number is not `wanted`, where it is concrete (not traced by `jit`).
    """
    if isinstance(value, jax.core.Tracer):
        return value.astype(np.float32)
    if not valid(value):
        raise InputError(f"{name}={value} must be {wanted}")
    return np.asarray(value, np.float32)
