"""Checks of token ids and lengths, made on the host before any work reaches a device.

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
