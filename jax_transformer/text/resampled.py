"""A corpus whose pairs are split into other subwords in each epoch, by BPE-dropout."""

import threading
from collections import OrderedDict

import numpy as np
from jaxtyping import Int64, Integer

from jax_transformer.text.encoded import EncodedPairs, Tokens
from jax_transformer.text.plan import WINDOW_PAIRS
from jax_transformer.tokenizers.bpe_dropout import BPEDropout

MOST_KEPT = 4 * WINDOW_PAIRS  # pairs that are kept between their plan and their batch


class ResampledPairs:
    """The pairs of a corpus in one epoch, with merges dropped at random.

    The ids of a pair are a pure function of the seed, the epoch and the number of the pair. A pair
    that would become longer than the longest one of the corpus keeps its ids. All processes encode
    all pairs: a plan needs the lengths of all of them.

    Attributes:
        src_vocab_size: Number of ids in the vocabulary of the sources.
        tgt_vocab_size: Number of ids in the vocabulary of the targets.
        pad_id: Id of padding.
        length_counts: As without dropout.
    """

    def __init__(self, corpus: EncodedPairs, merges: BPEDropout, seed: int, epoch: int) -> None:
        """Resample a corpus for an epoch."""
        self._corpus, self._merges, self._entropy = corpus, merges, (seed, epoch)
        self._kept: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        self.src_vocab_size, self.tgt_vocab_size = corpus.src_vocab_size, corpus.tgt_vocab_size
        self.pad_id = corpus.pad_id
        self.length_counts = corpus.length_counts

    def __len__(self) -> int:
        """Return the number of pairs of an epoch."""
        return len(self._corpus)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch without dropout and without padding."""
        return self._corpus.tokens

    def order(self, seed: int, places: range) -> Int64[np.ndarray, "places"]:
        """Return the pairs at some places of all epochs, shuffled by a seed."""
        return self._corpus.order(seed, places)

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """Return the columns that source and target of each pair need, EOS included."""
        sides = self._encoded(pairs)
        return np.array([(len(source), len(target) - 1) for source, target in sides], np.int64)

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """Return the ids of some pairs.

        Raises:
            InputError: The corpus is damaged.
        """
        sides = self._encoded(pairs)
        lengths = np.array([list(map(len, both)) for both in sides], np.int64).reshape(-1, 2)
        ids = np.concatenate([side for both in sides for side in both] or [np.zeros(0, np.int64)])
        return Tokens(ids, *lengths.T)

    def _encoded(
        self, pairs: Integer[np.ndarray, "pairs"]
    ) -> list[tuple[Integer[np.ndarray, "_"], Integer[np.ndarray, "_"]]]:
        """Return the sides of pairs; they are kept until their batch is made."""
        with self._lock:
            missing = [pair for pair in pairs.tolist() if pair not in self._kept]
            ids, *lengths = self._corpus.read(np.array(missing, np.int64))
            ends = np.stack(lengths, axis=1).ravel().cumsum()
            sides = np.split(ids, ends[:-1]) if missing else []
            for place, pair in enumerate(missing):
                self._kept[pair] = self._resampled(pair, *sides[2 * place : 2 * place + 2])
            found = [self._kept[pair] for pair in pairs.tolist()]
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return found

    def _resampled(
        self, pair: int, source: Integer[np.ndarray, "_"], target: Integer[np.ndarray, "_"]
    ) -> tuple[Integer[np.ndarray, "_"], Integer[np.ndarray, "_"]]:
        entropy = (*self._entropy, pair)
        new = (
            self._merges.encode(source, (*entropy, 0)),
            self._merges.encode(target, (*entropy, 1)),
        )
        fits = max(len(new[0]), len(new[1]) - 1) < len(self.length_counts)
        return new if fits else (source, target)
