"""The model in JAX on the inputs of a record: what it computes at every place.

A place is where a module of another program can be compared with ours: a sublayer, a norm, a
layer, a stack or an embedding. It has several values, because a foreign module may hold the
residual addition, the norm or the scale of our block, or leave them to its caller.

The names in a layout tell which module of the program is at which place.

Letters in shapes: B batch, S source length, T target length, D d_model, V target vocabulary.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Float

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import FixedBuffer
from jax_transformer.convert.table import Layout, expand
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Source, Target, decode, encode
from jax_transformer.model.tree import STACKS

PROJECTIONS = ("query", "key", "value", "output", "inner", "outer", "gate")
LAST_PROJECTIONS = ("output", "outer")  # their outputs are the outputs of their sublayers
SUBLAYERS = ("self_attention", "cross_attention", "feed_forward")
Values = dict[str, list]  # by side, "source" or "target": values [B, S, D] or [B, T, D]


def run(
    params: Any, config: TransformerConfig, src: np.ndarray, tgt: np.ndarray, masks: tuple
) -> tuple[np.ndarray, dict[str, dict[str, list[np.ndarray]]]]:
    """Return the logits [B, T, V] of ids or vectors, and the values of every place, in order.

    `masks` are those of the encoder, the memory [B, 1, 1, S] and the target [B, 1, T, T].
    """
    with jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, _run(params, config, src, tgt, masks))


@partial(jax.jit, static_argnames="config")
def _run(
    params: Any, config: TransformerConfig, src: Source, tgt: Target, masks: tuple
) -> tuple[Float[Array, "B T V"], OrderedDict[str, Values]]:
    calls: OrderedDict[str, list[tuple[Any, Any]]] = OrderedDict()

    def keep(call: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        output = call(*args, **kwargs)
        if context.method_name == "__call__":
            name = ".".join(context.module.path).replace("layers_", "layers.")
            calls.setdefault(name, []).append((args[0], output))
        return output

    with nn.intercept_methods(keep):
        encoder_mask, memory_mask, target_mask = masks
        memory = encode(params, config, src, encoder_mask)
        logits = decode(params, config, tgt, memory, target_mask, memory_mask)
    return logits, _values(calls, config)


def _values(
    calls: OrderedDict[str, list[tuple[Any, Any]]], config: TransformerConfig
) -> OrderedDict[str, Values]:
    """Return the values of each place, given the inputs and outputs of every module."""
    scale = config.d_model**0.5 if config.embedding_scale == "sqrt_d_model" else 1.0
    whole = {*STACKS, *attention_places(config)}
    values: OrderedDict[str, Values] = OrderedDict()
    for name, pairs in calls.items():
        last = name.rpartition(".")[2]
        side = "source" if name.startswith(("encoder", "source")) else "target"
        outputs = [output for _, output in pairs]
        values.setdefault(name, {})
        if name.count(".") == 3 and last in SUBLAYERS:
            outputs += [output for _, output in calls[f"{name}_residual"]]
            stack = name.partition(".")[0]
            if config.norm_placement_of(stack) == "post":  # the norm's input is the sum
                outputs += [total for total, _ in calls[f"{name}_residual.norm"]]
            values[name] = {side: outputs}
        elif last == "memory_norm":
            values[name] = {"source": outputs}
        elif last.endswith("norm") or name.count(".") == 2 or name in whole:
            values[name] = {side: outputs}
        elif last.endswith("_embedding"):
            sides = ("source", "target") if last == "token_embedding" else (side,)
            for side, output in zip(sides, outputs, strict=True):
                values[name][side] = [output, output / scale]
                if config.has_position_table:  # the sum, and the positions alone
                    entry = "encoder" if side == "source" else "decoder"
                    norm = f"{side}_embedding_norm"
                    ((total, _),) = calls[norm if norm in calls else entry]
                    values[f"{side}_positions"] = {side: [total, total - output]}
    return values


def attention_places(config: TransformerConfig) -> tuple[str, str]:
    """Return where the weights [B, H, queries, keys] of two attentions are values.

    They are the first encoder layer's to itself and the last decoder layer's to the source.
    """
    last = config.num_decoder_layers - 1
    cross = f"decoder.layers.{last}.cross_attention.dropout"
    return "encoder.layers.0.self_attention.dropout", cross


class Tensor(NamedTuple):
    """A foreign tensor: its module, its place, and whether it is of the place's last product."""

    module: str
    place: str
    last: bool


def foreign_modules(
    layout: Layout, config: TransformerConfig, order: Sequence[str], recorded: set[str]
) -> dict[str, list[str]]:
    """Return the recorded foreign modules that can be compared with each place.

    A module belongs to a place if it holds the place's tensors, and none of a place that runs
    later, in `order`: then its output is the place's output. Of several such modules it is the
    innermost that was recorded. A sublayer without a module of its own is compared with its last
    projection. Tied copies of a table give several modules. Position tables that are buffers
    are "source_positions", whichever side has them.
    """
    if layout.scope:
        raise InputError(f"layout {layout.name!r} is of {layout.scope}, not of a whole model")
    tensors = [
        _tensor(pair.foreign, path) for pair in expand(layout, config) for path in pair.paths
    ]
    tensors += [
        Tensor(buffer.foreign.rpartition(".")[0], "source_positions", False)
        for buffer in layout.buffers
        if not isinstance(buffer.value, FixedBuffer)
    ]
    indices = {name: index for index, name in enumerate(order)}
    modules: dict[str, list[str]] = {}
    taken = set()
    # A module that is a whole layer or stack is compared as that, not as its last block.
    for place in sorted(order, key=lambda place: (not _is_layer(place), "." in place)):
        members = [tensor for tensor in tensors if f"{tensor.place}.".startswith(f"{place}.")]
        tables = place.endswith(("_embedding", "_positions"))
        for group in filter(None, [[tensor] for tensor in members] if tables else [members]):
            for module in _candidates(group, tensors, _is_layer(place)):
                inside = _inside(module, tensors)
                later = any(indices.get(tensor.place, 0) > indices[place] for tensor in inside)
                if module in recorded and not later:
                    if module not in taken:
                        modules.setdefault(place, []).append(module)
                        taken.add(module)
                    break
    return modules


def _candidates(group: list[Tensor], tensors: list[Tensor], exactly: bool) -> list[str]:
    """Return modules that may give a place's output, the likeliest first; `exactly`: no more."""
    inner = common_module(tensor.module for tensor in group)
    alone = [module for module in _around(inner) if len(_inside(module, tensors)) == len(group)]
    if exactly:
        return alone
    one_block = len({tensor.place for tensor in group}) == 1
    last = [tensor.module for tensor in group if tensor.last and one_block]
    return list(dict.fromkeys([*alone, *last, *_around(inner)]))


def _is_layer(place: str) -> bool:
    return place.startswith(("encoder.layers.", "decoder.layers.")) and place.count(".") == 2


def _inside(module: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a module holds, in the modules inside it too."""
    return [tensor for tensor in tensors if f"{tensor.module}.".startswith(f"{module}.")]


def _tensor(foreign: str, path: str) -> Tensor:
    """Return the tensor of a foreign name and of the path of a parameter in it."""
    *parts, _ = path.replace("layers_", "layers.").split("/")
    last = parts[-1] in LAST_PROJECTIONS
    if parts[-1] in PROJECTIONS:
        parts.pop()
    return Tensor(foreign.rpartition(".")[0], ".".join(parts), last)


def common_module(modules: Iterable[str]) -> str:
    """Return the innermost module that holds all of these modules."""
    columns = zip(*(module.split(".") for module in modules), strict=False)
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, columns)
    return ".".join(parts[0] for parts in same)


def _around(module: str) -> list[str]:
    """Return a module and those around it, the innermost first."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
