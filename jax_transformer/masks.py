"""Boolean attention masks: True = attend, broadcastable to [batch, heads, queries, keys].

Masks combine with `&`. A query that may attend to nothing gets an attention output of 0.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import TransformerConfig


def padding_mask(ids: Int[Array, "batch length"], pad_id: int) -> Bool[Array, "batch 1 1 length"]:
    """Return the mask that hides padding from every query."""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 length length"]:
    """Return the mask that hides later positions from earlier ones (section 3.2.3)."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def segment_mask(
    queries: Int[Array, "batch queries"], keys: Int[Array, "batch keys"]
) -> Bool[Array, "batch 1 queries keys"]:
    """Return the mask that keeps attention inside a segment of a packed row.

    Args:
        queries: Segment of each query, from 1; 0 is padding, which attends to nothing.
        keys: Segment of each key.
    """
    same = queries[:, :, None] == keys[:, None, :]
    return (same & (queries > 0)[:, :, None])[:, None]


def source_mask(
    src: Int[Array | np.ndarray, "batch source"] | Float[Array | np.ndarray, "batch source D"],
    config: TransformerConfig,
) -> Bool[Array, "batch 1 1 source"] | None:
    """Return the default mask of a source batch: padding is hidden.

    Vectors (`config.token_embeddings` is "none") have no pad id: the mask is None.
    """
    if config.token_embeddings == "none":
        return None
    return padding_mask(jnp.asarray(src), config.pad_id)


def target_mask(
    tgt: Int[Array | np.ndarray, "batch target"] | Float[Array | np.ndarray, "batch target D"],
    config: TransformerConfig,
) -> Bool[Array, "#batch 1 target target"]:
    """Return the default mask of a target batch: padding and later positions are hidden.

    Where BOS is the pad id (Marian), the first position is not padding. Vectors have no pad id:
    only later positions are hidden.
    """
    causal = causal_mask(tgt.shape[1])
    if config.token_embeddings == "none":
        return causal
    visible = padding_mask(jnp.asarray(tgt), config.pad_id)
    if config.bos_id == config.pad_id:
        visible = visible.at[..., 0].set(True)
    return visible & causal
