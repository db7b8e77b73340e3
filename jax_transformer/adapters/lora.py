"""LoRA (Hu et al. 2021): a small tree beside the tree of parameters, and pure functions of it.

    adapter = lora.init(key, config, rank=16, targets=("*/query", "*/value"))
    params = lora.attach(params, adapter)      # for apply, generate, make_train_step
    params = lora.merge(params)                # the same model without an adapter

An adapter is a nested dict: at the path of each product that it changes, `lora_a` [inputs, rank],
`lora_b` [rank, outputs] and `lora_scale` []. The product is then x W + lora_scale (x lora_a) lora_b
(equation 3). A whole parameter at its own path takes the place of the base's (`modules_to_save`
of PEFT): `adapter | {"output_projection": params["output_projection"]}`. A training step of
parameters with an adapter differentiates its leaves alone; the optimizer's state is of their size.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PRNGKeyArray
from msgspec import Meta

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.errors import InputError, shorten
from jax_transformer.model import initialization, tree
from jax_transformer.model.checks import check_adapter, check_key, check_whole_number
from jax_transformer.model.tree import BASE, LORA_LEAVES, Params, Shape, is_of_adapter

Alpha = Annotated[float, Meta(ge=2.0**-64, le=2.0**64)]  # a scale that float32 holds


def shapes(config: TransformerConfig, rank: int, targets: Sequence[str]) -> dict[str, Shape]:
    """Return the shape of every leaf of an adapter by its path.

    Args:
        config: The shape of the model.
        rank: Columns of `lora_a`.
        targets: Patterns of `fnmatch` for the paths of products with a kernel, for example
            "encoder/*/query" or "*/feed_forward/*"; "*" matches "/" too.

    Raises:
        InputError: A pattern matches no product, there is none, or the rank exceeds a side of a
            kernel.
    """
    check_whole_number("lora_rank", rank, least=1)
    if isinstance(targets, str):
        raise InputError(
            f"lora_targets={targets!r} must be a list of patterns: write [{targets!r}]"
        )
    if not targets:
        raise InputError("lora_targets is empty; name products, for example '*/query'")
    kernels = {
        path.removesuffix("/kernel"): shape
        for path, shape in tree.parameter_shapes(config).items()
        if path.endswith("/kernel")
    }
    matched, found = tree.match_paths("lora_targets", kernels, targets), {}
    for path in (path for path in kernels if path in matched):
        inputs, outputs = kernels[path]
        if rank > min(inputs, outputs):
            raise InputError(
                f"lora_rank={rank} must be at most {min(inputs, outputs)}: the kernel of {path} is "
                f"{inputs} x {outputs}"
            )
        leaves = ((inputs, rank), (rank, outputs), ())
        found |= {f"{path}/{leaf}": shape for leaf, shape in zip(LORA_LEAVES, leaves, strict=True)}
    return found


def init(
    key: PRNGKeyArray,
    config: TransformerConfig,
    rank: int,
    targets: Sequence[str],
    alpha: float | None = None,
) -> Params:
    """Return a new float32 adapter, with which the model is what it was.

    `lora_a` is drawn as PEFT draws it, uniform in (-1, 1) / sqrt(inputs), and `lora_b` is 0.

    Args:
        key: Random key; a leaf depends on the key, its path and its shape alone.
        config: The shape of the model.
        rank: As of `shapes`.
        targets: As of `shapes`.
        alpha: The scale is alpha / rank; None is a scale of 1. PEFT's `use_rslora` (Kalajdzievski
            2023) is alpha times the root of the rank.

    Raises:
        InputError: As `shapes`, `key` is not a random key, or `alpha` not a usual number.
    """
    check_key("key", key)
    checked("alpha", alpha, Alpha | None)
    leaves: dict[str, Any] = {}
    for path, shape in shapes(config, rank, targets).items():
        kind, scale = "constant", 0.0
        if path.endswith("/lora_a"):
            kind, scale = "uniform", shape[0] ** -0.5
        elif path.endswith("/lora_scale"):
            scale = 1.0 if alpha is None else alpha / rank
        own_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        leaves[path] = initialization.draw(own_key, kind, scale, shape)
    return unflatten_dict(leaves, sep="/")


def attach(params: Params, adapter: Params) -> Params:
    """Return `params` with `adapter`, in the dtype of the base, in the place of any other adapter.

    The scales are in at least float32. The other leaves are shared: several adapters of one model
    need its memory once. What a whole parameter replaces stays beside it, as `base_` and its name.

    Raises:
        InputError: The adapter is no tree, is not complete or does not fit.
    """
    if not isinstance(adapter, Mapping):
        raise InputError(f"adapter={shorten(adapter)} must be a nested dict, as lora.init returns")
    leaves, added = flatten_dict(params, sep="/"), flatten_dict(adapter, sep="/")
    base = {path: leaf for path, leaf in leaves.items() if not is_of_adapter(path)}
    base |= {path.replace(BASE, "/"): leaf for path, leaf in leaves.items() if BASE in path}
    check_adapter(jax.tree.map(np.shape, added), jax.tree.map(np.shape, base))
    new = base.copy()
    for path, leaf in added.items():
        module, _, name = path.rpartition("/")
        dtype = base[path if path in base else f"{module}/kernel"].dtype
        if path in base:
            new[f"{module}{BASE}{name}"] = base[path]
        new[path] = leaf.astype(dtype if leaf.ndim else jnp.promote_types(dtype, jnp.float32))
    return unflatten_dict(new, sep="/")


def detach(params: Params) -> Params:
    """Return the adapter in `params`, the small tree alone; {} where there is none."""
    leaves = flatten_dict(params, sep="/")
    paths = [path.replace(BASE, "/") for path in leaves if is_of_adapter(path)]
    return unflatten_dict({path: leaves[path] for path in paths}, sep="/")


def merge(params: Params) -> Params:
    """Return `params` with their adapter added to the kernels, W + lora_scale lora_a lora_b.

    The sum is computed in at least float32 and rounded to the dtype of the kernel.

    Raises:
        InputError: The adapter is not complete or does not fit.
    """
    leaves = flatten_dict(attach(params, detach(params)), sep="/")  # which checks the adapter
    whole = {path: leaf for path, leaf in leaves.items() if not is_of_adapter(path)}
    for module in (path.removesuffix("/lora_a") for path in leaves if path.endswith("/lora_a")):
        kernel = whole[f"{module}/kernel"]
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        first, second, scale = (leaves[f"{module}/{leaf}"].astype(wide) for leaf in LORA_LEAVES)
        whole[f"{module}/kernel"] = (kernel + (first @ second) * scale).astype(kernel.dtype)
    return unflatten_dict(whole, sep="/")
