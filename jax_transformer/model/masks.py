"""The default masks, by segments. A query that may attend to nothing gets an attention output of 0.

A mask of a caller may also be a boolean array, True = attend, broadcastable to [batch, heads,
queries, keys]; such masks combine with `&`, and `kernels.segments.as_boolean_mask` makes one.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.segments import SegmentMask


def source_mask(
    src: Int[Array | np.ndarray, "batch source"] | Float[Array | np.ndarray, "batch source D"],
    config: TransformerConfig,
) -> SegmentMask | None:
    """Return the default mask of a source batch: padding is hidden.

    Vectors and sound have no pad id: the mask is None.
    """
    if not config.reads_ids:
        return None
    return SegmentMask(jnp.asarray(src) != config.pad_id)


def target_mask(
    tgt: Int[Array | np.ndarray, "batch target"] | Float[Array | np.ndarray, "batch target D"],
    config: TransformerConfig,
) -> SegmentMask:
    """Return the default mask of a target batch: padding and later positions are hidden.

    Where BOS is the pad id (Marian), the first position is not padding. Vectors have no pad id:
    only later positions are hidden.
    """
    if config.token_embeddings == "none":
        return SegmentMask(None, causal=True)
    visible = jnp.asarray(tgt) != config.pad_id
    if config.bos_id == config.pad_id:  # else the first position would attend to nothing
        visible = visible.at[:, 0].set(True)
    return SegmentMask(visible, causal=True)
