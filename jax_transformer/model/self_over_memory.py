"""The decoder layer of `decoder_attention="self_over_memory"`, which one preset has.

Its causal self-attention runs over the encoder's output, not over the targets; the result becomes
the values of the second attention. Targets therefore never attend to each other, and sources and
targets have equal lengths. All code that only this layer needs is here; the twin in PyTorch is
`torch_reference.self_over_memory`.

Letters in shapes: B batch, N hypotheses of a source, L length, S source length, D d_model,
H heads, K head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.kernels.cached_attention import (
    Keys,
    StepPosition,
    cache_layout,
    cached_keys,
    cached_values,
)
from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask
from jax_transformer.model import masks
from jax_transformer.model.layers import DecoderLayer


class OverMemoryCache(NamedTuple):
    """What the layer keeps of the memory between two decoding steps.

    Attributes:
        keys: Keys of the self-attention, in columns [B, H, K, S].
        values: Values of the self-attention [B, H, S, K].
        memory_keys: Keys of the second attention, in columns [B, H, K, S], or joined [B, S, D].
    """

    memory: Float[Array, "B S D"]
    keys: Float[Array, "B H K S"]
    values: Float[Array, "B H S K"]
    memory_keys: Keys


class SelfOverMemoryLayer(DecoderLayer):
    """Self-attention over the memory, attention to the result and a feed-forward network."""

    def __call__(
        self,
        x: Float[Array, "B L D"],
        memory: Float[Array, "B L D"],
        tgt_mask: Bool[Array, "#B #H #L #L"] | SegmentMask | None = None,
        src_mask: Bool[Array, "#B #H #L #L"] | SegmentMask | None = None,
        position_bias: None = None,
        rotation: None = None,
    ) -> Float[Array, "B L D"]:
        """Return the layer's output; arguments as `DecoderLayer`, with equal lengths.

        There is no `position_bias` and no `rotation`: targets do not attend to each other.
        """
        y = self.self_attention_residual.sublayer_input(memory)
        value = self.self_attention_residual(memory, self.self_attention(y, y, y, tgt_mask))
        y = self.cross_attention_residual.sublayer_input(value)
        x = self.cross_attention_residual(value, self.cross_attention(x, memory, y, src_mask))
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y))

    def init_cache(
        self, memory: Float[Array, "B S D"], slots: int, layout: CacheLayout
    ) -> OverMemoryCache:
        """Return the cache: projections of the memory; `slots` of the targets are not needed."""
        first, second = self.self_attention, self.cross_attention
        return OverMemoryCache(
            memory,
            first.keys(memory).swapaxes(2, 3),
            first.project(first.value, memory),
            cached_keys(second.keys(memory), layout),
        )

    def step(
        self,
        x: Float[Array, "B N D"],
        cache: OverMemoryCache,
        position: StepPosition,
        tgt_mask: Bool[Array, "B 1 N slots"],
        src_mask: Bool[Array, "#B #H #N #S"] | None,
        position_bias: None = None,
        rotation: None = None,
    ) -> tuple[Float[Array, "B N D"], OverMemoryCache]:
        """Return the layer's output at one position, and the cache, which stays as it is.

        Each target position makes one more column of the memory visible. That changes what earlier
        positions of the memory gather, so the first attention is computed again at every step,
        once for all hypotheses. Arguments as `DecoderLayer.step`; `tgt_mask` is not needed.
        """
        first, second = self.self_attention, self.cross_attention
        column = jnp.arange(cache.memory.shape[1])
        here = position.rows[:, None, None]
        visible = (column <= column[:, None]) & (column <= here)  # [B, S, S], rows attend
        y = self.self_attention_residual.sublayer_input(cache.memory)
        y = first.attend_to_cache(y, cache.keys, cache.values, visible[:, None])
        value = self.self_attention_residual(cache.memory, y)
        values = cached_values(second.project(second.value, value), cache_layout(cache.memory_keys))
        y = second.attend_to_cache(x, cache.memory_keys, values, src_mask)
        value_here = jnp.take_along_axis(value, here, axis=1, mode="clip")  # [B, 1, D]
        x = self.cross_attention_residual(jnp.broadcast_to(value_here, x.shape), y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y)), cache


def needs_equal_lengths(config: TransformerConfig) -> bool:
    """Return whether the decoder layers are of this kind."""
    return config.decoder_attention == "self_over_memory"


def check_equal_lengths(config: TransformerConfig, target_length: int, source_length: int) -> None:
    """Refuse a target and a source of different lengths, where the layer needs equal ones."""
    if needs_equal_lengths(config) and target_length != source_length:
        raise InputError(
            f"tgt is {target_length} long and src {source_length}; decoder_attention="
            "'self_over_memory' needs equal lengths: pad the shorter one"
        )


def pad_source(
    config: TransformerConfig,
    src: Int32[Array, "B S"],
    src_mask: Bool[Array | np.ndarray, "#B #H 1 #S"] | SegmentMask | None,
    target_length: int,
) -> tuple[Int32[Array, "B _"], Bool[Array, "#B #H 1 _"]]:
    """Return a source and its boolean mask, as long as the target where the layer needs that.

    Without a mask, `config.pad_id` is hidden.
    """
    src_mask = masks.source_mask(src, config) if src_mask is None else src_mask
    src_mask = jnp.asarray(as_boolean_mask(src_mask, 1, src.shape[1]))
    added = jax.core.max_dim(target_length - src.shape[1], 0)  # of a symbolic length too
    if not needs_equal_lengths(config) or added == 0:
        return src, src_mask
    src_mask = jnp.broadcast_to(src_mask, (*src_mask.shape[:3], src.shape[1]))
    src = jnp.pad(src, ((0, 0), (0, added)), constant_values=config.pad_id)
    return src, jnp.pad(src_mask, ((0, 0), (0, 0), (0, 0), (0, added)))
