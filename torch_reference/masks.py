"""Boolean attention masks: True = attend, broadcastable to [batch, heads, queries, keys].

Masks combine with `&`. A query that may attend to nothing gets an attention output of 0.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from jax_transformer.config import TransformerConfig


def padding_mask(ids: Int[Tensor, "batch length"], pad_id: int) -> Bool[Tensor, "batch 1 1 length"]:
    """Return the mask that hides padding from every query."""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Bool[Tensor, "1 1 length length"]:
    """Return the mask that hides later positions from earlier ones (section 3.2.3)."""
    return torch.tril(torch.ones((length, length), dtype=torch.bool))[None, None]


def source_mask(
    src: Int[Tensor, "batch source"], config: TransformerConfig
) -> Bool[Tensor, "batch 1 1 source"]:
    """Return the mask of a source batch: padding is hidden."""
    return padding_mask(src, config.pad_id)


def target_mask(
    tgt: Int[Tensor, "batch target"], config: TransformerConfig
) -> Bool[Tensor, "batch 1 target target"]:
    """Return the mask of a target batch: padding and later positions are hidden.

    Where targets begin with the pad id (Marian), the first position is not padding.
    """
    visible = padding_mask(tgt, config.pad_id)
    if config.bos_id == config.pad_id:
        visible[..., 0] = True
    return visible & causal_mask(tgt.shape[1]).to(tgt.device)
