"""Dropout as a pure function of its input, a rate and a random key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt16

from jax_transformer.kernels.execution import DropoutMask
from jax_transformer.runtime.sharding import draw_rows


def dropout(
    x: Float[Array, "*batch D"], rate: float, key: PRNGKeyArray, mask: DropoutMask = "packed"
) -> Float[Array, "*batch D"]:
    """Return `x` with each element set to 0 with probability `rate`, the others scaled up.

    The probability is exact to 2**-17.

    Args:
        key: Random key; the same key and shape give the same mask.
        mask: Where the random bits come from and what the backward pass keeps of them, as
            `Execution.dropout_mask`.
    """
    keep_threshold = round((1 - rate) * 2**16)
    if keep_threshold == 2**16:
        return x
    if keep_threshold == 0:
        return jnp.zeros_like(x)
    if mask == "generated":
        kept = draw_rows(_generated_bits, key, x.shape) < keep_threshold
    else:
        kept = _packed_and_unpacked(_halves(key, x.shape) < keep_threshold)
    # The factor is not rounded to half precision, where it would be off by up to 0.4 %.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.where(kept, wide * (1 / (1 - rate)), 0).astype(x.dtype)


def _halves(key: PRNGKeyArray, shape: tuple[int, ...]) -> UInt16[Array, "*shape"]:
    """Return 16 random bits for each element.

    Two elements of a row share a word: drawing the words is nearly all of the cost.
    """
    length = shape[-1]
    words = jax.random.bits(key, (*shape[:-1], -(-length // 2)), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(words, jnp.uint16)  # [..., words, 2]
    return halves.reshape(*shape[:-1], -1)[..., :length]


def _generated_bits(key: PRNGKeyArray, shape: tuple[int, ...]) -> UInt16[Array, "*shape"]:
    """Return 16 random bits for each element, drawn by XLA's RngBitGenerator."""
    words = jnp.tile(jax.random.key_data(key).ravel(), 4)[:4]
    return jax.random.bits(jax.random.wrap_key_data(words, impl="rbg"), shape, jnp.uint16)


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
