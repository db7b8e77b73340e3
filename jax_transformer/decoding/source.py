"""The source as decoding sees it: checked, masked, and as long as the model needs it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer

from jax_transformer import masks
from jax_transformer.checks import check_ids
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model import SourceMask


def check_generates(config: TransformerConfig) -> None:
    """Refuse a model that is a body without token ids going in or logits coming out.

    Raises:
        InputError: The model has no token embeddings or no output projection.
    """
    for name in ("token_embeddings", "output_projection"):
        if getattr(config, name) == "none":
            raise InputError(f"{name}='none': a model needs them to turn text into text")


def check_source_mask(src_mask: SourceMask | None) -> None:
    """Refuse a mask in which the queries of one source see different parts of it.

    Raises:
        InputError: The third axis is not 1.
    """
    if src_mask is not None and src_mask.shape[2] != 1:
        raise InputError(
            f"src_mask of shape {src_mask.shape} must have 1 as its third axis: every query of "
            "a source and of its target sees the same sources"
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


def fit_source(
    config: TransformerConfig,
    src: Int32[Array, "B S"],
    src_mask: SourceMask | None,
    target_length: int,
) -> tuple[Int32[Array, "B _"], Bool[Array, "#B #H 1 _"]]:
    """Return the source and its mask, padded to the target where the model wants equal lengths."""
    src_mask = masks.source_mask(src, config) if src_mask is None else jnp.asarray(src_mask)
    added = target_length - src.shape[1]
    if config.decoder_attention != "self_over_memory" or added <= 0:
        return src, src_mask
    src_mask = jnp.broadcast_to(src_mask, (*src_mask.shape[:3], src.shape[1]))
    src = jnp.pad(src, ((0, 0), (0, added)), constant_values=config.pad_id)
    return src, jnp.pad(src_mask, ((0, 0), (0, 0), (0, 0), (0, added)))
