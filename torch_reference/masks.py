"""Boolean attention masks: True = attend, broadcastable to [batch, heads, queries, keys].

Masks combine with `&`. A query that may attend to nothing gets an attention output of 0.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jax_transformer.config import TransformerConfig


def causal_mask(length: int) -> Bool[Tensor, "1 1 length length"]:
    """Return the mask that hides later positions from earlier ones (section 3.2.3)."""
    return torch.tril(torch.ones((length, length), dtype=torch.bool))[None, None]


def band_mask(length: int, before: int, after: int) -> Bool[Tensor, "1 1 length length"]:
    """Return the mask that shows so many earlier and later positions, and the own one."""
    distance = torch.arange(length) - torch.arange(length)[:, None]
    return ((distance >= -before) & (distance <= after))[None, None]


def source_mask(
    src: Int[Tensor, "batch source"] | Float[Tensor, "batch source D"], config: TransformerConfig
) -> Bool[Tensor, "batch 1 1 source"] | None:
    """Return the default mask of a source batch: padding is hidden.

    Vectors and sound have no pad id: the mask is None.
    """
    if not config.reads_ids:
        return None
    return (src != config.pad_id)[:, None, None, :]


def target_mask(
    tgt: Int[Tensor, "batch target"] | Float[Tensor, "batch target D"], config: TransformerConfig
) -> Bool[Tensor, "#batch 1 target target"]:
    """Return the default mask of a target batch: padding and later positions are hidden.

    Where BOS is the pad id (Marian), the first position is not padding. Vectors have no pad id:
    only later positions are hidden.
    """
    causal = causal_mask(tgt.shape[1]).to(tgt.device)
    if config.token_embeddings == "none":
        return causal
    visible = (tgt != config.pad_id)[:, None, None, :]
    if config.bos_id == config.pad_id:  # else the first position would attend to nothing
        visible[..., 0] = True
    return visible & causal
