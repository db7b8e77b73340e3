"""The choice of the lengths that batches are padded to: pairs of similar lengths share a batch."""

import numpy as np
from jaxtyping import Integer


def bucket_lengths(counts: Integer[np.ndarray, "lengths"], count: int) -> tuple[int, ...]:
    """Choose at most `count` bucket lengths that minimise the total number of columns of all pairs.

    Exact, by dynamic programming over the distinct lengths. The lengths are ascending; the last one
    is the longest of a pair.

    Args:
        counts: Number of pairs by the columns that they need [longest + 1]; at least one pair.
    """
    values = np.flatnonzero(counts)
    pairs_up_to = np.cumsum(counts[values])
    # columns[j]: fewest columns of all pairs up to length values[j], where the last bucket ends.
    # Here with one bucket; each round of the loop allows one bucket more.
    columns = values * pairs_up_to
    # added[i, j]: columns of the pairs longer than values[i] in a bucket of length values[j].
    added = values * (pairs_up_to - pairs_up_to[:, None])
    added = np.where(added < 0, np.inf, added)
    previous_ends = []
    for _ in range(min(count, len(values)) - 1):
        totals = columns[:, None] + added
        previous_ends.append(np.argmin(totals, axis=0))
        columns = np.min(totals, axis=0)
    ends = [len(values) - 1]
    for previous_end in reversed(previous_ends):
        ends.append(int(previous_end[ends[-1]]))
    return tuple(int(values[end]) for end in sorted(set(ends)))
