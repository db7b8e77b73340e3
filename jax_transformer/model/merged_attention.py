"""The decoder layer of `decoder_attention="merged"`: one attention to targets and memory.

The keys and values of the targets and of the memory stand side by side, made by one projection,
and share one softmax (T5Gemma 2, Zhang et al. 2025). The twin in PyTorch is
`torch_reference.merged_attention`.

Letters in shapes: B batch, N hypotheses of a source, T targets, S source length, D d_model,
H heads, G heads of keys and values, K head_dim, slots N times target positions.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_transformer.kernels.cached_attention import (
    MergedCache,
    StepPosition,
    cache_layout,
    key_axis,
    write_slots,
)
from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask
from jax_transformer.model.layers import DecoderLayer, Rotation, keys_and_values


class MergedAttentionLayer(DecoderLayer):
    """Attention to targets and memory, and a feed-forward network."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        tgt_mask: Bool[Array, "#B #H #T #T"] | SegmentMask | None = None,
        src_mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None,
        position_bias: None = None,
        rotation: Rotation | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the layer's output; arguments as `DecoderLayer`, without a `position_bias`."""
        attention, targets, sources = self.self_attention, x.shape[1], memory.shape[1]
        y = self.self_attention_residual.sublayer_input(x)
        keys = [attention.keys(memory), attention.keys(y, rotation)]
        values = [attention.project(attention.value, inputs) for inputs in (memory, y)]
        mask = side_by_side(
            as_boolean_mask(src_mask, targets, sources),
            as_boolean_mask(tgt_mask, targets, targets),
            (targets, sources, targets),
        )
        y = attention.attend(
            attention.queries(y, rotation), *(jnp.concatenate(x, 2) for x in (keys, values)), mask
        )
        x = self.self_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y))

    def init_cache(
        self, memory: Float[Array, "B S D"], slots: int, layout: CacheLayout
    ) -> MergedCache:
        """Return the cache before the first token: the memory projected, and empty slots."""
        keys, values = keys_and_values(self.self_attention, memory, layout)
        with_slots = []
        for x, axis in ((keys, key_axis(keys)), (values, values.ndim - 2)):
            widths = [(0, slots if n == axis else 0) for n in range(x.ndim)]
            with_slots.append(jnp.pad(x, widths))
        return MergedCache(*with_slots)

    def step(
        self,
        x: Float[Array, "B N D"],
        cache: MergedCache,
        position: StepPosition,
        tgt_mask: Bool[Array, "B 1 N slots"],
        src_mask: Bool[Array, "#B #H #N #S"] | None,
        position_bias: None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Float[Array, "B N D"], MergedCache]:
        """Return the layer's output at one position; arguments as `DecoderLayer.step`."""
        hypotheses, slots = tgt_mask.shape[2:]
        sources = cache.keys.shape[key_axis(cache.keys)] - slots
        y = self.self_attention_residual.sublayer_input(x)
        new = keys_and_values(self.self_attention, y, cache_layout(cache.keys), rotation)
        start, fits = sources + position.column * hypotheses, position.rows < slots // hypotheses
        cache = write_slots(cache, *new, start, fits)
        mask = side_by_side(src_mask, tgt_mask, (hypotheses, sources, slots))
        y = self.self_attention.attend_to_cache(y, *cache, mask, rotation=rotation)
        x = self.self_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y)), cache


def side_by_side(
    src_mask: Bool[Array, "#B #H #T #S"] | None,
    tgt_mask: Bool[Array, "#B #H #T #L"] | None,
    lengths: tuple[int, int, int],
) -> Bool[Array, "#B #H T _"]:
    """Return the mask of the memory and the targets; `lengths` are those of T, S and L."""
    queries, *keys = lengths
    masks = [jnp.ones((1, 1, 1, 1), bool) if m is None else m for m in (src_mask, tgt_mask)]
    batch, heads = jnp.broadcast_shapes(*(mask.shape[:2] for mask in masks))
    shapes = [(batch, heads, queries, length) for length in keys]
    return jnp.concatenate([*map(jnp.broadcast_to, masks, shapes)], axis=-1)
