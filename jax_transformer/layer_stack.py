"""How the layers of a stack are run: which of it the backward pass keeps, unrolled or as a loop."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_transformer.runtime.sharding import shard_rows

Remat = Literal["none", "layers", "dots"]


@dataclasses.dataclass(frozen=True)
class LayerLoop:
    """How the layers of a stack are run, one after the other; what they compute is the same.

    Attributes:
        remat: What the backward pass computes anew, to save memory: nothing ("none"), all of a
            layer from its input ("layers"), or all but products with kernels ("dots").
        scan: Whether the layers are one loop over stacked parameters, which compiles in the time
            of one layer; dropout then has other masks, as good as those without.
    """

    remat: Remat = "none"
    scan: bool = False

    def rematerialized(self, layer: type[nn.Module]) -> type[nn.Module]:
        """Return the class of layers that keep no more than they are to for the backward pass."""
        if self.remat == "none":
            return layer
        keep_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return nn.remat(layer, policy=keep_products if self.remat == "dots" else None)

    def run(
        self, layers: Sequence[nn.Module], x: Float[Array, "B L D"], *rest: Array | None
    ) -> Float[Array, "B L D"]:
        """Return what the layers make of `x`.

        Args:
            layers: Bound ones, alike but for their parameters.
            x: What enters the first one [B, L, D].
            *rest: What enters each of them beside it.
        """
        if not self.scan:
            for layer in layers:
                x = shard_rows(layer(x, *rest))
            return x
        params = [layer.variables["params"] for layer in layers]
        dropping = layers[0].has_rng("dropout")
        keys = [{"dropout": layer.make_rng("dropout")} if dropping else {} for layer in layers]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(params, keys, strict=True))
        any_layer = layers[0].clone(parent=None)

        def run_one(x: Float[Array, "B L D"], own: tuple) -> tuple[Float[Array, "B L D"], None]:
            params, keys = own
            return shard_rows(any_layer.apply({"params": params}, x, *rest, rngs=keys)), None

        return jax.lax.scan(run_one, x, stacked)[0]


UNROLLED = LayerLoop()
