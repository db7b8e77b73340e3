"""LoRA (Hu et al. 2021): a small tree beside the tree of parameters, and pure functions of it.

    adapter = lora.init(key, config, rank=16, targets=("*/query", "*/value"))
    params = lora.attach(params, adapter)      # for apply, generate, make_train_step
    params = lora.merge(params)                # the same model without an adapter

An adapter is a nested dict: at the path of each product that it changes, `lora_a` [inputs, rank],
`lora_b` [rank, outputs] and `lora_scale` []. The product is then x W + lora_scale (x lora_a) lora_b
(equation 3). A training step of parameters with an adapter differentiates `lora_a` and `lora_b`
alone, so the optimizer's state is of their size.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model import initialization
from jax_transformer.model.checks import check_key, check_whole_number
from jax_transformer.model.tree import LORA_LEAVES, Params, Shape, match_paths, parameter_shapes


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
    if not targets:
        raise InputError("lora_targets is empty; name products, for example '*/query'")
    kernels = {
        path.removesuffix("/kernel"): shape
        for path, shape in parameter_shapes(config).items()
        if path.endswith("/kernel")
    }
    matched, found = match_paths("lora_targets", kernels, targets), {}
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
        InputError: As `shapes`, or `key` is not a random key.
    """
    check_key("key", key)
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
    """Return `params` with `adapter`, in the dtype of the kernels, in the place of any other.

    The other leaves are shared: several adapters of one model need its memory once.

    Raises:
        InputError: The adapter has a product that the model lacks; the functions of the model
            check its shapes.
    """
    leaves = flatten_dict(params)
    base = {path: leaf for path, leaf in leaves.items() if path[-1] not in LORA_LEAVES}
    added = flatten_dict(adapter)
    if absent := [path for path in added if (*path[:-1], "kernel") not in base]:
        raise InputError(f"the adapter has {'/'.join(absent[0])}, and the model no product there")
    kinds = {path: base[(*path[:-1], "kernel")].dtype for path in added}
    return unflatten_dict(base | {path: leaf.astype(kinds[path]) for path, leaf in added.items()})


def detach(params: Params) -> Params:
    """Return the adapter in `params`, the small tree alone; {} where there is none."""
    leaves = flatten_dict(params)
    return unflatten_dict({path: leaf for path, leaf in leaves.items() if path[-1] in LORA_LEAVES})


def merge(params: Params) -> Params:
    """Return `params` with their adapter added to the kernels, W + lora_scale lora_a lora_b.

    The sum is computed in at least float32 and rounded to the dtype of the kernel.
    """
    leaves = flatten_dict(params)
    whole = {path: leaf for path, leaf in leaves.items() if path[-1] not in LORA_LEAVES}
    for path in (path for path in leaves if path[-1] == "lora_a"):
        kernel = whole[(*path[:-1], "kernel")]
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        first, second, scale = (leaves[(*path[:-1], leaf)].astype(wide) for leaf in LORA_LEAVES)
        whole[(*path[:-1], "kernel")] = (kernel + (first @ second) * scale).astype(kernel.dtype)
    return unflatten_dict(whole)
