"""A stack of layers: which of it the backward pass recomputes, and the stack as one loop."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_transformer.kernels.execution import Remat
from jax_transformer.kernels.segments import SegmentMask
from jax_transformer.runtime.sharding import shard_rows


def rematerialized(layer: type[nn.Module], remat: Remat) -> type[nn.Module]:
    """Return the class of layers whose backward pass recomputes what `remat` names."""
    if remat == "none":
        return layer
    keep_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return nn.remat(layer, policy=keep_products if remat == "dots" else None)


def run_layers(
    layers: Sequence[nn.Module], x: Float[Array, "B L D"], *rest: Array | SegmentMask | None
) -> Float[Array, "B L D"]:
    """Return the output of the last layer; each layer reads the output of the one before."""
    for layer in layers:
        x = shard_rows(layer(x, *rest))
    return x


def scan_layers(
    layers: Sequence[nn.Module], x: Float[Array, "B L D"], *rest: Array | SegmentMask | None
) -> Float[Array, "B L D"]:
    """Return the same as `run_layers`, computed by one loop over stacked parameters.

    The loop compiles in the time of one layer. Layers may differ in their parameters only.
    """
    params = [layer.variables["params"] for layer in layers]
    dropping = layers[0].has_rng("dropout")
    keys = [{"dropout": layer.make_rng("dropout")} if dropping else {} for layer in layers]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(params, keys, strict=True))
    any_layer = layers[0].clone(parent=None)

    def run_one(x: Float[Array, "B L D"], own: tuple) -> tuple[Float[Array, "B L D"], None]:
        params, keys = own
        return shard_rows(any_layer.apply({"params": params}, x, *rest, rngs=keys)), None

    return jax.lax.scan(run_one, x, stacked)[0]
