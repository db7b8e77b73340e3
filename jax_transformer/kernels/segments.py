"""Masks by segments: padding, packed rows and causal attention as two short arrays.

A fused kernel can read these; `as_boolean_mask` makes the boolean array that says the same.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped


@struct.dataclass
class SegmentMask:
    """Which query attends to which key, by segments: a pytree; `causal`, `window` are static.

    Attributes:
        keys: Segment of each key, from 1, or True; others and False are hidden [batch, keys]. None
            hides no key.
        queries: Segment of each query, which attends to the keys of its segment; others than from
            1 attend to nothing [batch, queries]. None: every query attends to every key that is
            not hidden.
        causal: Whether later positions are hidden too. Queries and keys are then equally many.
        window: How many earlier and how many later positions a query attends to, besides its own;
            None is all. Queries and keys are then equally many.
    """

    keys: Bool[Array, "batch keys"] | Int[Array, "batch keys"] | None
    queries: Int[Array, "batch queries"] | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    window: tuple[int, int] | None = struct.field(pytree_node=False, default=None)

    def attended(self, keys: int) -> Bool[Array, "#batch keys"]:
        """Return which keys some query attends to, given the number of keys."""
        if self.queries is not None:
            return jnp.any(as_boolean_mask(self, self.queries.shape[1], keys), axis=(1, 2))
        # In causal attention, and in a window, a key is attended to from its own position.
        return jnp.ones((1, keys), bool) if self.keys is None else self.keys > 0

    def attending(self, queries: int, keys: int) -> Bool[Array, "#batch #queries"]:
        """Return which queries attend to some key; given the number of both."""
        return jnp.any(as_boolean_mask(self, queries, keys), axis=(1, 3))


def causal_mask(length: int) -> Bool[Array, "1 1 length length"]:
    """Return the mask that hides later positions from earlier ones (section 3.2.3)."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def band_mask(queries: int, keys: int, window: tuple[int, int]) -> Bool[Array, "1 1 queries keys"]:
    """Return the mask of a `SegmentMask.window` (Beltagy et al. 2020, section 3.1)."""
    distance = jnp.arange(keys) - jnp.arange(queries)[:, None]
    earlier, later = window
    return ((distance >= -earlier) & (distance <= later))[None, None]


def attended_keys(
    mask: Bool[Array, "#batch #heads _ _"], key_heads: int
) -> Bool[Array, "#batch #key_heads _ 1"]:
    """Return which keys some query attends to, by some of the heads that read a head of keys.

    Args:
        mask: True = attend, broadcastable to [batch, heads, queries, keys].
        key_heads: Number of heads of keys; it divides the number of heads of queries.
    """
    if mask.shape[1] > key_heads:
        mask = join_queries(mask, key_heads)
    return jnp.any(mask, axis=-2)[..., None]


def join_queries(
    x: Shaped[Array, "batch heads queries width"], key_heads: int
) -> Shaped[Array, "batch key_heads _ width"]:
    """Return the rows of all heads of queries that read one head of keys, as rows of that head.

    So grouped queries (Ainslie et al. 2023) are attention of `key_heads` heads, with more queries.
    Each head of keys has as many consecutive heads of queries.
    """
    batch, heads, queries, width = x.shape
    return x.reshape(batch, key_heads, heads // key_heads * queries, width)


def as_boolean_mask(
    mask: Bool[Array, "#batch #heads _ _"] | SegmentMask | None, queries: int, keys: int
) -> Bool[Array, "#batch #heads _ _"] | None:
    """Return a mask as a boolean array, True = attend. A boolean array is returned unchanged."""
    if not isinstance(mask, SegmentMask):
        return mask
    if mask.keys is None:
        visible = jnp.ones((1, 1, 1, keys), bool)
    elif mask.queries is None:
        visible = (mask.keys > 0)[:, None, None, :]
    else:  # a query sees the keys of its own segment; one of padding, segment 0, sees nothing
        same = mask.queries[:, :, None] == mask.keys[:, None, :]
        visible = (same & (mask.queries > 0)[:, :, None])[:, None]
    if mask.window is not None:
        visible = visible & band_mask(queries, keys, mask.window)
    return visible & causal_mask(queries) if mask.causal else visible
