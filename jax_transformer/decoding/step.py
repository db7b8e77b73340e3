"""One position of the decoder: its layers' own parameters and maths, over what they kept.

Letters in shapes: B batch, N hypotheses of a source, D d_model, S source length, H heads,
K head_dim, V target vocabulary, slots N times target positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_transformer import functional
from jax_transformer.layers import DecoderLayer
from jax_transformer.model import SourceMask, Transformer


class LayerCache(NamedTuple):
    """What a decoder layer keeps of the tokens so far and of the memory.

    Attributes:
        keys: Keys of the target, in columns [B, H, K, slots]: the N hypotheses of a source lie
            side by side, hypothesis n at position p in slot p * N + n. Slots not yet written are 0.
        values: Values of the target, in rows [B, H, slots, K].
        memory_keys: Keys of the memory [B, H, K, S], one for all hypotheses.
        memory_values: Values of the memory [B, H, S, K].
    """

    keys: Float[Array, "B H K slots"]
    values: Float[Array, "B H slots K"]
    memory_keys: Float[Array, "B H K S"]
    memory_values: Float[Array, "B H S K"]


class OverMemoryCache(NamedTuple):
    """What a decoder layer keeps where `config.decoder_attention` is "self_over_memory".

    Attributes:
        memory: The encoder's output [B, S, D].
        queries: Queries of its self-attention [B, H, S, K].
        keys: Keys of its self-attention, in columns [B, H, K, S].
        values: Values of its self-attention [B, H, S, K].
        memory_keys: Its keys in the second attention, in columns [B, H, K, S].
    """

    memory: Float[Array, "B S D"]
    queries: Float[Array, "B H S K"]
    keys: Float[Array, "B H K S"]
    values: Float[Array, "B H S K"]
    memory_keys: Float[Array, "B H K S"]


DecoderCache = tuple[LayerCache, ...] | tuple[OverMemoryCache, ...]


def init_layers(
    transformer: Transformer,
    memory: Float[Array, "B S D"],
    src_mask: SourceMask | None,
    slots: int,
) -> DecoderCache:
    """Return what each decoder layer keeps before the first token.

    Args:
        transformer: The model, bound to its parameters: a `method` of `Transformer.apply`.
        memory: Encoder output [B, S, D].
        src_mask: Who of the memory is attended to.
        slots: Positions of the target times hypotheses of a source.
    """
    memory = functional.clear_unattended(memory, src_mask)
    init = _over_memory_cache if _is_over_memory(transformer) else _layer_cache
    return tuple(init(layer, memory, slots) for layer in transformer.decoder.layers)


def step(
    transformer: Transformer,
    tokens: Int[Array, "B N"] | Float[Array, "B N D"],
    layers: DecoderCache,
    position: Int[Array, ""],
    tgt_mask: Bool[Array, "B 1 N slots"],
    src_mask: SourceMask | None,
) -> tuple[Float[Array, "B N V"], DecoderCache]:
    """Return the logits after one more position, and what the layers keep with it.

    Args:
        transformer: The model, bound to its parameters: a `method` of `Transformer.apply`.
        tokens: Ids of the N hypotheses of each source, or vectors.
        layers: What each decoder layer kept of earlier positions.
        position: Which position it is, counted from 0; past the last slots the logits are NaN.
        tgt_mask: The slots, this position's included, that each hypothesis attends to.
        src_mask: Who of the memory is attended to.
    """
    config = transformer.config
    x = transformer.embed(tokens, "target")
    length = tgt_mask.shape[-1] // x.shape[1]
    if config.positions != "none":
        table = functional.sinusoidal_positions(length, config.d_model, config.positions)
        x = x + jnp.asarray(table, x.dtype)[position]
    kept = []
    for layer, cache in zip(transformer.decoder.layers, layers, strict=True):
        if _is_over_memory(transformer):
            x = _over_memory_step(layer, x, cache, position, src_mask)
        else:
            x, cache = _layer_step(layer, x, cache, position, tgt_mask, src_mask)
        kept.append(cache)
    if config.final_norm:
        x = transformer.decoder.norm(x)
    x = jnp.where(position < length, x, jnp.nan)
    return transformer.project(x), tuple(kept)


def _is_over_memory(transformer: Transformer) -> bool:
    return transformer.config.decoder_attention == "self_over_memory"


def _layer_cache(layer: DecoderLayer, memory: Float[Array, "B S D"], slots: int) -> LayerCache:
    if layer.config.memory_norm:
        memory = layer.memory_norm(memory)
    memory_keys = layer.cross_attention.project_keys(memory).swapaxes(2, 3)
    batch, num_heads, head_dim, _ = memory_keys.shape
    return LayerCache(
        keys=jnp.zeros((batch, num_heads, head_dim, slots), memory_keys.dtype),
        values=jnp.zeros((batch, num_heads, slots, head_dim), memory_keys.dtype),
        memory_keys=memory_keys,
        memory_values=layer.cross_attention.project_values(memory),
    )


def _layer_step(
    layer: DecoderLayer,
    x: Float[Array, "B N D"],
    cache: LayerCache,
    position: Int[Array, ""],
    tgt_mask: Bool[Array, "B 1 N slots"],
    src_mask: SourceMask | None,
) -> tuple[Float[Array, "B N D"], LayerCache]:
    start = position * x.shape[1]

    def attend_to_target(x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        nonlocal cache
        attention = layer.self_attention
        keys = write_slots(cache.keys, attention.project_keys(x).swapaxes(2, 3), start, axis=3)
        values = write_slots(cache.values, attention.project_values(x), start, axis=2)
        cache = cache._replace(keys=keys, values=values)
        return attention.attend_to_cache(attention.project_queries(x), keys, values, tgt_mask)

    def attend_to_memory(x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        attention = layer.cross_attention
        queries = attention.project_queries(x)
        return attention.attend_to_cache(queries, cache.memory_keys, cache.memory_values, src_mask)

    x = layer.self_attention_residual(x, attend_to_target)
    x = layer.cross_attention_residual(x, attend_to_memory)
    return layer.feed_forward_residual(x, layer.feed_forward), cache


def write_slots(
    slots: Float[Array, "B H _ _"], new: Float[Array, "B H _ _"], start: Int[Array, ""], axis: int
) -> Float[Array, "B H _ _"]:
    """Return `slots` with `new` in place of those from `start` on along an axis.

    Where they do not fit, nothing is written: `jax.lax.dynamic_update_slice` alone would move
    the start back and replace the last ones.
    """
    count = new.shape[axis]
    old = jax.lax.dynamic_slice_in_dim(slots, start, count, axis)
    new = jnp.where(start + count <= slots.shape[axis], new.astype(slots.dtype), old)
    return jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis)


def _over_memory_cache(
    layer: DecoderLayer, memory: Float[Array, "B S D"], slots: int
) -> OverMemoryCache:
    return OverMemoryCache(
        memory,
        layer.self_attention.project_queries(memory),
        layer.self_attention.project_keys(memory).swapaxes(2, 3),
        layer.self_attention.project_values(memory),
        layer.cross_attention.project_keys(memory).swapaxes(2, 3),
    )


def _over_memory_step(
    layer: DecoderLayer,
    x: Float[Array, "B N D"],
    cache: OverMemoryCache,
    position: Int[Array, ""],
    src_mask: SourceMask | None,
) -> Float[Array, "B N D"]:
    """Return the layer's output where the targets so far only open columns of the memory.

    What a position of the memory gathers changes until its own column is open, so the first
    attention is run anew, for all hypotheses at once.
    """
    column = jnp.arange(cache.memory.shape[1])
    opened = (column <= column[:, None]) & (column <= position)  # [S, S], rows attend
    value = layer.self_attention_residual(
        cache.memory,
        lambda _: layer.self_attention.attend_to_cache(
            cache.queries, cache.keys, cache.values, opened[None, None]
        ),
    )
    here = jax.lax.dynamic_index_in_dim(value, position, axis=1)  # [B, 1, D]
    attention = layer.cross_attention
    x = layer.cross_attention_residual(
        jnp.broadcast_to(here, x.shape),
        lambda _: attention.attend_to_cache(
            attention.project_queries(x),
            cache.memory_keys,
            attention.project_values(value),
            src_mask,
        ),
    )
    return layer.feed_forward_residual(x, layer.feed_forward)
