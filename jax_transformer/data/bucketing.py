"""Which lengths batches are padded to, so that pairs of about one length share a batch."""

import numpy as np
from jaxtyping import Integer


def bucket_lengths(lengths: Integer[np.ndarray, "pairs"], count: int) -> tuple[int, ...]:
    """Choose at most `count` bucket lengths, so that the pairs take the fewest columns in all.

    Exact, by dynamic programming over the distinct lengths: the best last bucket for each length,
    given the best that end before it.

    Args:
        lengths: Columns that each pair needs; at least one pair.
        count: Most bucket lengths.

    Returns:
        Ascending lengths; the last is the longest of `lengths`.
    """
    values, frequencies = np.unique(lengths, return_counts=True)
    pairs_up_to = np.cumsum(frequencies)
    columns = values * pairs_up_to  # of every pair up to a length, in one bucket of that length
    # added[i, j]: columns of the pairs longer than values[i] in a bucket of length values[j].
    added = values * (pairs_up_to - pairs_up_to[:, None])
    added = np.where(added < 0, np.inf, added)
    previous_ends = []
    for _ in range(count - 1):
        totals = columns[:, None] + added
        previous_ends.append(np.argmin(totals, axis=0))
        columns = np.min(totals, axis=0)
    ends = [len(values) - 1]
    for previous_end in reversed(previous_ends):
        ends.append(int(previous_end[ends[-1]]))
    return tuple(int(values[end]) for end in sorted(set(ends)))
