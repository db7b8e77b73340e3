"""What a decoder layer keeps between two decoding steps, and the attention of a step to it.

Letters in shapes: B batch, H heads, G key heads, K head_dim, D = G * K, S source length,
N hypotheses of a source, slots N times target positions.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.kernels.segments import join_queries
from jax_transformer.kernels.softmax import masked_softmax

Keys = Float[Array, "B G K _"] | Float[Array, "B _ _"]  # the last is G * K wide
Values = Float[Array, "B G _ K"] | Float[Array, "B _ _"]


class LayerCache(NamedTuple):
    """What a decoder layer keeps of the earlier target tokens and of the memory.

    The N hypotheses of a source lie side by side: hypothesis n at position p is slot p * N + n.
    Unwritten slots are 0. All hypotheses share the memory's keys and values. The shapes are those
    of `SearchExecution.cache`: "split_heads" or "joined_heads".

    Attributes:
        keys: Keys of the target, in columns [B, G, K, slots], or in rows [B, slots, D].
        values: Values of the target, in rows [B, G, slots, K] or [B, slots, D].
        memory_keys: Keys of the memory [B, G, K, S] or [B, S, D].
        memory_values: Values of the memory [B, G, S, K] or [B, S, D].
    """

    keys: Keys
    values: Values
    memory_keys: Keys
    memory_values: Values


class StepPosition(NamedTuple):
    """Where a decoding step is.

    The L target positions of a cache are a ring, which all rows write in one column, so that no
    step scatters. A row may begin at any column: its position p is column (begin + p) modulo L.

    Attributes:
        column: Where all rows write, from 0 to L - 1.
        rows: Position of each row, from 0; a row at position L or later writes nothing.
    """

    column: Int[Array, ""]
    rows: Int[Array, " B"]

    def distances(self, slots: int, hypotheses: int) -> Int[Array, " slots"]:
        """Return how many positions each slot of the cache lies before this one, in every row."""
        return (self.column - jnp.arange(slots) // hypotheses) % (slots // hypotheses)


class MergedCache(NamedTuple):
    """What a layer of merged attention keeps: of the memory, then of the target's slots.

    Attributes:
        keys: In columns [B, G, K, S + slots], or in rows [B, S + slots, G * K].
        values: In rows [B, G, S + slots, K] or [B, S + slots, G * K].
    """

    keys: Keys
    values: Values


Kept = TypeVar("Kept", LayerCache, MergedCache)


def cache_layout(keys: Keys) -> CacheLayout:
    """Return the layout that the keys of a cache have."""
    return "joined_heads" if keys.ndim == 3 else "split_heads"


def cached_keys(heads: Float[Array, "B G L K"], layout: CacheLayout) -> Keys:
    """Return keys as a cache of this layout holds them."""
    return _side_by_side(heads) if layout == "joined_heads" else heads.swapaxes(2, 3)


def cached_values(heads: Float[Array, "B G L K"], layout: CacheLayout) -> Values:
    """Return values as a cache of this layout holds them."""
    return _side_by_side(heads) if layout == "joined_heads" else heads


def empty_cache(memory_keys: Keys, memory_values: Values, slots: int) -> LayerCache:
    """Return the cache before the first token."""
    axes = key_axis(memory_keys), memory_values.ndim - 2
    keys, values = (
        jnp.zeros((*x.shape[:axis], slots, *x.shape[axis + 1 :]), x.dtype)
        for x, axis in zip((memory_keys, memory_values), axes, strict=True)
    )
    return LayerCache(keys, values, memory_keys, memory_values)


def write_slots(
    cache: Kept, keys: Keys, values: Values, start: Int[Array, ""], fits: Bool[Array, " B"]
) -> Kept:
    """Return the cache with keys and values of the target written from slot `start` on.

    Rows in which they do not fit stay as they are.
    """

    def write(
        slots: Float[Array, "*shape"], new: Float[Array, "*block"], axis: int
    ) -> Float[Array, "*shape"]:
        count = new.shape[axis]
        old = jax.lax.dynamic_slice_in_dim(slots, start, count, axis)
        new = jnp.where(fits.reshape(-1, *(1,) * (new.ndim - 1)), new.astype(slots.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis)

    return cache._replace(
        keys=write(cache.keys, keys, key_axis(keys)),
        values=write(cache.values, values, values.ndim - 2),
    )


def attend_to_cache(
    query: Float[Array, "B H N K"],
    keys: Keys,
    values: Values,
    mask: Bool[Array, "#B #H #N #S"] | None,
    bias: Float[Array, "#B #H #N S"] | None,
    divisor: float,
    softcap: float | None = None,
) -> Float[Array, "B H N K"]:
    """Return attention over a cache of either layout, whose numbers are all finite.

    `bias`, `divisor` and `softcap` as for `dot_product_attention`.
    """
    joined = cache_layout(keys) == "joined_heads"
    key_heads = keys.shape[2] // query.shape[3] if joined else keys.shape[1]
    if key_heads < query.shape[1]:
        rows = query.shape[1:3]
        mask, bias = (
            x
            if x is None
            else join_queries(jnp.broadcast_to(x, (x.shape[0], *rows, x.shape[3])), key_heads)
            for x in (mask, bias)
        )
    attend = _joined_attention if joined else _split_attention
    queries = join_queries(query, key_heads)
    return attend(queries, keys, values, mask, bias, divisor, softcap).reshape(query.shape)


def key_axis(keys: Keys) -> int:
    """Return the axis of the slots; in values it is the last but one."""
    return 1 if cache_layout(keys) == "joined_heads" else 3


def _side_by_side(heads: Float[Array, "B H L K"]) -> Float[Array, "B L D"]:
    batch, num_heads, length, head_dim = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, length, num_heads * head_dim)


def _split_attention(
    query: Float[Array, "B H T K"],
    keys: Float[Array, "B H K S"],
    values: Float[Array, "B H S K"],
    mask: Bool[Array, "#B #H #T #S"] | None,
    bias: Float[Array, "#B H #T S"] | None,
    divisor: float,
    softcap: float | None,
) -> Float[Array, "B H T K"]:
    """Return attention by one matrix for each head.

    With keys in columns, both products of a decoding step read memory row by row.
    """
    scores = jnp.einsum("bhtk,bhks->bhts", query, keys)
    weights = masked_softmax(scores, divisor, mask, bias, by_rows=False, softcap=softcap)
    return jnp.einsum("bhts,bhsk->bhtk", weights, values)


def _joined_attention(
    query: Float[Array, "B H N K"],
    keys: Float[Array, "B S D"],
    values: Float[Array, "B S D"],
    mask: Bool[Array, "#B #H #N #S"] | None,
    bias: Float[Array, "#B H #N S"] | None,
    divisor: float,
    softcap: float | None,
) -> Float[Array, "B H N K"]:
    """Return attention by one product for all heads of a source; D is H * K.

    The query of a head stands in the head's columns, with 0 in the columns of the others; of the
    product with the values each head keeps its own columns. The products have H times as many
    terms, but a matrix unit computes them in the time that it needs for a single row. Sums are in
    at least float32.
    """
    _, num_heads, _, head_dim = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    columns = np.arange(num_heads * head_dim) // head_dim == np.arange(num_heads)[:, None]  # [H, D]
    queries = jnp.where(columns, _side_by_side(query)[:, :, None], 0)  # [B, N, H, D]
    scores = jnp.einsum("bnhd,bsd->bnhs", queries, keys, preferred_element_type=wide)
    mask, bias = (None if x is None else x.swapaxes(1, 2) for x in (mask, bias))
    weights = masked_softmax(scores, divisor, mask, bias, softcap=softcap).astype(query.dtype)
    heads = jnp.einsum("bnhs,bsd->bnhd", weights, values, preferred_element_type=wide)
    joined = jnp.sum(jnp.where(columns, heads, 0), axis=2).astype(query.dtype)
    return joined.reshape(*joined.shape[:2], num_heads, head_dim).swapaxes(1, 2)
