"""The decoder layer of `decoder_attention="ssru_then_cross"`: a recurrence, not a self-attention.

It is the Simpler Simple Recurrent Unit, SSRU, of Marian's small models (Kim et al. 2019, section
3.1). Letters in shapes: B batch, T targets, S source length, D d_model, M that of the memory,
H heads.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from torch_reference import masks
from torch_reference.layers import NO_CONTEXT, AttentionContext, DecoderLayer, Linear, Residual


class SSRU(nn.Module):
    """A recurrence whose state forgets by a gate that reads the input alone."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input = Linear(config.d_model, config.d_model, bias=False)
        self.forget = Linear(config.d_model, config.d_model, bias=True)

    def forward(
        self, x: Float[Tensor, "B T D"], continues: Bool[Tensor, "#B T"]
    ) -> Float[Tensor, "B T D"]:
        """Return the outputs of all positions.

        Args:
            continues: Which positions continue the state of the one before; the others begin at 0.
        """
        forget, added = self.gates(x)
        state, outputs = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = torch.where(continues[:, step, None], state, 0)
            state = forget[:, step] * state + added[:, step]
            outputs.append(state.relu())
        return torch.stack(outputs, dim=1)

    def gates(
        self, x: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Return what a state is multiplied by at each position, and what is added to it."""
        forget = self.forget(x).sigmoid()
        return forget, (1 - forget) * self.input(x)


class SSRULayer(DecoderLayer):
    """An SSRU, attention to the memory and a feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.recurrence = SSRU(config)
        self.recurrence_residual = Residual(config, config.norm_placement_of("decoder"))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S M"],
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        cache: None = None,
    ) -> tuple[Float[Tensor, "B T D"], None]:
        """Return the layer's output; arguments as `DecoderLayer`, without a cache."""
        y = self.recurrence_residual.sublayer_input(x)
        y = self.recurrence(y, continued(context.mask, x.shape[1]).to(x.device))
        x = self.recurrence_residual(x, y)
        return self.after_targets(x, self.cross_attention_input(memory), src_mask, None), None


def continued(mask: Bool[Tensor, "#B #H #T #T"] | None, length: int) -> Bool[Tensor, "#B T"]:
    """Return which positions continue the state of the one before: those that may attend to it."""
    before = masks.band_mask(length, 1, -1)  # of a query, the key before its position alone
    before = before if mask is None else mask & before.to(mask.device)
    return before.any(dim=3).any(dim=1)
