"""A corpus whose pairs are split into other subwords in each epoch, by BPE-dropout."""

import threading
from collections import OrderedDict

import numpy as np
from jaxtyping import Int64, Integer

from jax_transformer.text.corpus import Corpus, Tokens
from jax_transformer.text.plan import WINDOW_PAIRS
from jax_transformer.tokenizers.bpe_dropout import BPEDropout

MOST_CACHED = 4 * WINDOW_PAIRS  # pairs that are in memory between their plan and their batch

Sides = tuple[Integer[np.ndarray, "_"], Integer[np.ndarray, "_"]]


class ResampledCorpus(Corpus):
    """The pairs of a corpus in one epoch, with merges dropped at random.

    The ids of a pair are a pure function of the seed, the epoch and the number of the pair. A pair
    that would become longer than the longest one of the corpus keeps its ids. All processes encode
    all pairs: a plan needs their lengths. Counts are those without dropout.
    """

    def __init__(self, corpus: Corpus, merges: BPEDropout, seed: int, epoch: int) -> None:
        super().__init__(
            corpus.parts,
            corpus.src_vocab_size,
            corpus.tgt_vocab_size,
            corpus.pad_id,
            corpus.weights,
        )
        self._merges, self._entropy = merges, (seed, epoch)
        self._longest = len(corpus.length_counts) - 1
        self._cache: OrderedDict[int, Sides] = OrderedDict()
        self._lock = threading.Lock()

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """See `Corpus`."""
        sides = self._encoded(pairs)
        return np.array([(len(source), len(target) - 1) for source, target in sides], np.int64)

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """See `Corpus`."""
        sides = self._encoded(pairs)
        lengths = np.array([list(map(len, both)) for both in sides], np.int64).reshape(-1, 2)
        ids = np.concatenate([side for both in sides for side in both] or [np.zeros(0, np.int64)])
        return Tokens(ids, *lengths.T)

    def _encoded(self, pairs: Integer[np.ndarray, "pairs"]) -> list[Sides]:
        """Return the sides of pairs; they are cached until their batch is made."""
        with self._lock:
            missing = [pair for pair in pairs.tolist() if pair not in self._cache]
            tokens = super().read(np.array(missing, np.int64))
            for pair, sides in zip(missing, tokens.sides(), strict=True):
                entropy = (*self._entropy, pair)
                new = tuple(self._merges.encode(ids, (*entropy, i)) for i, ids in enumerate(sides))
                fits = max(len(new[0]), len(new[1]) - 1) <= self._longest
                self._cache[pair] = new if fits else sides
            encoded = [self._cache[pair] for pair in pairs.tolist()]
            while len(self._cache) > MOST_CACHED:
                self._cache.popitem(last=False)
            return encoded
