"""The decoder layer of `decoder_attention="merged"`: one attention to targets and memory.

The keys and values of the targets and of the memory stand side by side, made by one projection,
and share one softmax (T5Gemma 2, Zhang et al. 2025). The twin in PyTorch is
`torch_reference.merged_attention`.

Letters in shapes: B batch, N hypotheses of a source, T targets, S source length, D d_model,
H heads, G heads of keys and values, K head_dim, slots N times target positions.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_transformer.kernels.cached_attention import LayerCache, with_slots
from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask
from jax_transformer.model.layers import NO_CONTEXT, AttentionContext, DecoderLayer


class MergedAttentionLayer(DecoderLayer):
    """Attention to targets and memory, and a feed-forward network."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | None,
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the layer's output and its cache; arguments as `DecoderLayer`."""
        attention, queries, rotation = self.self_attention, x.shape[1], context.rotation
        y = self.self_attention_residual.sublayer_input(x)
        if cache is None:
            sources = memory.shape[1]
            keys = jnp.concatenate([attention.keys(memory), attention.keys(y, rotation)], axis=2)
            values = jnp.concatenate([attention.values(memory), attention.values(y)], axis=2)
            mask = side_by_side(
                as_boolean_mask(src_mask, queries, sources),
                as_boolean_mask(context.mask, queries, queries),
                (queries, sources, queries),
            )
            y = attention.attend(attention.queries(y, rotation), keys, values, mask)
        else:
            cache, slots = self.write_step(y, cache, context), context.mask.shape[3]
            sources = cache.self_attention.length - slots
            mask = side_by_side(src_mask, context.mask, (queries, sources, slots))
            y = attention(y, None, None, mask, None, rotation, cache.self_attention)
        x = self.self_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y)), cache

    def init_cache(
        self, memory: Float[Array, "B S D"], hypotheses: int, slots: int, layout: CacheLayout
    ) -> LayerCache:
        """Return the cache before the first token: the memory projected, and empty slots."""
        of_memory = self.self_attention.keys_and_values(memory, layout)
        return LayerCache(with_slots(of_memory, slots), None)


def side_by_side(
    src_mask: Bool[Array, "#B #H #T #S"] | None,
    tgt_mask: Bool[Array, "#B #H #T #L"] | None,
    lengths: tuple[int, int, int],
) -> Bool[Array, "#B #H T _"]:
    """Return the mask of the memory and the targets; `lengths` are those of T, S and L."""
    queries, sources, targets = lengths
    everything = jnp.ones((1, 1, 1, 1), bool)
    src_mask = everything if src_mask is None else src_mask
    tgt_mask = everything if tgt_mask is None else tgt_mask
    batch, heads = jnp.broadcast_shapes(src_mask.shape[:2], tgt_mask.shape[:2])
    src_mask = jnp.broadcast_to(src_mask, (batch, heads, queries, sources))
    tgt_mask = jnp.broadcast_to(tgt_mask, (batch, heads, queries, targets))
    return jnp.concatenate([src_mask, tgt_mask], axis=-1)
