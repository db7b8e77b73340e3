"""Dropout as a pure function of its input, a rate and a random key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray


def dropout(
    x: Float[Array, "*batch D"], rate: float, key: PRNGKeyArray
) -> Float[Array, "*batch D"]:
    """Return `x` with each element zeroed with probability `rate`, the others scaled up.

    The probability is exact to 2**-17: two elements of a row share the 32 bits of a random word,
    whose making is nearly all of the cost. The backward pass keeps a bit an element.
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
    return jnp.where(_through_bits(halves < kept_of_all), x / (1 - rate), 0)


def _through_bits(mask: Bool[Array, "*batch D"]) -> Bool[Array, "*batch D"]:
    """Return `mask`, made of bytes that hold eight rows each.

    XLA makes anew what is as cheap as a comparison or a shift wherever it is used, and keeps what
    that is made from: the bytes, as they are sums, where it would keep the random words.
    """
    rows = jnp.atleast_2d(mask)
    count = rows.shape[-2]
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, -count % 8), (0, 0)])
    shift = jnp.arange(8, dtype=jnp.uint8)[:, None]
    eights = rows.reshape(*rows.shape[:-2], -1, 8, rows.shape[-1]).astype(jnp.uint8)
    packed = jnp.sum(eights << shift, axis=-2, keepdims=True, dtype=jnp.uint8)
    unpacked = (packed >> shift & 1).astype(bool).reshape(rows.shape)
    return unpacked[..., :count, :].reshape(mask.shape)
