"""Checks of a call's arguments, made on the host before any work reaches a device.

On a device nothing is refused: XLA clamps, wraps or drops an index that is out of range.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.masks import SegmentMask


def check_ids(name: str, ids: Integer[np.ndarray, "batch length"], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Args:
        name: Name of the argument, for the message.
        ids: Token ids [batch, length] of any integer type, before they are cast to int32.
        vocab_size: Number of ids; the valid ones are 0 to vocab_size - 1.

    Raises:
        InputError: An id is out of range; names row, column, id and vocabulary size.
    """
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    row, column = np.argwhere((ids < 0) | (ids >= vocab_size))[0]
    raise InputError(
        f"{name}[{row}, {column}]={ids[row, column]} is outside the vocabulary; "
        f"ids go from 0 to {vocab_size - 1}"
    )


def check_positions(
    name: str, positions: Integer[np.ndarray, "batch length"], max_length: int
) -> None:
    """Refuse positions outside the position table.

    Raises:
        InputError: A position is out of range; names row, column, position and table size.
    """
    wrong = np.argwhere((positions < 0) | (positions >= max_length))
    if len(wrong):
        row, column = wrong[0]
        raise InputError(
            f"{name}[{row}, {column}]={positions[row, column]} is outside the position table; "
            f"positions go from 0 to {max_length - 1}"
        )


def check_length(name: str, length: int, max_length: int) -> None:
    """Refuse a sequence longer than the position table.

    Raises:
        InputError: `length` exceeds `max_length`; names both.
    """
    if length > max_length:
        raise InputError(
            f"{name} is {length} tokens long, but the position table ends at max_length="
            f"{max_length}; cut the sequence or raise max_length"
        )


def check_tokens(name: str, tokens: Any, config: TransformerConfig) -> None:
    """Refuse token ids that are not a batch, or vectors that are not a batch of the right width.

    Args:
        name: Name of the argument, for the message.
        tokens: Ids [batch, length]; vectors [batch, length, d_model] where
            `config.token_embeddings` is "none".
        config: The shape of the model.

    Raises:
        InputError: The number of axes, the width or the kind of numbers is wrong.
    """
    if config.token_embeddings == "none":
        if tokens.ndim != 3 or tokens.shape[2] != config.d_model:
            raise InputError(
                f"{name} of shape {tokens.shape} must be vectors [batch, length, d_model="
                f"{config.d_model}], because token_embeddings='none'"
            )
        return
    if tokens.ndim != 2:
        remedy = f"; write {name}[None] for one sequence" if tokens.ndim == 1 else ""
        raise InputError(f"{name} of shape {tokens.shape} must be ids [batch, length]{remedy}")


def check_inputs(
    name: str, tokens: Any, vocab_size: int, positions: Any | None, config: TransformerConfig
) -> None:
    """Refuse tokens or positions that the model cannot read; values only where they are concrete.

    Args:
        name: Name of the argument, for the message.
        tokens: As for `check_tokens`.
        vocab_size: Number of ids.
        positions: Position of each token [batch, length]; None is 0 to length - 1.
        config: The shape of the model.

    Raises:
        InputError: As the other checks of tokens, ids, lengths and positions.
    """
    check_tokens(name, tokens, config)
    if config.has_position_table and positions is None:
        check_length(name, tokens.shape[1], config.max_length)
    elif config.has_position_table and not isinstance(positions, jax.core.Tracer):
        check_positions(f"{name}_positions", np.asarray(positions), config.max_length)
    if config.token_embeddings != "none" and not isinstance(tokens, jax.core.Tracer):
        check_ids(name, np.asarray(tokens), vocab_size)


def check_mask(name: str, mask: Any | None, shape: tuple[int, int, int, int]) -> None:
    """Refuse a mask that is not boolean, or that does not broadcast to the attention weights.

    Args:
        name: Name of the argument, for the message.
        mask: The mask, of numpy or jax, or by segments; None is accepted.
        shape: (batch, heads, queries, keys) of the attention weights.

    Raises:
        InputError: The dtype or the shape is wrong; names torch's conventions where they differ.
    """
    if mask is None:
        return
    if isinstance(mask, SegmentMask):
        mask = jax.eval_shape(lambda mask: mask.dense(*shape[2:]), mask)
    if mask.dtype != bool:
        raise InputError(
            f"{name} of dtype {mask.dtype} must be boolean, True = attend; from an additive mask "
            "of torch (0 and -inf) pass mask == 0, from a boolean one (True = blocked) pass ~mask"
        )
    fits = mask.ndim == 4 and all(
        length in (1, full) for length, full in zip(mask.shape, shape, strict=True)
    )
    if not fits:
        remedy = ""
        if mask.shape == (shape[0], shape[3]):
            remedy = f"; write {name}[:, None, None, :] for a mask of [batch, keys]"
        raise InputError(
            f"{name} of shape {mask.shape} must be broadcastable to [batch, heads, queries, keys] "
            f"= {list(shape)}{remedy}"
        )


def check_num_layers(params: Mapping[str, Any], config: TransformerConfig) -> None:
    """Refuse parameters with another number of layers than the config.

    Raises:
        InputError: A stack of the parameters has more or fewer layers; names both numbers.
    """
    for stack in params.keys() & {"encoder", "decoder"}:  # a caller may have one of them only
        found = sum(re.fullmatch(r"layers_\d+", name) is not None for name in params[stack])
        wanted = getattr(config, f"num_{stack}_layers")
        if found != wanted:
            raise InputError(
                f"config.num_{stack}_layers={wanted}, but the parameters hold {found} layers of "
                f"the {stack}; use the config that they were made with"
            )


def first_difference(params: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the first parameter, by path, that is missing or has another shape than expected."""
    shapes = [
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (params, expected)
    ]
    for path, wanted in shapes[1].items():
        if (found := shapes[0].get(path, "missing")) != wanted:
            return f"{path} is {found} and must have shape {wanted}"
    return "every parameter has the expected shape"
