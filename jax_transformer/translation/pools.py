"""Sizes of pools: sources of similar length that one search in slots translates."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from jax_transformer.config import TransformerConfig

SHORTEST_SOURCE = 16  # tokens, padding included
SHORTEST_SLOT = 32  # tokens of the source: a shorter one would save less than a compilation takes
SLOT_GROWTH = 4  # factor from one length of slots to the next


def usual_target_length(source_length: int) -> int:
    """Return the number of tokens that few translations of a source exceed."""
    return 2 * source_length + 10


def slot_length(source_length: int, config: TransformerConfig) -> int:
    """Return the length of the memory in the slot of a source: one of few lengths."""
    length = SHORTEST_SLOT
    while length < source_length:
        length *= SLOT_GROWTH
    return min(length, config.max_length)


def padded_rows(
    rows: Sequence[Sequence[int]], count: int, longest: int, config: TransformerConfig
) -> Integer[np.ndarray, "count length"]:
    """Return ids as so many rows, padded at the right; further rows repeat the first one.

    The length is a power of two, or `longest`.
    """
    length = min(padded_length(max(map(len, rows)), config), longest)
    # 64 bits: the search then refuses an id that 32 bits would wrap around.
    padded = np.full((count, length), config.pad_id, np.int64)
    for row, ids in enumerate([*rows, *[rows[0]] * (count - len(rows))]):
        padded[row, : len(ids)] = ids
    return padded


def padded_length(length: int, config: TransformerConfig) -> int:
    """Return the length of the array of a source: a power of two, or the most of the model."""
    return min(power_of_two(max(SHORTEST_SOURCE, length)), config.max_length)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def round_up(number: int, divisor: int) -> int:
    """Return the smallest multiple of a divisor that is not below a number."""
    return -(-number // divisor) * divisor
