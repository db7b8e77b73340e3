"""A long sound as windows that overlap, and their one text, as transformers' pipeline has it."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float32


def overlapping_windows(
    blocks: Iterable[Float32[np.ndarray, " samples"]], size: int
) -> Iterator[Float32[np.ndarray, " samples"]]:
    """Yield windows of `size` samples; each begins with the last third of the one before it."""
    step, rest = size - 2 * round(size / 6), np.zeros(0, np.float32)
    for block in blocks:
        rest = np.concatenate([rest, block])
        while len(rest) > size:
            yield rest[:size]
            rest = rest[step:]
    yield rest if len(rest) else np.zeros(1, np.float32)  # silence


def merged(windows: Sequence[Sequence[int]]) -> list[int]:
    """Return one sequence of tokens of windows that overlap.

    The next window is moved along the end of those before it, to where the share of equal tokens is
    largest, two at least. There, each of the two has the half of the overlap that it hears better.
    """
    whole, left = [], np.array(windows[0], np.int64)
    for window in windows[1:]:
        right, best = np.array(window, np.int64), 0.0
        left_middle, right_middle = len(left), 0
        for moved in range(1, len(left) + len(right)):
            first, second = max(0, len(left) - moved), max(0, moved - len(left))
            length = min(len(left) - first, len(right) - second)
            equal = int(np.sum(left[first : first + length] == right[second : second + length]))
            share = equal / moved + moved / 10_000  # of two equal shares the longer overlap
            if equal > 1 and share > best:
                best = share
                left_middle, right_middle = first + length // 2, second + length // 2
        whole += left[:left_middle].tolist()
        left = right[right_middle:]
    return whole + left.tolist()
