"""Both frameworks side by side on the same weights: the error of every block.

Both models are built from one config, so agreement shows that the conversion is right, and not
that the config describes the model from which the weights came.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import from_torch, to_torch
from jax_transformer.convert.layouts.torch_nn import torch_nn_module
from jax_transformer.convert.table import Layout, flatten
from jax_transformer.model.transformer import Transformer
from jax_transformer.porting.layouts import get_layout
from jax_transformer.storage.weights.arrays import as_numpy, as_torch

BOUNDS = {"float32": 1e-5, "float64": 1e-11}
NOTE = (
    "note: this tests the conversion. It does not test whether the config describes your model: "
    "both sides are built from the same config."
)
REMEDY = (
    "note: to test your model, record what your program computes, with the code that "
    "`jax-transformer suggest` prints, and give the file as --against; or call porting.compare."
)
BATCH, SOURCE_LENGTH, TARGET_LENGTH = 3, 13, 11


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of the model and how far the frameworks differ in its output.

    Attributes:
        name: The block's name in `torch_reference`.
        error: max|jax - torch| / max(1, max|torch|) of its output. It includes the errors of
            earlier blocks, because each model runs on its own.
    """

    name: str
    error: float


@dataclasses.dataclass(frozen=True)
class Verification:
    """The blocks in the order in which they run; prints as a table.

    Attributes:
        blocks: The errors.
        bound: The largest error that rounding can cause.
    """

    blocks: tuple[Block, ...]
    bound: float

    @property
    def first_differing(self) -> Block | None:
        """The first block whose error exceeds the bound or is no number."""
        return next((block for block in self.blocks if not block.error <= self.bound), None)

    def __str__(self) -> str:
        width = max(len(block.name) for block in self.blocks)
        lines = [
            f"{block.name:<{width}}  {block.error:.1e}"
            + ("  <-- first to differ" if block is self.first_differing else "")
            for block in self.blocks
        ]
        verdict = "differs" if self.first_differing else "agrees"
        return "\n".join([*lines, NOTE, REMEDY, f"{verdict}: the bound is {self.bound:.0e}"])


@no_type_check  # `check_state_dict` has the messages
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
    state_dict as it is. Inputs are random, of different lengths, and padded. Weights narrower
    than float32 are converted to float32.

    Args:
        state_dict: Tensors of torch, numpy or jax by name, of the whole model.
        layout: The names and shapes in the state_dict.
        strip_prefixes: As for `from_torch`.
        seed: Seed of the inputs.
    """
    layout = get_layout(layout)
    params = from_torch(state_dict, config, layout, strip_prefixes=strip_prefixes)
    widest = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
    params = jax.tree.map(lambda leaf: leaf.astype(widest), params)
    inputs = _random_inputs(config, np.random.default_rng(seed), widest)
    ours, logits = _run_jax(params, config, inputs)
    theirs = _run_torch(params, config, inputs)
    blocks = [
        Block(name if len(outputs) == 1 else f"{name} (call {call + 1})", _error(one, other))
        for name, outputs in theirs.items()
        for call, (one, other) in enumerate(zip(ours[name], outputs, strict=True))
    ]
    if layout.name == "torch_nn" and config.token_embeddings == "none":
        torch_nn = _run_torch_nn(state_dict, strip_prefixes, config, inputs)
        blocks.append(Block("torch.nn.Transformer", _error(logits, torch_nn)))
    return Verification(tuple(blocks), BOUNDS[widest.name])


def _random_inputs(
    config: TransformerConfig, random: np.random.Generator, dtype: np.dtype
) -> tuple[np.ndarray, ...]:
    """Return src, tgt, src_mask and tgt_mask with rows of different lengths."""
    longest = config.max_length if config.has_position_table else SOURCE_LENGTH
    source_length, target_length = min(SOURCE_LENGTH, longest), min(TARGET_LENGTH, longest)
    if config.decoder_attention == "self_over_memory":
        target_length = source_length
    tokens, seen = [], []
    for length, vocab in (
        (source_length, config.src_vocab_size),
        (target_length, config.tgt_vocab_size),
    ):
        if config.token_embeddings == "none":
            tokens.append(random.normal(size=(BATCH, length, config.d_model)).astype(dtype))
        else:
            tokens.append(random.integers(0, vocab, (BATCH, length), np.int32))
        lengths = np.linspace(length, max(1, length // 2), BATCH).astype(int)
        seen.append((np.arange(length) < lengths[:, None])[:, None, None, :])
    return *tokens, seen[0], seen[1] & np.tri(target_length, dtype=bool)


def _run_jax(
    params: Mapping[str, Any], config: TransformerConfig, inputs: tuple[np.ndarray, ...]
) -> tuple[dict[str, list[np.ndarray]], np.ndarray]:
    """Return every module's outputs by its torch name, and the model's output."""
    model = Transformer(config)
    run = jax.jit(
        functools.partial(model.apply, capture_intermediates=True, mutable="intermediates")
    )
    with jax.default_matmul_precision("highest"):
        logits, state = run({"params": params}, *inputs)
    outputs = {
        path.removesuffix("/__call__").replace("layers_", "layers.").replace("/", "."): [
            np.asarray(value) for value in values
        ]
        for path, values in flatten(state["intermediates"]).items()
    }
    return outputs, np.asarray(logits)


def _run_torch(
    params: Mapping[str, Any], config: TransformerConfig, inputs: tuple[np.ndarray, ...]
) -> dict[str, list[np.ndarray]]:
    """Return the outputs of the reference's blocks by name, in the order in which they ran."""
    import torch

    import torch_reference

    state_dict = to_torch(params, config)
    model = torch_reference.Transformer(config).eval()
    model.load_state_dict(state_dict, strict=True, assign=True)
    outputs: dict[str, list[np.ndarray]] = {}
    for name, module in model.named_modules():
        if _is_block(name, module):
            module.register_forward_hook(
                lambda _, __, output, name=name: outputs.setdefault(name, []).append(output.numpy())
            )
    with torch.inference_mode():
        model(*map(as_torch, inputs))
    return outputs


def _is_block(name: str, module: object) -> bool:
    """Return whether the table has a row for this module.

    It has rows for sublayers, the norms of the stacks, embeddings and the output projection.
    """
    from torch import nn

    if isinstance(module, nn.Dropout | nn.Identity):
        return False
    if ".layers." in name:
        return name.count(".") == 3  # encoder.layers.0.self_attention
    return name.endswith((".norm", "_embedding", "output_projection"))


def _run_torch_nn(
    state_dict: Mapping[str, Any],
    strip_prefixes: tuple[str, ...],
    config: TransformerConfig,
    inputs: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Return the hidden states of torch.nn.Transformer, whose masks are True where blocked."""
    import torch

    src, tgt, src_mask, tgt_mask = map(as_torch, inputs)
    named = dict(state_dict)
    for prefix in strip_prefixes:
        named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
    # In training mode without dropout: evaluation may take a path of its own at padding.
    rates = {"dropout": 0.0, "attention_dropout": None, "activation_dropout": None}
    model = torch_nn_module(dataclasses.replace(config, **rates)).to(src.dtype)
    model.load_state_dict({name: as_torch(as_numpy(tensor)) for name, tensor in named.items()})
    padding = ~src_mask[:, 0, 0]
    hidden = ~tgt_mask.repeat_interleave(config.num_heads, 0)[:, 0]
    with torch.no_grad():
        return model(
            src,
            tgt,
            tgt_mask=hidden,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        ).numpy()


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.max(np.abs(ours - theirs)) / max(1.0, np.max(np.abs(theirs))))
