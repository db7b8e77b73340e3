"""The decoder layer of `decoder_attention="merged"`: one attention to targets and memory.

The keys and values of the memory and of the targets stand side by side, made by one projection,
and share one softmax (T5Gemma 2, Zhang et al. 2025). Letters in shapes: B batch, T targets,
S source length, D d_model, H heads, C pairs of rotated columns.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torch_reference.layers import DecoderLayer


class MergedAttentionLayer(DecoderLayer):
    """Attention to targets and memory, and a feed-forward network."""

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        tgt_mask: Bool[Tensor, "#B #H #T #T"] | None = None,
        src_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        position_bias: None = None,
        angles: Float[Tensor, "T C"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the layer's output; arguments as `DecoderLayer`, without a `position_bias`."""
        attention = self.self_attention
        y = self.self_attention_residual.sublayer_input(x)
        keys = torch.cat([attention.keys(memory), attention.keys(y, angles)], dim=2)
        values = [attention.project(attention.value, inputs) for inputs in (memory, y)]
        everything = x.new_ones(1, 1, 1, 1, dtype=torch.bool)
        masks = [everything if mask is None else mask for mask in (src_mask, tgt_mask)]
        batch, heads = torch.broadcast_shapes(*(mask.shape[:2] for mask in masks))
        lengths = memory.shape[1], x.shape[1]
        shapes = [(batch, heads, x.shape[1], length) for length in lengths]
        mask = torch.cat([*map(torch.Tensor.expand, masks, shapes)], dim=-1)
        y = attention.attend(attention.queries(y, angles), keys, torch.cat(values, dim=2), mask)
        x = self.self_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y))
