"""The cache: an explicit pytree that one decoding step reads and hands back extended.

Letters in shapes: B batch, N hypotheses of a source, L target positions, S source length,
D d_model, V target vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.kernels.cached_attention import StepPosition
from jax_transformer.kernels.execution import DEFAULT_SEARCH_EXECUTION, SearchExecution
from jax_transformer.kernels.segments import as_boolean_mask
from jax_transformer.model import functional
from jax_transformer.model.checks import (
    check_cache,
    check_execution,
    check_floats,
    check_ids,
    check_length,
    check_memory,
    check_not_empty,
    check_params,
    check_whole,
    check_whole_number,
)
from jax_transformer.model.self_over_memory import needs_equal_lengths
from jax_transformer.model.transformer import DecoderCache, Params, SourceMask, bind

Tokens = (
    Int[Array | np.ndarray, " B"]
    | Int[Array | np.ndarray, "B N"]
    | Float[Array | np.ndarray, "B D"]
    | Float[Array | np.ndarray, "B N D"]
)
Logits = Float[Array, "B V"] | Float[Array, "B N V"]


class Cache(NamedTuple):
    """The state of decoding: the tokens so far and the memory, projected for every layer.

    The N hypotheses of a source lie side by side: slot (p, n) keeps what hypothesis n computed at
    position p. When a hypothesis continues another hypothesis, only the ancestors change.

    Attributes:
        layers: What each decoder layer keeps.
        src_mask: The positions of the memory that are attended to, True = attend; None is all.
        ancestors: For each hypothesis and each column p, the n of the slot (p, n) that belongs to
            it [B, N, L]; -1 where it has no token, N for a hypothesis without a parent.
        position: Number of steps so far. Step t writes column t modulo L, see `StepPosition`.
        begin: The step at which each row began [B]; 0, but for rows that a search took in later.
    """

    layers: DecoderCache
    src_mask: Bool[Array, "#B #H 1 #S"] | None
    ancestors: Int32[Array, "B N L"]
    position: Int32[Array, ""]
    begin: Int32[Array, " B"]


def init_cache(
    params: Params,
    config: TransformerConfig,
    memory: Float[Array | np.ndarray, "B S D"],
    max_new_tokens: int,
    src_mask: SourceMask | None = None,
    *,
    beam_size: int = 1,
    execution: SearchExecution = DEFAULT_SEARCH_EXECUTION,
) -> Cache:
    """Return a cache for `max_new_tokens` positions, with the memory projected for every layer.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        memory: What `encode` returned [B, S, D].
        max_new_tokens: Number L of positions.
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None attends to the whole
            memory, as in `decode`.
        beam_size: Number N of hypotheses of a source, which share one memory.
        execution: Names the layout of the cache.

    Raises:
        InputError: An argument has another type than this, a size is below 1, the positions exceed
            the position table or, where `config.decoder_attention` is "self_over_memory", the
            memory; or the cache is larger than a machine that computes on its CPU has memory.
    """
    for name, size in (("max_new_tokens", max_new_tokens), ("beam_size", beam_size)):
        check_whole_number(name, size, least=1)
    check_execution(execution, SearchExecution)
    check_params(params, config, "decode")
    check_slots(config, memory, src_mask, max_new_tokens)
    if config.has_position_table:
        check_length("max_new_tokens: the target", max_new_tokens, config.max_length)
    src_mask = as_boolean_mask(src_mask, 1, memory.shape[1])
    memory, src_mask = jax.tree.map(jnp.asarray, (memory, src_mask))
    return new_cache(params, config, memory, max_new_tokens, src_mask, beam_size, execution)


def check_slots(config: TransformerConfig, memory: Any, src_mask: Any, target_length: int) -> None:
    """Refuse a memory, its mask, or targets that are too long for it."""
    check_memory(config, memory, src_mask)
    check_not_empty("memory", memory)
    if needs_equal_lengths(config) and target_length > memory.shape[1]:
        raise InputError(
            f"max_new_tokens={target_length} exceeds the memory's length {memory.shape[1]}, but "
            "decoder_attention='self_over_memory' needs a memory as long: pad the source"
        )


def new_cache(
    params: Params,
    config: TransformerConfig,
    memory: Float[Array, "B S D"],
    max_new_tokens: int,
    src_mask: Bool[Array, "#B #H 1 #S"] | None,
    beam_size: int,
    execution: SearchExecution,
) -> Cache:
    """Return what `init_cache` does; of what it refuses, only a cache that is too large."""
    wide = jnp.promote_types(memory.dtype, jnp.float32)
    dtype = wide if execution.wide_cache else memory.dtype
    check_cache(config, *memory.shape[:2], max_new_tokens, beam_size, dtype.itemsize)
    slots = max_new_tokens * beam_size
    decoder = bind(params, config, execution).decoder
    layers = decoder.init_cache(memory, src_mask, beam_size, slots, execution.cache)
    return Cache(
        # The state of a recurrence is wide, and stays so: each step adds to it.
        layers=jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), layers),
        src_mask=src_mask,
        ancestors=jnp.full((memory.shape[0], beam_size, max_new_tokens), -1, jnp.int32),
        position=jnp.zeros((), jnp.int32),
        begin=jnp.zeros(memory.shape[0], jnp.int32),
    )


def decode_step(
    params: Params,
    config: TransformerConfig,
    cache: Cache,
    tokens: Tokens,
    *,
    execution: SearchExecution = DEFAULT_SEARCH_EXECUTION,
) -> tuple[Logits, Cache]:
    """Return the logits of the token after each given token, and the cache with it written.

    Equal to the last logits of `decode` on the tokens so far. A token in the cache is visible to
    later tokens even where it is `config.pad_id`. Pure: works under `jit`, `vmap` and `scan`.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        cache: As from `init_cache` or an earlier step.
        tokens: One token of each source [B], or of each of its hypotheses [B, N]; vectors [B, D]
            or [B, N, D] where `config.token_embeddings` is "none".
        execution: How the model is executed. The layout of the cache stays that of `init_cache`.

    Returns:
        Logits [B, V] or [B, N, V], hidden states where `config.output_projection` is "none"; and
        the new cache. Under a transformation, where nothing can be refused, a step on a full
        cache writes nothing and its logits are NaN.

    Raises:
        InputError: The cache is full, the tokens do not have its shape, or an id is outside the
            vocabulary.
    """
    _check_cache(cache)
    check_execution(execution, SearchExecution)
    batch, count, length = cache.ancestors.shape
    traced = isinstance(cache.position, jax.core.Tracer)
    if not traced and cache.position >= length:
        raise InputError(f"the cache is full: init_cache was called with max_new_tokens={length}")
    vectors = config.token_embeddings == "none"
    (check_floats if vectors else check_whole)("tokens", tokens)
    single = tokens.ndim == 1 + vectors
    if tokens.shape[: 2 - single] not in ((batch, count), (batch,) * (count == 1)):
        wanted = f"[{batch}, {count}]" + f" or [{batch}]" * (count == 1)
        raise InputError(f"tokens of shape {tokens.shape} must be {wanted}, as the cache is")
    if not vectors and not isinstance(tokens, jax.core.Tracer):
        check_ids("tokens", np.asarray(tokens).reshape(batch, count), config.tgt_vocab_size)
    check_params(params, config, "decode")
    tokens = jnp.asarray(tokens)
    without_parent = jnp.any(cache.ancestors == count, axis=-1, keepdims=True)
    logits, cache = next_step(
        params, config, cache, tokens[:, None] if single else tokens, execution
    )
    logits = jnp.where(without_parent, jnp.nan, logits)
    return logits[:, 0] if single else logits, cache


def next_step(
    params: Params,
    config: TransformerConfig,
    cache: Cache,
    tokens: Int[Array, "B N"] | Float[Array, "B N D"],
    execution: SearchExecution,
) -> tuple[Float[Array, "B N V"], Cache]:
    """Return what `decode_step` does, and refuse nothing."""
    batch, count, length = cache.ancestors.shape
    position = StepPosition(cache.position % length, cache.position - cache.begin)
    here = jnp.arange(length) == position.column
    here &= (position.rows < length)[:, None, None]
    ancestors = jnp.where(here, jnp.arange(count, dtype=jnp.int32)[:, None], cache.ancestors)
    visible = ancestors[..., None] == jnp.arange(count)  # [B, N, L, N]
    visible = visible.reshape(batch, 1, count, length * count)
    model = bind(params, config, execution.of_step)
    logits, layers = model.step(tokens, cache.layers, position, visible, cache.src_mask)
    position = cache.position + 1
    return logits, cache._replace(layers=layers, ancestors=ancestors, position=position)


def select_hypotheses(cache: Cache, parents: Int[Array | np.ndarray, "B N"]) -> Cache:
    """Return the cache in which hypothesis n of each source continues hypothesis `parents[n]`.

    Args:
        cache: As from `init_cache` or `decode_step`.
        parents: For each hypothesis the number of the one that it continues [B, N].

    Raises:
        InputError: `parents` has another type than this or, where it is concrete (not traced by
            `jit`), names no hypothesis. Under `jit` the logits of what continues none are NaN.
    """
    _check_cache(cache)
    batch, count, _ = cache.ancestors.shape
    check_whole("parents", parents, "hypotheses")
    if parents.shape != (batch, count):
        raise InputError(
            f"parents of shape {parents.shape} must be [{batch}, {count}], as the cache is"
        )
    if not isinstance(parents, jax.core.Tracer):
        check_ids("parents", np.asarray(parents), count, "the hypotheses")
    parents = functional.cast_ids(parents, count)[..., None]
    ancestors = jnp.take_along_axis(cache.ancestors, parents, 1, mode="fill", fill_value=count)
    return cache._replace(ancestors=ancestors)


def _check_cache(cache: Cache) -> None:
    if not isinstance(cache, Cache):
        raise InputError(
            f"cache of type {type(cache).__qualname__} must be a Cache, as init_cache returns it"
        )
