"""Copies of parameters that a search makes before its loop, so that each step is faster.

Kernels cut into panels make the products of few rows up to twice as fast on a CPU. XLA passes a
product to Eigen, which first copies the kernel, part by part, into an order that suits the
processor. With few rows, as in a decoding step, the copy takes longer than the product. Panels of
few columns, cut once before the loop, need no copy. A program of half-precision parameters
multiplies by the kernels themselves, and so does one for another platform, which has no use for
copies (`SearchExecution.copied_kernels`).

Panels and a transposed table are copies of parameters, so the largest parameters have neither.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.execution import SearchExecution

Params = Mapping[str, Any]

MOST_ROWS = 16  # measured: with 32 rows, joining the columns costs as much as the panels save
MOST_BYTES = 2**28  # of a parameter that is copied: the table of 65,536 tokens of width 1024


class Panels(NamedTuple):
    """The kernels of a decoding step, cut into panels.

    Attributes:
        kernels: The panels [panels, inputs, width] of each module, by its path.
    """

    kernels: dict[str, Float[Array, "panels inputs width"]]
    one: Float[Array, ""]


def arrange_for_steps(
    params: Params, config: TransformerConfig, execution: SearchExecution, num_rows: int
) -> tuple[Params, TransformerConfig, Panels | None]:
    """Return the same model, arranged for the steps of a search, and the panels of its kernels."""
    panels = None
    if execution.copied_kernels:
        params, config = _untie(params, config)
        panels = cut_panels(params, config, num_rows)
    if execution.wide_norms:
        params = _widen_norms(params)
    return params, config, panels


def cut_panels(params: Params, config: TransformerConfig, num_rows: int) -> Panels | None:
    """Return the decoder's kernels in panels, or None where panels would not be faster.

    Args:
        num_rows: Number of rows of a step: all hypotheses of all sources. There are no panels
            where it is symbolic.
    """
    # A layer of self_over_memory multiplies all rows of the memory, and not only the step's.
    over_memory = config.decoder_attention == "self_over_memory"
    if is_symbolic_dim(num_rows) or num_rows > MOST_ROWS or over_memory:
        return None
    width = 32 if num_rows == 1 else 64
    kernels = {}
    for path, kernel in jax.tree_util.tree_leaves_with_path(params):
        names = [entry.key for entry in path]
        decodes = names[0] in ("decoder", "output_projection") and names[-1] == "kernel"
        if decodes and worth_a_copy(kernel):
            kernels["/".join(names[:-1])] = _cut(kernel, width)
    if not kernels:
        return None
    # The barrier keeps XLA from cutting the panels again in every step of the loop.
    return Panels(*jax.lax.optimization_barrier((kernels, jnp.ones((), kernel.dtype))))


def worth_a_copy(parameter: Float[Array, "..."]) -> bool:
    """Return whether a search may keep a rearranged copy of a parameter to be faster.

    XLA multiplies by panels of half precision in float32, and would make a float32 copy of them.
    """
    return parameter.nbytes <= MOST_BYTES and parameter.dtype.itemsize >= 4


def use_panels(panels: Panels | None) -> AbstractContextManager[None]:
    """Return a context in which modules that have panels multiply by them."""
    if panels is None:
        return nullcontext()

    def multiply(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        kernel = panels.kernels.get("/".join(context.module.path))
        if kernel is None or context.method_name != "__call__":
            return call(*args, **kwargs)
        x, parameters = args[0], context.module.variables["params"]
        bias = parameters.get("bias")
        y = _product(x.reshape(-1, x.shape[-1]), kernel, panels.one)
        y = y[:, : parameters["kernel"].shape[1]]  # without the padding of the last panel
        y = y if bias is None else y + bias
        return y.reshape(*x.shape[:-1], y.shape[1])

    return nn.intercept_methods(multiply)


def _cut(kernel: Float[Array, "inputs outputs"], width: int) -> Float[Array, "panels inputs width"]:
    inputs, outputs = kernel.shape
    kernel = jnp.pad(kernel, ((0, 0), (0, -outputs % width)))
    return kernel.reshape(inputs, -1, width).swapaxes(0, 1)


def _product(
    x: Float[Array, "rows inputs"],
    panels: Float[Array, "panels inputs width"],
    one: Float[Array, ""],
) -> Float[Array, "rows columns"]:
    # XLA would fuse the computation of x into the broadcast and repeat it for each panel. It does
    # not repeat a division, which it takes to be expensive; it cannot know that the divisor is 1.
    copies = jnp.broadcast_to(x / one, (len(panels), *x.shape))
    columns = panels.shape[0] * panels.shape[2]
    return jnp.einsum("pri,pio->pro", copies, panels).swapaxes(0, 1).reshape(len(x), columns)


def _untie(params: Params, config: TransformerConfig) -> tuple[Params, TransformerConfig]:
    """Return the same model with a separate output kernel, transposed once before the loop.

    A table that is too large for a copy stays tied.
    """
    if config.output_projection != "tied":
        return params, config
    shared = config.token_embeddings == "shared"
    table = params["token_embedding" if shared else "target_embedding"]["embedding"]
    if not worth_a_copy(table):
        return params, config
    kernel = jax.lax.optimization_barrier(table.T)  # else XLA reads the table column by column
    projection = params.get("output_projection", {}) | {"kernel": kernel}
    config = dataclasses.replace(config, output_projection="linear")
    return params | {"output_projection": projection}, config


def _widen_norms(params: Params) -> Params:
    """Return the parameters with those of norms in at least float32, in which norms compute."""

    def widen(path: tuple[jax.tree_util.DictKey, ...], leaf: Float[Array, "..."]) -> Array:
        of_a_norm = len(path) > 1 and path[-2].key.endswith("norm")
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if of_a_norm else leaf

    # The barrier keeps XLA from moving the conversions back into the loop.
    return jax.lax.optimization_barrier(jax.tree_util.tree_map_with_path(widen, params))
