"""Which pairs share a row, so that rows of one length hold little padding."""

import numpy as np
from jaxtyping import Integer

from jax_transformer.errors import InputError

LOOK_AHEAD = 256  # pairs waiting for a row that they fit into


def pack_rows(
    side_lengths: Integer[np.ndarray, "pairs 2"],
    order: Integer[np.ndarray, "pairs"],
    row_length: int,
) -> list[Integer[np.ndarray, "_"]]:
    """Fill rows one after the other, each with the first waiting pairs that still fit.

    Those waiting are the next `LOOK_AHEAD` pairs of the order, so the rows keep it but for that.

    Args:
        side_lengths: Columns that source and target of each pair need.
        order: The pairs' indices, in the order in which they wait.
        row_length: Columns of a row, a side.

    Returns:
        The indices of the pairs of each row, every pair once.

    Raises:
        InputError: A pair is longer than a row.
    """
    longest = side_lengths.max(initial=0)
    if longest > row_length:
        raise InputError(
            f"pack_length={row_length} is shorter than the longest sentence, of {longest} tokens; "
            "raise it or lower max_length"
        )
    rows = []
    waiting, rest = order[:LOOK_AHEAD], order[LOOK_AHEAD:]
    while len(waiting):
        taken = _fill(side_lengths[waiting], row_length)
        rows.append(waiting[taken])
        waiting = np.concatenate([np.delete(waiting, taken), rest[: len(taken)]])
        rest = rest[len(taken) :]
    return rows


def _fill(
    side_lengths: Integer[np.ndarray, "waiting 2"], row_length: int
) -> Integer[np.ndarray, "_"]:
    """Return the places of the first pairs that fit into a row beside those before them."""
    free = np.array([row_length, row_length])
    candidates, taken = np.arange(len(side_lengths)), []
    while len(candidates):
        totals = np.cumsum(side_lengths[candidates], axis=0)
        count = np.count_nonzero((totals <= free).all(axis=1))  # the first ones fit together
        taken.append(candidates[:count])
        free = free - totals[count - 1]
        candidates = candidates[count:]
        candidates = candidates[(side_lengths[candidates] <= free).all(axis=1)]
    return np.concatenate(taken)
