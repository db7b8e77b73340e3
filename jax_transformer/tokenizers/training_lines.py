"""Lines to train a tokenizer on: a bounded sample of a corpus, without overlong lines."""

import re
import unicodedata
from collections.abc import Iterable, Iterator

import grain
import numpy as np
from jaxtyping import Int64

from jax_transformer.errors import InputError


def sampled(count: int, pairs: int, seed: int) -> Int64[np.ndarray, " sampled"]:
    """Return which pairs of a corpus belong to a random sample without repetition.

    The sample is the start of a permutation that is computed index by index: time and memory
    depend on the size of the sample and not on that of the corpus.

    Args:
        count: Most pairs of the sample.
        pairs: Number of pairs of the corpus.
        seed: Decides the sample; from 0 to 2^32 - 1.

    Returns:
        The numbers of the pairs in ascending order [sampled].
    """
    if count < 1:
        raise InputError(f"a sample of {count} pairs is no text to train on; name 1 or more")
    if not 0 <= seed < 2**32:
        raise InputError(f"the seed of the sample is {seed}; it must be from 0 to {2**32 - 1}")
    if pairs <= count:
        return np.arange(pairs, dtype=np.int64)
    permutation = grain.MapDataset.range(pairs).shuffle(seed=seed)
    indices = np.fromiter((permutation[i] for i in range(count)), np.int64, count)
    indices.sort()
    return indices


# Characters of a word. The time that the trainer takes for each character is the same for words of
# 500 to 3,000 characters, 4 times as long for 30,000 and 25 times as long for 300,000.
LONGEST_WORD = 1_000
LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD + 1}}}")


class LinesWithin:
    """Yields the lines that are not too long to train a tokenizer on.

    A line with a word of more than `LONGEST_WORD` characters is too long, too: the time of the
    trainer grows with the square of the length of a word.

    Attributes:
        left_out: Number of lines that were left out so far.
    """

    def __init__(self, lines: Iterable[str], most_characters: int) -> None:
        """Read `lines` as they are asked for."""
        self._lines, self._most = lines, most_characters
        self.left_out = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            if len(line) <= self._most and not _has_long_word(line):
                yield line
            else:
                self.left_out += 1


def _has_long_word(line: str) -> bool:
    """Return whether a line has a long run without spaces, punctuation and symbols."""
    if LONG_RUN.search(line) is None:  # as of nearly all lines
        return False
    length = 0
    for character in line:
        ends = character.isspace() or unicodedata.category(character)[0] in "PS"
        length = 0 if ends else length + 1
        if length > LONGEST_WORD:
            return True
    return False
