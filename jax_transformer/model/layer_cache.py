"""What a decoder layer keeps between two decoding steps, and how a step writes to it.

Letters in shapes: B batch, H heads, K head_dim, D = H * K, S source length, N hypotheses of a
source, slots N times target positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_transformer.kernels.execution import CacheLayout
from jax_transformer.model import functional

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
    return functional.merge_heads(heads) if layout == "joined_heads" else heads.swapaxes(2, 3)


def cached_values(heads: Float[Array, "B H L K"], layout: CacheLayout) -> Values:
    """Return values as a cache of this layout holds them."""
    return functional.merge_heads(heads) if layout == "joined_heads" else heads


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
