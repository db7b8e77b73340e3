"""Packing: the choice of pairs that share a row, so that rows have little padding."""

import numpy as np
from jaxtyping import Integer

from jax_transformer.errors import InputError

LOOK_AHEAD = 256  # pairs that are considered for the next row


def pack_rows(
    side_lengths: Integer[np.ndarray, "pairs 2"],
    order: Integer[np.ndarray, "pairs"],
    row_length: int,
) -> list[Integer[np.ndarray, "_"]]:
    """Fill one row after the other by first fit among the next `LOOK_AHEAD` pairs of the order.

    Args:
        side_lengths: Columns that the source and the target of each pair need [pairs, 2].
        order: Indices of the pairs, in the order in which they are placed [pairs].
        row_length: Columns of a row, for the source and for the target.

    Returns:
        For each row the indices of its pairs; every pair occurs once.

    Raises:
        InputError: A pair is longer than a row.
    """
    check_fits(int(side_lengths.max(initial=0)), row_length)
    rows = []
    waiting, rest = order[:LOOK_AHEAD], order[LOOK_AHEAD:]
    while len(waiting):
        taken = _fill(side_lengths[waiting], row_length)
        rows.append(waiting[taken])
        waiting = np.concatenate([np.delete(waiting, taken), rest[: len(taken)]])
        rest = rest[len(taken) :]
    return rows


def check_fits(longest: int, row_length: int) -> None:
    """Refuse rows that are shorter than the longest side of a pair, in tokens.

    Raises:
        InputError: They are shorter.
    """
    if longest > row_length:
        raise InputError(
            f"pack_length={row_length} is shorter than the longest sentence, which has {longest} "
            "tokens; raise it or lower max_length"
        )


def _fill(
    side_lengths: Integer[np.ndarray, "waiting 2"], row_length: int
) -> Integer[np.ndarray, "_"]:
    """Return the positions of the waiting pairs that first fit places in one row."""
    free = np.array([row_length, row_length])
    candidates, taken = np.arange(len(side_lengths)), []
    while len(candidates):
        totals = np.cumsum(side_lengths[candidates], axis=0)
        count = np.count_nonzero((totals <= free).all(axis=1))  # as many fit together
        taken.append(candidates[:count])
        free = free - totals[count - 1]
        candidates = candidates[count:]
        candidates = candidates[(side_lengths[candidates] <= free).all(axis=1)]
    return np.concatenate(taken)
