"""Dropout as a pure function of its input, a rate and a random key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jax_transformer.execution import DropoutMask


def dropout(
    x: Float[Array, "*batch D"], rate: float, key: PRNGKeyArray, mask: DropoutMask = "packed"
) -> Float[Array, "*batch D"]:
    """Return `x` with each element set to 0 with probability `rate`, the others scaled up.

    The probability is exact to 2**-17: two elements of a row share the 32 bits of one random word,
    because drawing the words is nearly all of the cost.

    Args:
        x: Values [*batch, D].
        rate: Probability of 0, from 0 to 1.
        key: Random key; the same key and shape give the same mask.
        mask: What the backward pass keeps of the mask: "packed" keeps one bit for each element,
            "unpacked" leaves the choice to XLA. The elements that are dropped are the same.
    """
    kept_of_all = round((1 - rate) * 2**16)
    if kept_of_all == 2**16:
        return x
    if kept_of_all == 0:
        return jnp.zeros_like(x)
    length = x.shape[-1]
    words = jax.random.bits(key, (*x.shape[:-1], -(-length // 2)), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(words, jnp.uint16)  # [..., words, 2]
    halves = halves.reshape(*x.shape[:-1], -1)[..., :length]
    kept = halves < kept_of_all
    if mask == "packed":
        kept = _packed_and_unpacked(kept)
    return jnp.where(kept, x / (1 - rate), 0)


def _packed_and_unpacked(mask: Bool[Array, "*batch D"]) -> Bool[Array, "*batch D"]:
    """Return `mask` by way of bytes that each hold the bits of eight rows.

    For the backward pass XLA recomputes cheap operations and keeps their inputs. Comparisons and
    shifts are cheap, a sum is not: packing through a sum makes the kept input the bytes, one bit
    for each element, in place of the random words.
    """
    rows = jnp.atleast_2d(mask)
    count = rows.shape[-2]
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, -count % 8), (0, 0)])
    shift = jnp.arange(8, dtype=jnp.uint8)[:, None]
    eights = rows.reshape(*rows.shape[:-2], -1, 8, rows.shape[-1]).astype(jnp.uint8)
    packed = jnp.sum(eights << shift, axis=-2, keepdims=True, dtype=jnp.uint8)
    unpacked = (packed >> shift & 1).astype(bool).reshape(rows.shape)
    return unpacked[..., :count, :].reshape(mask.shape)
