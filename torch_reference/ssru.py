"""The decoder layer of `decoder_attention="ssru_then_cross"`: a recurrence, not a self-attention.

It is the Simpler Simple Recurrent Unit of Marian's small models (Kim et al. 2019, section 3.1).
Letters in shapes: B batch, T targets, D d_model.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from torch_reference import masks
from torch_reference.layers import AttentionContext, DecoderLayer, Linear, Residual


class SSRU(nn.Module):
    """A recurrence whose state forgets by a gate that reads the input alone."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input = Linear(config.d_model, config.d_model, bias=False)
        self.forget = Linear(config.d_model, config.d_model, bias=True)

    def forward(
        self, x: Float[Tensor, "B T D"], mask: Bool[Tensor, "#B 1 #T #T"] | None
    ) -> Float[Tensor, "B T D"]:
        """Return the state at each position; 0 comes before one that may not attend to the last."""
        earlier = masks.band_mask(x.shape[1], 1, -1).to(x.device)
        continues = (earlier if mask is None else mask & earlier).any(dim=3).any(dim=1)
        forget = self.forget(x).sigmoid()
        added = (1 - forget) * self.input(x)
        forget = torch.where(continues[..., None], forget, 0)
        states = [added[:, 0]]
        for step in range(1, x.shape[1]):
            states.append(forget[:, step] * states[-1] + added[:, step])
        return torch.stack(states, dim=1)


class SSRULayer(DecoderLayer):
    """An SSRU, attention to the memory and a feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.recurrence = SSRU(config)
        self.recurrence_residual = Residual(config, config.norm_placement_of("decoder"))

    def read_targets(
        self, x: Float[Tensor, "B T D"], context: AttentionContext, cache: None
    ) -> tuple[Float[Tensor, "B T D"], None]:
        """Return the residual stream after the recurrence; there is no cache."""
        y = self.recurrence_residual.sublayer_input(x)
        return self.recurrence_residual(x, self.recurrence(y, context.mask).relu()), None
