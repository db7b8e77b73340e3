"""Relative positions: a learned bias of the attention scores for the distance of query and key.

Letters in shapes: T queries, S keys, H heads.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from torch_reference import functional


class RelativeAttentionBias(nn.Embedding):
    """A learned bias of the scores for each head and each bucket of distances (Raffel et al. 2020).

    Queries attend to later keys where it is bidirectional: in the encoder.
    """

    def __init__(self, config: TransformerConfig, bidirectional: bool) -> None:
        super().__init__(config.relative_attention_num_buckets, config.num_heads)
        self.config = config
        self.bidirectional = bidirectional

    def forward(self, queries: int, keys: int) -> Float[Tensor, "1 H T S"]:
        """Return the bias of each query and key, both counted from position 0."""
        distance = torch.arange(keys) - torch.arange(queries)[:, None]
        return self.by_distance(distance).permute(2, 0, 1)[None]

    def by_distance(self, distance: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape H"]:
        """Return the biases of distances, each a key's position minus a query's."""
        buckets = functional.relative_position_buckets(
            distance,
            self.config.relative_attention_num_buckets,
            self.config.relative_attention_max_distance,
            self.bidirectional,
        )
        return super().forward(buckets.to(self.weight.device))
