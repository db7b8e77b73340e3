"""What a decoder layer keeps between two decoding steps, and how a step writes to it.

Letters in shapes: B batch, H heads, K head_dim, S source length, N hypotheses of a source, slots
N times target positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LayerCache(NamedTuple):
    """What a decoder layer keeps of the earlier target tokens and of the memory.

    Attributes:
        keys: Keys of the target, in columns [B, H, K, slots]: the N hypotheses of a source lie
            side by side, hypothesis n at position p in slot p * N + n. Unwritten slots are 0.
        values: Values of the target, in rows [B, H, slots, K].
        memory_keys: Keys of the memory [B, H, K, S], shared by all hypotheses.
        memory_values: Values of the memory [B, H, S, K].
    """

    keys: Float[Array, "B H K slots"]
    values: Float[Array, "B H slots K"]
    memory_keys: Float[Array, "B H K S"]
    memory_values: Float[Array, "B H S K"]


def write_slots(
    slots: Float[Array, "B H _ _"], new: Float[Array, "B H _ _"], start: Int[Array, ""], axis: int
) -> Float[Array, "B H _ _"]:
    """Return `slots` with `new` written from index `start` on along an axis.

    Where `new` does not fit, nothing is written: `jax.lax.dynamic_update_slice` alone would move
    the start back and overwrite the last slots.
    """
    count = new.shape[axis]
    old = jax.lax.dynamic_slice_in_dim(slots, start, count, axis)
    new = jnp.where(start + count <= slots.shape[axis], new.astype(slots.dtype), old)
    return jax.lax.dynamic_update_slice_in_dim(slots, new, start, axis)
