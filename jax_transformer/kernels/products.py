"""A product with a kernel, in the forms that suit a machine.

On a CPU "flattened" makes the gradient 1.4 times faster; on a TPU the transposes of it cost a fifth
of a layer. The forms of a decoding step are part of 493 k cycles becoming 176 k (docs/scaling.md).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_transformer.kernels.execution import Product
from jax_transformer.kernels.panels import Panels

FEWEST_ROWS = 8  # that the matrix unit of a TPU takes at once


def linear(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"] | Panels,
    bias: Float[Array, " outputs"] | None = None,
    product: Product = "flattened",
) -> Float[Array, "*batch outputs"]:
    """Return `x @ kernel + bias`.

    Args:
        product: As `Execution.product`. `Panels` have a product of their own.
    """
    missing, in_panels = 0, isinstance(kernel, Panels)
    if product == "padded" and not any(map(is_symbolic_dim, x.shape)):
        missing = FEWEST_ROWS - math.prod(x.shape[:-1])
    flattened = product in ("flattened", "wide_sums") or missing > 0 or in_panels
    rows = x.reshape(-1, x.shape[-1]) if flattened else x
    if in_panels:
        y = kernel.product(rows)
    elif product == "wide_sums":
        kind = jnp.result_type(rows, kernel)
        wide = jnp.promote_types(kind, jnp.float32)
        y = jnp.matmul(rows, kernel, preferred_element_type=wide).astype(kind)
    elif missing > 0:
        y = (jnp.pad(rows, ((0, missing), (0, 0))) @ kernel)[: len(rows)]
    else:
        y = rows @ kernel
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], y.shape[-1])


def mixed_linear(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"] | Float[Array, "outputs inputs"],
    bias: Float[Array, " outputs"] | None = None,
    by_rows: bool = False,
) -> Float[Array, "*batch outputs"]:
    """Return `x @ kernel + bias` in the dtype of `x`, with gradients in those of the parameters.

    A cast of the parameters before the product would give gradients of half precision, which
    several devices would then add up in half precision.

    Args:
        by_rows: Whether the kernel is a table [outputs, inputs]. XLA for CPU cannot run the
            gradient through a transpose of it.
    """
    y = _mixed_product(by_rows, x, kernel)
    if bias is not None:
        y = (y.astype(bias.dtype) + bias).astype(x.dtype)
    return y


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed_product(
    by_rows: bool, x: Float[Array, "*batch inputs"], kernel: Float[Array, "_ _"]
) -> Float[Array, "*batch outputs"]:
    kernel = kernel.astype(x.dtype)
    return x @ (kernel.T if by_rows else kernel)


def _mixed_product_forward(
    by_rows: bool, x: Float[Array, "*batch inputs"], kernel: Float[Array, "_ _"]
) -> tuple[Float[Array, "*batch outputs"], tuple[Array, Array]]:
    return _mixed_product(by_rows, x, kernel), (x, kernel)


def _mixed_product_backward(
    by_rows: bool, kept: tuple[Array, Array], gradient: Float[Array, "*batch outputs"]
) -> tuple[Float[Array, "*batch inputs"], Float[Array, "_ _"]]:
    x, kernel = kept
    axes = "...i,...o->oi" if by_rows else "...i,...o->io"
    to_kernel = jnp.einsum(axes, x, gradient, preferred_element_type=kernel.dtype)
    kernel = kernel.astype(x.dtype)
    return gradient @ (kernel if by_rows else kernel.T), to_kernel


_mixed_product.defvjp(_mixed_product_forward, _mixed_product_backward)


def linear_by_rows(
    x: Float[Array, "*batch inputs"],
    table: Float[Array, "outputs inputs"],
    bias: Float[Array, " outputs"] | None = None,
) -> Float[Array, "*batch outputs"]:
    """Return `x @ table.T + bias`, adding up in at least float32.

    XLA for CPU copies neither a large table nor its transpose for it, also of half precision.
    """
    kind = jnp.result_type(x, table)
    wide = jnp.promote_types(kind, jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]  # symbolic in a program for any size
    if count == 1 and wide != kind:  # XLA would copy the table for a product with a vector
        rows = jnp.concatenate([rows, rows])
    y = jnp.einsum("vd,rd->vr", table, rows, preferred_element_type=wide).T[:count].astype(kind)
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], len(table))
