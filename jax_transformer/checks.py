"""Checks of token ids, positions and lengths, made on the host before any work reaches a device.

On a device nothing is refused: XLA clamps, wraps or drops what is out of range.
"""

import numpy as np
from jaxtyping import Integer

from jax_transformer.errors import InputError


def check_ids(name: str, ids: Integer[np.ndarray, "batch length"], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Args:
        name: What the ids are, for the message.
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
