"""Relative positions: a learned bias of the attention scores for the distance of query and key.

The twin in PyTorch is `torch_reference.relative_positions`. Letters in shapes: T queries, S keys,
H heads, B batch, N hypotheses of a source, slots N times target positions.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.model import functional, initialization


class RelativeAttentionBias(nn.Module):
    """A learned bias of the scores for each head and each bucket of distances (Raffel et al. 2020).

    Queries attend to later keys where it is bidirectional: in the encoder.
    """

    config: TransformerConfig
    bidirectional: bool

    def setup(self) -> None:
        """Declare the table [buckets, H]."""
        config = self.config
        shape = (config.relative_attention_num_buckets, config.num_heads)
        self.embedding = initialization.parameter(
            self, "embedding", initialization.relative_bias(config), shape
        )

    def __call__(self, queries: int, keys: int) -> Float[Array, "1 H T S"]:
        """Return the bias of each query and key, both counted from position 0."""
        if is_symbolic_dim(queries) or is_symbolic_dim(keys):
            return _of_symbolic_lengths(self, queries, keys)
        distances = np.arange(1 - queries, keys)
        return functional.toeplitz(self.by_distance(distances), queries)[None]

    def by_distance(self, distance: Int[np.ndarray, " distances"]) -> Float[Array, "distances H"]:
        """Return the biases of distances, each a key's position minus a query's."""
        config = self.config
        buckets = functional.relative_position_buckets(
            distance,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            self.bidirectional,
        )
        return self.embedding[buckets]


def _of_symbolic_lengths(
    bias: RelativeAttentionBias, queries: int, keys: int
) -> Float[Array, "1 H T S"]:
    """Return the bias for lengths that are not known, where numpy can name no distances."""
    # From this distance on, all distances of a side share a bucket.
    furthest = bias.config.relative_attention_max_distance
    by_distance = bias.by_distance(np.arange(-furthest, furthest + 1))
    distances = jnp.arange(keys) - jnp.arange(queries)[:, None]
    rows = by_distance[jnp.clip(distances, -furthest, furthest) + furthest]
    return jnp.moveaxis(rows, -1, 0)[None]


def slot_bias(
    bias: RelativeAttentionBias, position: Int[Array, ""], tgt_mask: Bool[Array, "B 1 N slots"]
) -> Float[Array, "1 H 1 slots"]:
    """Return the bias of a query at a position for each slot of the cache.

    Args:
        tgt_mask: The slots that each hypothesis attends to, none of a later position.
    """
    hypotheses, slots = tgt_mask.shape[2:]
    length = slots // hypotheses
    by_distance = bias.by_distance(np.arange(1 - length, 1))
    row = np.arange(slots) // hypotheses - position + length - 1
    return by_distance[jnp.clip(row, 0, length - 1)].T[None, :, None]
