"""What a decoder layer keeps between two decoding steps, and how a step writes to it.

Letters in shapes: B batch, H heads, K head_dim, D = H * K, S source length, N hypotheses of a
source, slots N times target positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.kernels.softmax import masked_softmax

Keys = Float[Array, "B H K _"] | Float[Array, "B _ _"]  # the last is H * K wide
Values = Float[Array, "B H _ K"] | Float[Array, "B _ _"]


class LayerCache(NamedTuple):
    """What a decoder layer keeps of the earlier target tokens and of the memory.

    The N hypotheses of a source lie side by side: hypothesis n at position p is slot p * N + n.
    Unwritten slots are 0. All hypotheses share the memory's keys and values. The shapes are those
    of `Execution.cache`: "split_heads" or "joined_heads".

    Attributes:
        keys: Keys of the target, in columns [B, H, K, slots], or in rows [B, slots, D].
        values: Values of the target, in rows [B, H, slots, K] or [B, slots, D].
        memory_keys: Keys of the memory [B, H, K, S] or [B, S, D].
        memory_values: Values of the memory [B, H, S, K] or [B, S, D].
    """

    keys: Keys
    values: Values
    memory_keys: Keys
    memory_values: Values


def cache_layout(keys: Keys) -> CacheLayout:
    """Return the layout that the keys of a cache have."""
    return "joined_heads" if keys.ndim == 3 else "split_heads"


def cached_keys(heads: Float[Array, "B H L K"], layout: CacheLayout) -> Keys:
    """Return keys as a cache of this layout holds them."""
    return _side_by_side(heads) if layout == "joined_heads" else heads.swapaxes(2, 3)


def cached_values(heads: Float[Array, "B H L K"], layout: CacheLayout) -> Values:
    """Return values as a cache of this layout holds them."""
    return _side_by_side(heads) if layout == "joined_heads" else heads


def slot_axes(layout: CacheLayout) -> tuple[int, int]:
    """Return the axes of the slots in the keys and in the values."""
    return (1, 1) if layout == "joined_heads" else (3, 2)


def empty_slots(memory_keys: Keys, count: int) -> tuple[Keys, Values]:
    """Return keys and values of `count` unwritten slots, beside the keys of the memory."""
    dtype = memory_keys.dtype
    if cache_layout(memory_keys) == "joined_heads":
        batch, _, width = memory_keys.shape
        return jnp.zeros((batch, count, width), dtype), jnp.zeros((batch, count, width), dtype)
    batch, num_heads, head_dim, _ = memory_keys.shape
    keys = jnp.zeros((batch, num_heads, head_dim, count), dtype)
    return keys, jnp.zeros((batch, num_heads, count, head_dim), dtype)


def write_slots(
    slots: Float[Array, "*shape"], new: Float[Array, "*block"], start: Int[Array, ""], axis: int
) -> Float[Array, "*shape"]:
    """Return `slots` with `new` written from index `start` on along an axis.

    Where `new` does not fit, nothing is written: `jax.lax.dynamic_update_slice` alone would move
    the start back and overwrite the last slots.
    """
    count = new.shape[axis]
    old = jax.lax.dynamic_slice_in_dim(slots, start, count, axis)
    new = jnp.where(start + count <= slots.shape[axis], new.astype(slots.dtype), old)
    return jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis)


def attend_to_cache(
    query: Float[Array, "B H N K"],
    keys: Keys,
    values: Values,
    mask: Bool[Array, "#B #H #N #S"] | None = None,
    bias: Float[Array, "#B #H #N S"] | None = None,
    scaled: bool = True,
) -> Float[Array, "B H N K"]:
    """Return attention over a cache of either layout."""
    attend = joined_attention if cache_layout(keys) == "joined_heads" else cached_attention
    return attend(query, keys, values, mask, bias, scaled)


def _side_by_side(heads: Float[Array, "B H L K"]) -> Float[Array, "B L D"]:
    batch, num_heads, length, head_dim = heads.shape
    return heads.swapaxes(1, 2).reshape(batch, length, num_heads * head_dim)


def cached_attention(
    query: Float[Array, "B H T K"],
    keys: Float[Array, "B H K S"],
    values: Float[Array, "B H S K"],
    mask: Bool[Array, "#B #H #T #S"] | None = None,
    bias: Float[Array, "#B H #T S"] | None = None,
    scaled: bool = True,
) -> Float[Array, "B H T K"]:
    """Return attention over a cache, whose keys lie in columns and whose numbers are all finite.

    With keys in columns, both products of a decoding step read memory row by row. `bias` and
    `scaled` as for `dot_product_attention`.
    """
    scores = jnp.einsum("bhtk,bhks->bhts", query, keys)
    weights = masked_softmax(scores, query.shape[-1], mask, bias, scaled, by_rows=False)
    return jnp.einsum("bhts,bhsk->bhtk", weights, values)


def joined_attention(
    query: Float[Array, "B H N K"],
    keys: Float[Array, "B S D"],
    values: Float[Array, "B S D"],
    mask: Bool[Array, "#B #H #N #S"] | None = None,
    bias: Float[Array, "#B H #N S"] | None = None,
    scaled: bool = True,
) -> Float[Array, "B H N K"]:
    """Return attention over a cache whose heads lie side by side: D is H * K.

    The same as `cached_attention`, computed by one product for all heads of a source: the query of
    a head stands in the head's columns, with 0 in the columns of the others; of the product with
    the values each head keeps its own columns. The products have H times as many terms, but a
    matrix unit computes them in the time that it needs for a single row. Sums are in at least
    float32.
    """
    _, num_heads, _, head_dim = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    width = num_heads * head_dim
    own = np.arange(width) // head_dim == np.arange(num_heads)[:, None]  # [H, D]
    queries = jnp.where(own, _side_by_side(query)[:, :, None], 0)  # [B, N, H, D]
    scores = jnp.einsum("bnhd,bsd->bnhs", queries, keys, preferred_element_type=wide)
    mask, bias = (None if x is None else x.swapaxes(1, 2) for x in (mask, bias))
    weights = masked_softmax(scores, head_dim, mask, bias, scaled).astype(query.dtype)
    heads = jnp.einsum("bnhs,bsd->bnhd", weights, values, preferred_element_type=wide)
    joined = jnp.sum(jnp.where(own, heads, 0), axis=2).astype(query.dtype)
    return joined.reshape(*joined.shape[:2], num_heads, head_dim).swapaxes(1, 2)
