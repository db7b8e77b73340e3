"""The norms of the last axis as a pure function, in two forms that differ by rounding only.

D is d_model in shapes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_transformer.config.transformer_config import NormKind
from jax_transformer.kernels.execution import NormForm


def norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    epsilon: float,
    kind: NormKind,
    form: NormForm = "shifted",
) -> Float[Array, "*batch D"]:
    """Return the normed rows, times `scale`, plus `bias`.

    Sums are of centred values, in at least float32: E[x²] - E[x]² would cancel.

    Args:
        kind: "layer_norm" is (x - mean) / sqrt(variance + epsilon), of the biased variance (Ba et
            al. 2016), "unbiased_layer_norm" the same of the unbiased one. "std_norm" is
            (x - mean) / (deviation + epsilon), of the unbiased deviation, as many implementations
            from scratch, "biased_std_norm" of the biased one; a constant row has deviation 0, where
            the square root has no gradient: 0 is taken, as torch.std does. "rms_norm" is
            x / sqrt(mean(x²) + epsilon) (Zhang and Sennrich 2019), and "zero_centered_rms_norm"
            the same, times 1 + scale.
        form: As `Execution.norm`.
    """
    if kind == "zero_centered_rms_norm":
        scale, kind = 1 + scale, "rms_norm"
    if form == "fused":
        return _fused_norm(x, scale, bias, kind, epsilon)
    wide = _widened(x)
    if kind != "rms_norm":
        # XLA's mean of equal numbers may differ from them by rounding; the mean of zeros is
        # exactly 0. A shift does not change the result, so its gradient is 0.
        wide = wide - jax.lax.stop_gradient(wide[..., :1])
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.sum(wide**2, axis=-1, keepdims=True) / _divisor(kind, x.shape[-1])
    return _rescaled(wide * _factor(square, epsilon, kind), scale, bias, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _fused_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    kind: NormKind,
    epsilon: float,
) -> Float[Array, "*batch D"]:
    """Return a norm whose gradient reads `x` once more, and keeps two numbers of each row."""
    return _fused_norm_forward(x, scale, bias, kind, epsilon)[0]


def _fused_norm_forward(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    kind: NormKind,
    epsilon: float,
) -> tuple[Float[Array, "*batch D"], tuple[Array | None, ...]]:
    wide = _widened(x)
    no_mean = kind == "rms_norm"
    mean = jnp.zeros((), wide.dtype) if no_mean else jnp.mean(wide, axis=-1, keepdims=True)
    centred = wide - mean
    square = jnp.sum(centred**2, axis=-1, keepdims=True) / _divisor(kind, x.shape[-1])
    y = _rescaled(centred * _factor(square, epsilon, kind), scale, bias, x.dtype)
    return y, (x, scale, bias, mean, square)


def _fused_norm_backward(
    kind: NormKind,
    epsilon: float,
    kept: tuple[Array | None, ...],
    gradient: Float[Array, "*batch D"],
) -> tuple[Float[Array, "*batch D"], Float[Array, " D"], Float[Array, " D"] | None]:
    # With c = x - mean(x), q = sum(c²) / n, f = factor(q) and y = c f scale + bias, and with
    # g = (gradient to y) scale, the gradient to c f:
    #   to f:  sum(g c), because f multiplies every c of the row;
    #   to q:  f'(q) sum(g c);
    #   to c:  g f + (2 / n) c f'(q) sum(g c), because dq/dc = 2 c / n;
    #   to x:  that minus its mean, because each x enters every c through the mean. The mean of the
    #          second term is 0, since the c of a row add up to 0; that of g f is f mean(g).
    x, scale, bias, mean, square = kept
    factor, differentiate = jax.vjp(partial(_factor, epsilon=epsilon, kind=kind), square)
    (slope,) = differentiate(jnp.ones_like(factor))  # f'(q)
    centred, wide = _widened(x) - mean, _widened(gradient)
    to_normed = wide * scale
    to_square = slope * jnp.sum(to_normed * centred, axis=-1, keepdims=True)
    to_x = to_normed * factor + centred * (2 / _divisor(kind, x.shape[-1]) * to_square)
    if kind != "rms_norm":
        to_x = to_x - factor * jnp.mean(to_normed, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    to_scale = jnp.sum(wide * (centred * factor), axis=rows).astype(scale.dtype)
    to_bias = None if bias is None else jnp.sum(wide, axis=rows).astype(bias.dtype)
    return to_x.astype(x.dtype), to_scale, to_bias


_fused_norm.defvjp(_fused_norm_forward, _fused_norm_backward)


def _divisor(kind: NormKind, width: int) -> int:
    """Return what the sum of the squares of a row is divided by."""
    return width - (kind in ("std_norm", "unbiased_layer_norm"))


def _factor(
    square: Float[Array, "*batch 1"], epsilon: float, kind: NormKind
) -> Float[Array, "*batch 1"]:
    """Return what a row is multiplied by."""
    if kind not in ("std_norm", "biased_std_norm"):
        return 1 / jnp.sqrt(square + epsilon)
    return 1 / (jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0) + epsilon)


def _widened(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `x` in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _rescaled(
    normed: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "*batch D"]:
    y = normed * scale
    return (y if bias is None else y + bias).astype(dtype)
