"""Checks of what enters decoding: a model of token ids, and ids of its vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Integer

from jax_transformer.checks import check_ids
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError


def check_generates(config: TransformerConfig) -> None:
    """Refuse a model without token embeddings or without an output projection.

    Raises:
        InputError: The model has no token embeddings or no output projection.
    """
    for name in ("token_embeddings", "output_projection"):
        if getattr(config, name) == "none":
            raise InputError(f"{name}='none': a model needs them to turn text into text")


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
