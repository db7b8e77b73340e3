"""Both frameworks side by side on the same weights: the error of every block.

Both models are built from one config, so agreement shows that the conversion is right, and not
that the config describes the model from which the weights came.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import from_torch, to_torch
from jax_transformer.convert.layouts.torch_nn import torch_nn_module
from jax_transformer.convert.table import Layout
from jax_transformer.porting.compare import DEFAULT_MASKS, BlockError, Comparison, compare
from jax_transformer.porting.layouts import get_layout
from jax_transformer.storage.weights.arrays import as_torch

if TYPE_CHECKING:
    import torch
    from torch import nn

NOTE = (
    "note: this tests the conversion. It does not test whether the config describes your model: "
    "both sides are built from the same config."
)
REMEDY = (
    "note: to test your model, record what your program computes, with the code that "
    "`jax-transformer suggest` prints, and give the file as --against; or call porting.compare."
)
BATCH, SOURCE_LENGTH, TARGET_LENGTH = 3, 13, 11


class Verification(Comparison):
    """The blocks in the order in which they run, the logits last; prints as a table."""

    def __str__(self) -> str:
        verdict = "differs" if self.first_differing else "agrees"
        return "\n".join([*self.table(), NOTE, REMEDY, f"{verdict}: the bound is {self.bound:.0e}"])


def verify(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    layout: str | os.PathLike | Layout = "reference",
    *,
    strip_prefixes: tuple[str, ...] = (),
    seed: int = 0,
) -> Verification:
    """Run the model in jax and in torch on a state_dict and compare every block.

    Both sides are built from `config`: this tests the conversion, not whether the config
    describes the model from which the weights came. The torch side is `torch_reference`; for the
    layout "torch_nn" the last row compares with torch.nn.Transformer itself, loaded with the
    state_dict as it is. Inputs are random; ids are of different lengths, and padded. Weights
    narrower than float32 are converted to float32.

    Args:
        state_dict: Tensors of torch, numpy or jax by name, of the whole model.
    """
    import torch_reference

    layout = get_layout(layout)
    params = from_torch(state_dict, config, layout, strip_prefixes=strip_prefixes)
    widest = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
    params = jax.tree.map(lambda leaf: leaf.astype(widest), params)
    inputs = _random_inputs(config, np.random.default_rng(seed), widest)
    model = torch_reference.Transformer(config)
    model.load_state_dict(to_torch(params, config), strict=True, assign=True)
    result = compare(model, params, config, "reference", *inputs, explain=False)
    blocks = [block._replace(foreign="") for block in result.blocks[:-1]]
    blocks.append(_logits(result, "logits"))
    if layout.name == "torch_nn" and config.token_embeddings == "none":
        module = torch_nn_module(config).to(as_torch(np.empty(0, widest)).dtype)
        module.load_state_dict(to_torch(params, config, layout))
        itself = compare(module, params, config, layout, *inputs, call=_causal, explain=False)
        blocks.append(_logits(itself, "torch.nn.Transformer"))
    return Verification(tuple(blocks), result.bound)


def _logits(comparison: Comparison, name: str) -> BlockError:
    """Return the error of the logits: infinite where they agree under other masks only."""
    default = comparison.masks == DEFAULT_MASKS
    return BlockError(name, "", comparison.blocks[-1].error if default else math.inf)


def _random_inputs(
    config: TransformerConfig, random: np.random.Generator, dtype: np.dtype
) -> list[np.ndarray]:
    """Return ids of both sides in rows of different lengths, or vectors."""
    longest = config.max_length if config.has_position_table else SOURCE_LENGTH
    same = config.decoder_attention == "self_over_memory"
    lengths = (SOURCE_LENGTH, SOURCE_LENGTH if same else TARGET_LENGTH)
    lengths = [min(length, longest) for length in lengths]
    if config.token_embeddings == "none":
        return [random.normal(size=(BATCH, n, config.d_model)).astype(dtype) for n in lengths]
    inputs = []
    for length, size in zip(lengths, (config.src_vocab_size, config.tgt_vocab_size), strict=True):
        ids = random.integers(0, size, (BATCH, length), np.int32)
        ids[ids == config.pad_id] = config.eos_id
        ends = np.linspace(length, max(1, length // 2), BATCH).astype(int)
        inputs.append(np.where(np.arange(length) < ends[:, None], ids, config.pad_id))
    return inputs


def _causal(module: nn.Module, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
    mask = module.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
    return module(src, tgt, tgt_mask=mask)
