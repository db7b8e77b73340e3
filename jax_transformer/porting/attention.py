"""Attention weights of both models for one row of a record.

Letters in shapes: B batch, S source length, T target length, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.model.transformer import Transformer
from jax_transformer.porting.record import Batch, Record

if TYPE_CHECKING:
    from jax_transformer.porting.compare import Comparison


class Attention(NamedTuple):
    """The attention of one block for one row of a batch; weights are [H, queries, keys].

    Attributes:
        axes: What the keys and the queries are, as ("source", "target").
        theirs: The recorded weights; None where there are none.
        module: Module of the user's program that they are an output of, or "".
    """

    title: str
    name: str
    axes: tuple[str, str]
    ours: np.ndarray
    theirs: np.ndarray | None
    module: str


def chosen_row(record: Record) -> tuple[Batch, int]:
    """Return the longest row without padding, where masks make no difference, and its batch."""
    best = (record.batches[0], 0)
    most = -1
    for batch in record.batches:
        for row in range(len(batch.src)):
            sides = (batch.src, batch.tgt)
            whole = not any(_is_padding(side, record.pad_id)[row].any() for side in sides)
            length = (batch.src.shape[1] + batch.tgt.shape[1]) * whole
            if length > most:
                best, most = (batch, row), length
    return best


def attention_of_both(
    comparison: Comparison,
    params: Mapping[str, Any],
    config: TransformerConfig,
    pad_id: int | None,
    batch: Batch,
    row: int,
) -> list[Attention]:
    """Return the self-attention of the first encoder layer and the cross-attention of the last."""
    source, target = ~_is_padding(batch.src, pad_id)[row], ~_is_padding(batch.tgt, pad_id)[row]
    causal = np.tril(np.ones((len(target), len(target)), bool))
    if "not causal" in comparison.masks:
        causal = np.ones_like(causal)
    inputs = (
        batch.src[row : row + 1],
        batch.tgt[row : row + 1],
        source[None, None, None],
        (target & causal)[None, None],
    )
    variables, inputs = jax.tree.map(jnp.asarray, ({"params": dict(params)}, inputs))
    model = Transformer(config)
    recording = {"capture_intermediates": _drops_attention, "mutable": "intermediates"}
    run = jax.jit(lambda variables, *inputs: model.apply(variables, *inputs, **recording)[1])
    with jax.default_matmul_precision("highest"):
        captured = run(variables, *inputs)
    last = config.num_decoder_layers - 1
    wanted = {
        f"decoder.layers.{last}.cross_attention": ("Last decoder layer to the source", "target"),
        "encoder.layers.0.self_attention": ("First encoder layer to itself", "source"),
    }
    modules = {block.name: block.foreign for block in comparison.blocks}
    maps = []
    for name, (title, queries) in wanted.items():
        stack, _, index, block = name.split(".")
        layer = captured["intermediates"][stack][f"layers_{index}"]
        ours = np.asarray(layer[block]["dropout"]["__call__"][0])[0]
        module, theirs = _recorded(batch, row, ours, modules.get(name, ""))
        maps.append(Attention(title, name, ("source", queries), ours, theirs, module))
    return maps


def _drops_attention(module: nn.Module, method: str) -> bool:
    """Return whether the method's output is the weights of an attention after their dropout."""
    attention = len(module.path) > 1 and module.path[-2].endswith("_attention")
    return attention and module.path[-1] == "dropout" and method == "__call__"


def _recorded(
    batch: Batch, row: int, ours: np.ndarray, module: str
) -> tuple[str, np.ndarray | None]:
    """Return the recorded weights of an attention, and the name of the module they came from.

    They are an output [B, H, queries, keys] whose rows sum to 1: of the module that is known to be
    the attention or lies in it, or else the output that is most like ours.
    """
    found = {}
    for name, block in batch.blocks.items():
        if block.shape == (len(batch.src), *ours.shape):
            weights = block[row].astype(np.float64)
            if (weights >= 0).all() and np.allclose(weights.sum(-1), 1, atol=1e-3):
                found[name] = weights
    inside = [name for name in found if module and f"{name}.".startswith(f"{module}.")]
    candidates = inside or list(found)
    if not candidates:
        return "", None
    nearest = min(candidates, key=lambda name: np.abs(found[name] - ours).max())
    return nearest, found[nearest]


def _is_padding(tokens: np.ndarray, pad_id: int | None) -> np.ndarray:
    """Return which positions are padding [B, L]; of vectors, none."""
    if tokens.ndim == 3 or pad_id is None:
        return np.zeros(tokens.shape[:2], bool)
    return tokens == pad_id
