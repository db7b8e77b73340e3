"""The model in JAX on the inputs of a record: what it computes at every place.

A place is where a module of another program can be compared with ours: a sublayer, a norm, a
layer, a stack or an embedding. It has several values, because a foreign module may hold the
residual addition, the norm or the scale of our block, or leave them to its caller.

Letters in shapes: B batch, S source length, T target length, D d_model, V target vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Float

from jax_transformer.config import TransformerConfig
from jax_transformer.model.transformer import Source, Target, decode, encode

SUBLAYERS = ("self_attention", "cross_attention", "feed_forward")
Values = dict[str, list]  # by side, "source" or "target": values [B, S, D] or [B, T, D]


class Masks(NamedTuple):
    """The masks of a batch, True = attend: [B, 1, 1, S] of the source, [B, 1, T, T] else."""

    encoder: Array | np.ndarray
    memory: Array | np.ndarray
    decoder: Array | np.ndarray


def run(
    params: Any, config: TransformerConfig, src: np.ndarray, tgt: np.ndarray, masks: Masks
) -> tuple[np.ndarray, dict[str, dict[str, list[np.ndarray]]]]:
    """Return the logits [B, T, V] of ids or vectors, and the values of every place, in order."""
    with jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, _run(params, config, src, tgt, masks))


@partial(jax.jit, static_argnames="config")
def _run(
    params: Any, config: TransformerConfig, src: Source, tgt: Target, masks: Masks
) -> tuple[Float[Array, "B T V"], OrderedDict[str, Values]]:
    calls: OrderedDict[str, list[tuple[Any, Any]]] = OrderedDict()

    def keep(call: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        output = call(*args, **kwargs)
        if context.method_name == "__call__":
            name = ".".join(context.module.path).replace("layers_", "layers.")
            calls.setdefault(name, []).append((args[0], output))
        return output

    with nn.intercept_methods(keep):
        memory = encode(params, config, src, masks.encoder)
        logits = decode(params, config, tgt, memory, masks.decoder, masks.memory)
    return logits, _values(calls, config)


def _values(
    calls: OrderedDict[str, list[tuple[Any, Any]]], config: TransformerConfig
) -> OrderedDict[str, Values]:
    """Return the values of each place, given the inputs and outputs of every module."""
    values: OrderedDict[str, Values] = OrderedDict()
    for name, own in calls.items():
        last = name.rpartition(".")[2]
        side = "source" if name.startswith(("encoder", "source")) else "target"
        outputs = [output for _, output in own]
        if name.count(".") == 3 and last in SUBLAYERS:
            outputs += [output for _, output in calls[f"{name}_residual"]]
            if config.norm_placement == "post":  # the norm's input is the sum
                outputs += [total for total, _ in calls[f"{name}_residual.norm"]]
            values[name] = {side: outputs}
        elif last == "memory_norm":
            values[name] = {"source": outputs}
        elif last.endswith("norm") or name.count(".") == 2 or name in ("encoder", "decoder"):
            values[name] = {side: outputs}
        elif last.endswith("_embedding"):
            values[name] = _embedding_values(last, outputs, config)
        else:
            values.setdefault(name, {})
        if last.endswith("_embedding") and config.has_position_table:
            for place, one in _position_values(last, outputs, calls).items():
                values[place] = one
    return values


def _embedding_values(name: str, outputs: list[Array], config: TransformerConfig) -> Values:
    """Return the rows of a token table, scaled and as they are."""
    sides = ("source", "target") if name == "token_embedding" else (name.partition("_")[0],)
    scale = config.d_model**0.5 if config.embedding_scale == "sqrt_d_model" else 1.0
    return {
        side: [output] if scale == 1 else [output, output / scale]
        for side, output in zip(sides, outputs, strict=True)
    }


def _position_values(
    name: str, outputs: list[Array], calls: OrderedDict[str, list[tuple[Any, Any]]]
) -> dict[str, Values]:
    """Return the embeddings with positions, and the positions alone, of each side."""
    places = {}
    sides = ("source", "target") if name == "token_embedding" else (name.partition("_")[0],)
    for side, output in zip(sides, outputs, strict=True):
        norm, stack = f"{side}_embedding_norm", "encoder" if side == "source" else "decoder"
        ((total, _),) = calls[norm if norm in calls else stack]
        places[f"{side}_positions"] = {side: [total, total - output]}
    return places
