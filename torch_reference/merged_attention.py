"""The decoder layer of `decoder_attention="merged"`: one attention to targets and memory.

The keys and values of the memory and of the targets stand side by side, made by one projection,
and share one softmax (T5Gemma 2, Zhang et al. 2025). Letters in shapes: B batch, T targets,
S source length, D d_model, H heads, C pairs of rotated columns.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torch_reference.layers import NO_CONTEXT, AttentionContext, DecoderLayer


class MergedAttentionLayer(DecoderLayer):
    """Attention to targets and memory, and a feed-forward network."""

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        cache: None = None,
    ) -> tuple[Float[Tensor, "B T D"], None]:
        """Return the layer's output; arguments as `DecoderLayer`, without a cache."""
        attention, queries, rotation = self.self_attention, x.shape[1], context.rotation
        y = self.self_attention_residual.sublayer_input(x)
        keys = torch.cat([attention.keys(memory), attention.keys(y, rotation)], dim=2)
        values = torch.cat([attention.values(memory), attention.values(y)], dim=2)
        mask = side_by_side(src_mask, context.mask, (queries, memory.shape[1], queries))
        y = attention.attend(attention.queries(y, rotation), keys, values, mask)
        x = self.self_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y)), None


def side_by_side(
    src_mask: Bool[Tensor, "#B #H #T #S"] | None,
    tgt_mask: Bool[Tensor, "#B #H #T #L"] | None,
    lengths: tuple[int, int, int],
) -> Bool[Tensor, "#B #H T _"]:
    """Return the mask of the memory and the targets; `lengths` are those of T, S and L."""
    queries, sources, targets = lengths
    everything = torch.ones((1, 1, 1, 1), dtype=torch.bool)
    src_mask = everything if src_mask is None else src_mask
    tgt_mask = everything if tgt_mask is None else tgt_mask
    batch, heads = torch.broadcast_shapes(src_mask.shape[:2], tgt_mask.shape[:2])
    src_mask = src_mask.expand(batch, heads, queries, sources)
    tgt_mask = tgt_mask.expand(batch, heads, queries, targets)
    return torch.cat([src_mask, tgt_mask.to(src_mask.device)], dim=-1)
