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
    """
    check_fits(int(side_lengths.max(initial=0)), row_length)
    # Plain integers: for a few hundred pairs, calls of NumPy would take seven times as long.
    sources, targets = side_lengths[order].T.tolist()
    waiting, seen, rows = list(range(len(order)))[:LOOK_AHEAD], LOOK_AHEAD, []
    while waiting:
        free_source = free_target = row_length
        taken = []
        for place, pair in enumerate(waiting):
            if sources[pair] <= free_source and targets[pair] <= free_target:
                free_source -= sources[pair]
                free_target -= targets[pair]
                taken.append(place)
        rows.append(order[[waiting[place] for place in taken]])
        for place in reversed(taken):
            del waiting[place]
        waiting += range(seen, min(seen + len(taken), len(order)))
        seen += len(taken)
    return rows


def check_fits(longest: int, row_length: int) -> None:
    """Refuse rows that are shorter than the longest side of a pair, in tokens."""
    if longest > row_length:
        raise InputError(
            f"pack_length={row_length} is shorter than the longest sentence, which has {longest} "
            "tokens; raise it or lower max_length"
        )
