"""Norms of the last axis, as pure functions, in two forms that differ by rounding only.

D is d_model in shapes.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_transformer.kernels.execution import NormForm


def layer_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    epsilon: float,
    form: NormForm = "shifted",
) -> Float[Array, "*batch D"]:
    """Return `(x - mean) / sqrt(variance + epsilon) * scale + bias` (Ba et al. 2016).

    Biased variance of the centred values, in at least float32: E[x²] - E[x]² would cancel.
    `form` as `Execution.norm`.
    """
    return _norm(x, scale, bias, _LAYER_NORM, epsilon, form)


def std_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    epsilon: float,
    form: NormForm = "shifted",
) -> Float[Array, "*batch D"]:
    """Return `(x - mean) / (deviation + epsilon) * scale + bias`, of the unbiased deviation.

    The norm of many from-scratch implementations. A constant row has deviation 0, where the
    square root has no gradient: 0 is taken, as torch.std does. `form` as `Execution.norm`.
    """
    return _norm(x, scale, bias, _STD_NORM, epsilon, form)


def rms_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    epsilon: float,
    form: NormForm = "shifted",
) -> Float[Array, "*batch D"]:
    """Return `x / sqrt(mean(x²) + epsilon) * scale` (Zhang and Sennrich 2019).

    The mean square is that of at least float32. `form` as `Execution.norm`.
    """
    return _norm(x, scale, None, _RMS_NORM, epsilon, form)


class _NormKind(NamedTuple):
    """What sets a norm apart: it divides by sqrt(square + epsilon) or by root + epsilon.

    Attributes:
        centred: Whether the mean is subtracted.
        unbiased: Whether the squares are divided by D - 1, and not by D.
        outside: Whether epsilon is added to the root, and not under it.
    """

    centred: bool
    unbiased: bool
    outside: bool

    def divisor(self, width: int) -> int:
        """Return what the sum of the squares of a row is divided by."""
        return width - self.unbiased

    def factor(self, square: Float[Array, "*batch 1"], epsilon: float) -> Float[Array, "*batch 1"]:
        """Return what a row is multiplied by."""
        if not self.outside:
            return 1 / jnp.sqrt(square + epsilon)
        return 1 / (jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0) + epsilon)


_LAYER_NORM = _NormKind(centred=True, unbiased=False, outside=False)
_STD_NORM = _NormKind(centred=True, unbiased=True, outside=True)
_RMS_NORM = _NormKind(centred=False, unbiased=False, outside=False)


def _norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    kind: _NormKind,
    epsilon: float,
    form: NormForm,
) -> Float[Array, "*batch D"]:
    if form == "fused":
        return _fused_norm(x, scale, bias, kind, epsilon)
    wide = _widened(x)
    if kind.centred:
        # XLA's mean of equal numbers may differ from them by rounding; the mean of zeros is
        # exactly 0. A shift does not change the result, so its gradient is 0.
        wide = wide - jax.lax.stop_gradient(wide[..., :1])
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.sum(wide**2, axis=-1, keepdims=True) / kind.divisor(x.shape[-1])
    return _rescaled(wide * kind.factor(square, epsilon), scale, bias, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _fused_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    kind: _NormKind,
    epsilon: float,
) -> Float[Array, "*batch D"]:
    """Return a norm whose gradient reads `x` once more, and keeps two numbers of each row."""
    return _fused_norm_forward(x, scale, bias, kind, epsilon)[0]


def _fused_norm_forward(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    kind: _NormKind,
    epsilon: float,
) -> tuple[Float[Array, "*batch D"], tuple[Array | None, ...]]:
    wide = _widened(x)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if kind.centred else jnp.zeros((), wide.dtype)
    centred = wide - mean
    square = jnp.sum(centred**2, axis=-1, keepdims=True) / kind.divisor(x.shape[-1])
    y = _rescaled(centred * kind.factor(square, epsilon), scale, bias, x.dtype)
    return y, (x, scale, bias, mean, square)


def _fused_norm_backward(
    kind: _NormKind,
    epsilon: float,
    kept: tuple[Array | None, ...],
    gradient: Float[Array, "*batch D"],
) -> tuple[Float[Array, "*batch D"], Float[Array, " D"], Float[Array, " D"] | None]:
    x, scale, bias, mean, square = kept
    factor, differentiate = jax.vjp(partial(kind.factor, epsilon=epsilon), square)
    (slope,) = differentiate(jnp.ones_like(factor))
    centred, wide = _widened(x) - mean, _widened(gradient)
    scaled = wide * scale
    # The square is the sum of centred² over the divisor: its gradient is 2 * centred / divisor.
    through_square = slope * jnp.sum(scaled * centred, axis=-1, keepdims=True)
    to_x = scaled * factor + centred * (2 / kind.divisor(x.shape[-1]) * through_square)
    if kind.centred:
        to_x = to_x - factor * jnp.mean(scaled, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    to_scale = jnp.sum(wide * (centred * factor), axis=rows).astype(scale.dtype)
    to_bias = None if bias is None else jnp.sum(wide, axis=rows).astype(bias.dtype)
    return to_x.astype(x.dtype), to_scale, to_bias


_fused_norm.defvjp(_fused_norm_forward, _fused_norm_backward)


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
    if bias is not None:
        y = y + bias
    return y.astype(dtype)
