"""Copies of parameters that a search makes before its loop, so that each step is faster.

Kernels cut into panels make the products of few rows up to twice as fast on a CPU. XLA passes a
product to Eigen, which first copies the kernel, part by part, into an order that suits the
processor. With few rows, as in a decoding step, the copy takes longer than the product. Panels of
few columns, cut once before the loop, need no copy. What else is copied, and for which platform, is
in `SearchExecution`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.execution import SearchExecution

Params = Mapping[str, Any]

ALIGNMENT = 8  # columns that the matrix units of a GPU multiply by
MOST_ROWS = 16  # measured: with 32 rows, joining the columns costs as much as the panels save
MOST_BYTES = 2**28  # of a parameter that is copied: the table of 65,536 tokens of width 1024


@struct.dataclass
class Panels:
    """A kernel [inputs, outputs], cut into panels of few columns for products of few rows.

    Attributes:
        columns: The panels; zeros fill up the last one.
        opaque_one: The number 1, in a form that XLA does not know.
        outputs: Number of columns of the kernel.
    """

    columns: Float[Array, "panels inputs width"]
    opaque_one: Float[Array, ""]
    outputs: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, kernel: Float[Array, "inputs outputs"], width: int) -> "Panels":
        """Return a kernel in panels of a width."""
        inputs, outputs = kernel.shape
        padded = jnp.pad(kernel, ((0, 0), (0, -outputs % width)))
        columns = padded.reshape(inputs, -1, width).swapaxes(0, 1)
        return cls(columns, jnp.ones((), kernel.dtype), outputs)

    def product(self, x: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
        """Return `x @ kernel`."""
        # XLA would fuse the computation of x into the broadcast and repeat it for each panel. It
        # does not repeat a division, which it takes to be expensive.
        count, _, width = self.columns.shape
        copies = jnp.broadcast_to(x / self.opaque_one, (count, *x.shape))
        y = jnp.einsum("pri,pio->pro", copies, self.columns).swapaxes(0, 1)
        return y.reshape(x.shape[0], count * width)[:, : self.outputs]  # rows may be symbolic


def arrange_for_steps(
    params: Params, config: TransformerConfig, execution: SearchExecution, num_rows: int
) -> Params:
    """Return the parameters as the steps of a search read them, with copies that are faster.

    Args:
        num_rows: Number of rows of a step: all hypotheses of all sources. There are no panels
            where it is symbolic.
    """
    arranged = params
    if execution.copied_kernels == "aligned" and config.tgt_vocab_size % ALIGNMENT:
        arranged = _align_output_kernel(params, config)
    if execution.copied_kernels == "panels":
        arranged = _add_output_kernel(arranged, config)
        # A layer of self_over_memory multiplies all rows of the memory, and not only the step's.
        over_memory = config.decoder_attention == "self_over_memory"
        if not (is_symbolic_dim(num_rows) or num_rows > MOST_ROWS or over_memory):
            arranged = _cut_kernels(arranged, 32 if num_rows == 1 else 64)
    if execution.wide_norms:
        arranged = _widen_norms(arranged)
    return arranged


def hold_in_step(params: Params, tokens: Int32[Array, "B N"]) -> Params:
    """Return the parameters as values of one step of a loop: they depend on its tokens.

    Else XLA would make a float32 copy of half-precision parameters before the loop; so only what a
    step reads of them is converted, in the step. `Panels` are float32, and stay as they are: behind
    a barrier, XLA would compute the rows again for each panel.
    """

    def is_panels(leaf: Any) -> bool:
        return isinstance(leaf, Panels)

    def hold(leaf: Any) -> Any:
        return leaf if is_panels(leaf) else jax.lax.optimization_barrier((leaf, tokens))[0]

    return jax.tree.map(hold, params, is_leaf=is_panels)


def _add_output_kernel(params: Params, config: TransformerConfig) -> Params:
    """Return the parameters with an own kernel of an output projection that shares a table.

    XLA would read the table column by column. A table that is too large for a copy is read so.
    """
    if config.output_projection != "tied" or not _is_worth_a_copy(_target_table(params, config)):
        return params
    kernel = jax.lax.optimization_barrier(_target_table(params, config).T)
    return _with_output_kernel(params, kernel)


def _align_output_kernel(params: Params, config: TransformerConfig) -> Params:
    """Return the parameters with the kernel of the output projection as a single aligned panel."""
    if config.output_projection == "none":
        return params
    tied = config.output_projection == "tied"
    given = _target_table(params, config).T if tied else params["output_projection"]["kernel"]
    width = given.shape[1] + -given.shape[1] % ALIGNMENT
    return _with_output_kernel(params, Panels.of(given, width))


def _target_table(params: Params, config: TransformerConfig) -> Float[Array, "outputs inputs"]:
    shared = config.token_embeddings == "shared"
    return params["token_embedding" if shared else "target_embedding"]["embedding"]


def _with_output_kernel(params: Params, kernel: Float[Array, "_ _"] | Panels) -> Params:
    return params | {"output_projection": params.get("output_projection", {}) | {"kernel": kernel}}


def _cut_kernels(params: Params, width: int) -> Params:
    """Return the parameters with the kernels that a step multiplies by as `Panels`."""

    def cut(
        path: tuple[jax.tree_util.DictKey, ...], leaf: Float[Array, "..."]
    ) -> Float[Array, "..."] | Panels:
        names = [entry.key for entry in path]
        steps = names[0] in ("decoder", "output_projection") and names[-1] == "kernel"
        # The cache has the keys and values of the memory.
        of_memory = names[-3:-1] in (["cross_attention", "key"], ["cross_attention", "value"])
        cuts = steps and not of_memory and _is_worth_a_copy(leaf)
        return Panels.of(leaf, width) if cuts else leaf

    return jax.tree_util.tree_map_with_path(cut, params)


def _is_worth_a_copy(parameter: Float[Array, "..."]) -> bool:
    """Return whether a search may keep a rearranged copy of a parameter to be faster.

    XLA multiplies by panels of half precision in float32, and would make a float32 copy of them.
    """
    return parameter.nbytes <= MOST_BYTES and parameter.dtype.itemsize >= 4


def _widen_norms(params: Params) -> Params:
    """Return the parameters with those of norms in at least float32, in which norms compute."""

    def widen(path: tuple[jax.tree_util.DictKey, ...], leaf: Float[Array, "..."]) -> Array:
        of_a_norm = len(path) > 1 and path[-2].key.endswith("norm")
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if of_a_norm else leaf

    return jax.tree_util.tree_map_with_path(widen, params)
