"""What a decoder layer keeps between two decoding steps, and the attention of a step to it.

Letters in shapes: B batch, H heads, G key heads, K width of a head's queries and keys, U of its
values, S source length, N hypotheses of a source, slots N times target positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.kernels.segments import join_queries
from jax_transformer.kernels.softmax import masked_softmax, soft_cap

Keys = Float[Array, "B G K _"] | Float[Array, "B _ _"]  # the last is G * K wide
Values = Float[Array, "B G _ U"] | Float[Array, "B _ _"]  # the last is G * U wide


class AttentionCache(NamedTuple):
    """Projected keys and values of one attention, in the shapes that `SearchExecution.cache` names.

    Attributes:
        keys: "split_heads": in columns [B, G, K, L]; "joined_heads": in rows [B, L, G * K].
        values: "split_heads": in rows [B, G, L, U]; "joined_heads": in rows [B, L, G * U].
    """

    keys: Keys
    values: Values

    @property
    def layout(self) -> CacheLayout:
        """The layout that its arrays have."""
        return cache_layout(self.keys)

    @property
    def axes(self) -> tuple[int, int]:
        """The axis of the length L in the keys and in the values."""
        return (1, 1) if self.layout == "joined_heads" else (3, 2)

    @property
    def length(self) -> int:
        """The number of keys."""
        return self.keys.shape[self.axes[0]]


class LayerCache(NamedTuple):
    """What a decoder layer keeps of the earlier target tokens and of the memory.

    The N hypotheses of a source lie side by side: hypothesis n at position p is slot p * N + n.
    Unwritten slots are 0. All hypotheses share the memory's keys and values.

    Attributes:
        self_attention: Keys and values of the target's slots. In a merged attention, those of the
            memory stand before them.
        cross_attention: Keys and values of the memory; None in a merged attention.
    """

    self_attention: AttentionCache
    cross_attention: AttentionCache | None


class RecurrenceCache(NamedTuple):
    """Keys and values of the memory, and the state of each hypothesis, in at least float32."""

    cross_attention: AttentionCache
    state: Float[Array, "B N D"]


class StepPosition(NamedTuple):
    """Where a decoding step is.

    All rows write the same one of the cache's L columns in a step, so no scatter is needed. Columns
    wrap around: a row that entered the search at step b keeps position p in column (b + p) % L.

    Attributes:
        column: The column that all rows write, from 0 to L - 1.
        rows: Position of each row, from 0; a row at position L or later writes nothing.
    """

    column: Int[Array, ""]
    rows: Int[Array, " B"]

    def distances(self, slots: int, hypotheses: int) -> Int[Array, " slots"]:
        """Return how many positions each slot of the cache lies before this one, in every row."""
        return (self.column - jnp.arange(slots) // hypotheses) % (slots // hypotheses)


def cache_layout(keys: Keys) -> CacheLayout:
    """Return the layout that keys have."""
    return "joined_heads" if keys.ndim == 3 else "split_heads"


def cached_keys(heads: Float[Array, "B G L K"], layout: CacheLayout) -> Keys:
    """Return keys as a cache of this layout holds them."""
    return _side_by_side(heads) if layout == "joined_heads" else heads.swapaxes(2, 3)


def cached_values(heads: Float[Array, "B G L U"], layout: CacheLayout) -> Values:
    """Return values as a cache of this layout holds them."""
    return _side_by_side(heads) if layout == "joined_heads" else heads


def with_slots(cache: AttentionCache, slots: int) -> AttentionCache:
    """Return a cache with so many unwritten slots behind what it holds."""

    def padded(x: Float[Array, "*shape"], axis: int) -> Float[Array, "*longer"]:
        return jnp.pad(x, [(0, slots if n == axis else 0) for n in range(x.ndim)])

    key_axis, value_axis = cache.axes
    return AttentionCache(padded(cache.keys, key_axis), padded(cache.values, value_axis))


def empty_slots(like: AttentionCache, slots: int) -> AttentionCache:
    """Return unwritten slots, in the shapes and the layout of another cache."""

    def empty(x: Float[Array, "*shape"], axis: int) -> Float[Array, "*other"]:
        return jnp.zeros((*x.shape[:axis], slots, *x.shape[axis + 1 :]), x.dtype)

    key_axis, value_axis = like.axes
    return AttentionCache(empty(like.keys, key_axis), empty(like.values, value_axis))


def write_slots(
    cache: AttentionCache, new: AttentionCache, start: Int[Array, ""], fits: Bool[Array, " B"]
) -> AttentionCache:
    """Return the cache with new keys and values written from slot `start` on.

    Rows in which they do not fit stay as they are: all rows write the same column of the ring, and
    one that has filled it would lose its first column.
    """

    def write(
        slots: Float[Array, "*shape"], new: Float[Array, "*block"], axis: int
    ) -> Float[Array, "*shape"]:
        old = jax.lax.dynamic_slice_in_dim(slots, start, new.shape[axis], axis)
        new = jnp.where(fits.reshape(-1, *(1,) * (new.ndim - 1)), new.astype(slots.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis)

    key_axis, value_axis = cache.axes
    return AttentionCache(
        write(cache.keys, new.keys, key_axis), write(cache.values, new.values, value_axis)
    )


def attend_to_cache(
    query: Float[Array, "B H N K"],
    cache: AttentionCache,
    mask: Bool[Array, "#B #H #N #S"] | None,
    bias: Float[Array, "#B #H #N S"] | None,
    divisor: float,
    softcap: float | None = None,
) -> Float[Array, "B H N U"]:
    """Return attention over a cache of either layout, whose numbers are all finite.

    `bias`, `divisor` and `softcap` as for `dot_product_attention`.
    """
    keys, values = cache
    joined = cache.layout == "joined_heads"
    key_heads = keys.shape[2] // query.shape[3] if joined else keys.shape[1]
    if key_heads < query.shape[1]:
        rows = query.shape[1:3]
        mask, bias = (
            x
            if x is None
            else join_queries(jnp.broadcast_to(x, (x.shape[0], *rows, x.shape[3])), key_heads)
            for x in (mask, bias)
        )
    queries = join_queries(query, key_heads).astype(keys.dtype)
    wide = jnp.promote_types(keys.dtype, jnp.float32)
    if joined:
        # One product for all heads: the query of a head stands in the head's columns of the keys,
        # with 0 in the columns of the others. It has H times as many terms, but a matrix unit
        # computes them in the time that it needs for a single row.
        queries = jnp.where(_columns(keys, key_heads), _side_by_side(queries)[:, :, None], 0)
        scores = jnp.einsum("bnhd,bsd->bnhs", queries, keys, preferred_element_type=wide)
        mask, bias = (None if x is None else x.swapaxes(1, 2) for x in (mask, bias))
    else:  # with keys in columns, both products of a step read memory row by row
        scores = jnp.einsum("bhtk,bhks->bhts", queries, keys)
    if divisor != 1:
        scores = scores / divisor
    scores = soft_cap(scores, softcap)
    if bias is not None:
        scores = scores + bias
    weights = masked_softmax(scores, mask, by_rows=joined)
    if joined:  # of the product with the values, each head keeps its own columns
        weights = weights.astype(keys.dtype)
        heads = jnp.einsum("bnhs,bsd->bnhd", weights, values, preferred_element_type=wide)
        heads = jnp.sum(jnp.where(_columns(values, key_heads), heads, 0), axis=2)
        width = values.shape[2] // key_heads
        heads = heads.astype(keys.dtype).reshape(*heads.shape[:2], key_heads, width).swapaxes(1, 2)
    else:
        heads = jnp.einsum("bhts,bhsu->bhtu", weights, values)
    return heads.reshape(*query.shape[:3], heads.shape[3]).astype(query.dtype)


def _side_by_side(heads: Float[Array, "B H L K"]) -> Float[Array, "B L D"]:
    batch, num_heads, length, head_dim = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, length, num_heads * head_dim)


def _columns(joined: Float[Array, "B S _"], num_heads: int) -> Bool[np.ndarray, "H _"]:
    """Return which columns of joined heads belong to each head."""
    width = joined.shape[2]
    return np.arange(width) * num_heads // width == np.arange(num_heads)[:, None]
