"""The softmax of attention, in the forms that suit a machine."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_transformer.kernels.execution import Exponentials


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax(
    scores: Float[Array, "*batch S"],
    attends: Bool[Array, "*#batch 1"] | None = None,
    kept: jnp.dtype | None = None,
) -> Float[Array, "*batch S"]:
    """Return exp(scores) over its sum along the last axis.

    `jax.nn.softmax` with another order of operations in its derivative. The gradient of
    `jax.nn.softmax` is weights * g - weights * sum(weights * g): two products that nearly cancel
    where the elements of g are alike. Here it is weights * (g - sum(weights * g)), as in torch,
    which halves the float32 error of the gradients of queries and keys.

    Args:
        attends: Which rows have weights at all [*batch, 1]; the others are 0. None is all rows.
        kept: The dtype that the exponentials are rounded to, after they are summed; None is that
            of the scores.
    """
    if not scores.shape[-1]:
        return scores
    # XLA for TPU recognises this order of operations, and keeps the exponentials. A division of
    # all of them would be repeated in every product that reads the weights.
    largest = jnp.max(scores, axis=-1, keepdims=True)
    exponentials = jnp.exp(scores - largest)
    factor = 1 / jnp.sum(exponentials, axis=-1, keepdims=True)
    if kept is not None:
        exponentials = exponentials.astype(kept).astype(scores.dtype)
    return exponentials * (factor if attends is None else jnp.where(attends, factor, 0))


@softmax.defjvp
def _softmax_jvp(
    kept: jnp.dtype | None,
    primals: tuple[Float[Array, "*batch S"], Bool[Array, "*#batch 1"] | None],
    tangents: tuple[Float[Array, "*batch S"], Any],
) -> tuple[Float[Array, "*batch S"], Float[Array, "*batch S"]]:
    # With e = exp(s) and w = e / sum(e): log w = s - log sum(e), and d log sum(e) = sum(w ds).
    # So dw = w d log w = w (ds - sum(w ds)), which is p - w sum(p) for p = w ds.
    weights = softmax(*primals, kept)
    product = weights * tangents[0]
    return weights, product - weights * jnp.sum(product, axis=-1, keepdims=True)


def soft_cap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Return numbers below a bound, cap * tanh(x / cap) (Gemma Team 2024); None changes nothing."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def masked_softmax(
    scores: Float[Array, "*batch S"],
    mask: Bool[Array, "*#batch #S"] | None,
    exponentials: Exponentials = "wide",
    by_rows: bool = True,
) -> Float[Array, "*batch S"]:
    """Return the weights of scores, computed in at least float32; those that are hidden are 0.

    A row without a visible key gets its zeros by a factor for the whole row where `by_rows`, and
    else by a selection of each weight, which is faster for the few queries of a decoding step.
    """
    dtype = scores.dtype
    scores = scores.astype(jnp.promote_types(dtype, jnp.float32))
    kept = dtype if exponentials == "as_scores" else None
    if mask is None:
        return softmax(scores, None, kept).astype(dtype)
    # The smallest number and not -inf, whose softmax in a row that sees nothing would be NaN.
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    if not by_rows:
        return jnp.where(mask, softmax(scores), 0).astype(dtype)
    return softmax(scores, jnp.any(mask, axis=-1, keepdims=True), kept).astype(dtype)
