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
    AttentionCache,
    Keys,
    cache_layout,
    cached_keys,
    cached_values,
)
from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask
from jax_transformer.model import masks
from jax_transformer.model.layers import NO_CONTEXT, AttentionContext, DecoderLayer


class OverMemoryCache(NamedTuple):
    """What the layer keeps of the memory between two decoding steps.

    Attributes:
        memory: What the encoder returned.
        self_attention: Keys and values of the memory, with split heads.
        keys: Keys of the second attention, in the layout of the search's cache.
    """

    memory: Float[Array, "B S D"]
    self_attention: AttentionCache
    keys: Keys


class SelfOverMemoryLayer(DecoderLayer):
    """Self-attention over the memory, attention to the result and a feed-forward network."""

    def __call__(
        self,
        x: Float[Array, "B L D"],
        memory: Float[Array, "B L D"] | None,
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Array, "#B #H _ _"] | SegmentMask | None = None,
        cache: OverMemoryCache | None = None,
    ) -> tuple[Float[Array, "B L D"], OverMemoryCache | None]:
        """Return the layer's output and its cache; arguments as `DecoderLayer`, equal lengths.

        Of the context only the mask is read: targets do not attend to each other.
        """
        if cache is not None:
            return self._step(x, cache, context, src_mask), cache
        y = self.self_attention_residual.sublayer_input(memory)
        value = self.self_attention_residual(memory, self.self_attention(y, y, y, context.mask))
        y = self.cross_attention_residual.sublayer_input(value)
        x = self.cross_attention_residual(value, self.cross_attention(x, memory, y, src_mask))
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y)), None

    def init_cache(
        self, memory: Float[Array, "B S D"], hypotheses: int, slots: int, layout: CacheLayout
    ) -> OverMemoryCache:
        """Return the cache: projections of the memory; nothing of the targets is needed."""
        of_memory = self.self_attention.keys_and_values(memory, "split_heads")
        keys = cached_keys(self.cross_attention.keys(memory), layout)
        return OverMemoryCache(memory, of_memory, keys)

    def _step(
        self,
        x: Float[Array, "B N D"],
        cache: OverMemoryCache,
        context: AttentionContext,
        src_mask: Bool[Array, "#B #H #N #S"] | None,
    ) -> Float[Array, "B N D"]:
        """Return the layer's output at one position.

        Each target position makes one more column of the memory visible. That changes what earlier
        positions of the memory gather, so the first attention is computed again at every step,
        once for all hypotheses.
        """
        memory, column = cache.memory, jnp.arange(cache.memory.shape[1])
        here = context.position.rows[:, None, None]
        visible = (column <= column[:, None]) & (column <= here)  # [B, S, S], rows attend
        y = self.self_attention_residual.sublayer_input(memory)
        y = self.self_attention(y, None, None, visible[:, None], cache=cache.self_attention)
        value = self.self_attention_residual(memory, y)
        values = cached_values(self.cross_attention.values(value), cache_layout(cache.keys))
        of_memory = AttentionCache(cache.keys, values)
        y = self.cross_attention(x, None, None, src_mask, cache=of_memory)
        value_here = jnp.take_along_axis(value, here, axis=1, mode="clip")  # [B, 1, D]
        x = self.cross_attention_residual(jnp.broadcast_to(value_here, x.shape), y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y))


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
    src: Int32[Array, "B S"] | Float[Array, "B _ _"],
    src_mask: Bool[Array | np.ndarray, "#B #H 1 #S"] | SegmentMask | None,
    target_length: int,
) -> tuple[Int32[Array, "B _"] | Float[Array, "B _ _"], Bool[Array, "#B #H 1 _"]]:
    """Return a source and its boolean mask, as long as the target where the layer needs that.

    Without a mask, `config.pad_id` is hidden, and nothing of sound.
    """
    if src_mask is None:
        src_mask = masks.source_mask(src, config) or SegmentMask(None)
    length = config.positions_of(src.shape[1])
    src_mask = jnp.asarray(as_boolean_mask(src_mask, 1, length))
    added = jax.core.max_dim(target_length - src.shape[1], 0)  # of a symbolic length too
    if not needs_equal_lengths(config) or added == 0:
        return src, src_mask
    src_mask = jnp.broadcast_to(src_mask, (*src_mask.shape[:3], src.shape[1]))
    src = jnp.pad(src, ((0, 0), (0, added)), constant_values=config.pad_id)
    return src, jnp.pad(src_mask, ((0, 0), (0, 0), (0, 0), (0, added)))
