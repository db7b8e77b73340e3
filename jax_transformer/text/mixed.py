"""Several corpora as one, mixed by weight."""

from collections.abc import Callable, Sequence
from functools import partial

import grain
import numpy as np
from jaxtyping import Int64, Integer

from jax_transformer.errors import InputError
from jax_transformer.text.encoded import EncodedPairs, Tokens, shuffled_numbers

ENDLESS = 2**48  # draws from a corpus


class MixedCorpus:
    """Corpora of one vocabulary; an epoch has as many pairs as all of them together.

    Among the first n pairs of the order there are n times weight / sum of the weights of a corpus,
    rounded. Each corpus has an order of its own, in which every pair occurs once before one occurs
    again, whatever the epoch.

    Attributes:
        src_vocab_size: Number of ids in the vocabulary of the sources.
        tgt_vocab_size: Number of ids in the vocabulary of the targets.
        pad_id: Id of padding.
    """

    def __init__(self, corpora: Sequence[EncodedPairs], weights: Sequence[float]) -> None:
        """Mix corpora.

        Raises:
            InputError: A weight is not above 0, or there is not one for each corpus.
        """
        if len(weights) != len(corpora):
            raise InputError(
                f"weights={list(weights)} must have a number for each of {len(corpora)} sources"
            )
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise InputError(f"weights={list(weights)} must be finite numbers above 0")
        self._corpora, self._weights = tuple(corpora), tuple(weights)
        self._ends = np.cumsum([len(corpus) for corpus in corpora])
        self.src_vocab_size = corpora[0].src_vocab_size
        self.tgt_vocab_size = corpora[0].tgt_vocab_size
        self.pad_id = corpora[0].pad_id

    def __len__(self) -> int:
        """Return the number of pairs of an epoch."""
        return int(self._ends[-1])

    @property
    def length_counts(self) -> Int64[np.ndarray, "lengths"]:
        """Number of pairs of an epoch by the columns of their longer side [longest + 1]."""
        return np.rint(self._expected(lambda corpus: corpus.length_counts)).astype(np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch without padding, as the weights give them; rounded."""
        return round(self._expected(lambda corpus: np.array([corpus.tokens]))[0])

    def order(self, seed: int, places: range) -> Int64[np.ndarray, "places"]:
        """Return the pairs at some places of all epochs, shuffled by a seed."""
        drawn = [
            grain.MapDataset.range(ENDLESS).map(partial(_labelled, corpus))
            for corpus in range(len(self._corpora))
        ]
        mixture = grain.MapDataset.mix(drawn, self._weights)
        owners, draws = np.array([mixture[place] for place in places]).reshape(-1, 2).T
        numbers = np.zeros(len(places), np.int64)
        for number, corpus in enumerate(self._corpora):
            own = owners == number
            begin = self._ends[number] - len(corpus)
            numbers[own] = begin + shuffled_numbers(len(corpus), seed + number, draws[own].tolist())
        return numbers

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """Return the columns that source and target of each pair need, EOS included."""
        found = np.zeros((len(pairs), 2), np.int64)
        for corpus, places, numbers in self._by_corpus(pairs):
            found[places] = corpus.side_lengths(numbers)
        return found

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """Return the ids of some pairs.

        Raises:
            InputError: A corpus is damaged.
        """
        lengths = np.zeros((len(pairs), 2), np.int64)
        parts = []
        for corpus, places, numbers in self._by_corpus(pairs):
            ids, *own = corpus.read(numbers)
            lengths[places] = np.stack(own, axis=1)
            parts.append((places, ids))
        sizes = lengths.sum(axis=1)
        ends = sizes.cumsum()
        ids = np.zeros(int(sizes.sum()), np.result_type(*(ids for _, ids in parts), np.uint8))
        for places, own in parts:
            count = sizes[places]
            begins = ends[places] - count
            ids[np.repeat(begins - (count.cumsum() - count), count) + np.arange(len(own))] = own
        return Tokens(ids, *lengths.T)

    def _by_corpus(
        self, pairs: Integer[np.ndarray, "pairs"]
    ) -> list[tuple[EncodedPairs, np.ndarray, np.ndarray]]:
        """Return each corpus with the places of its pairs, and their numbers in it."""
        owner = np.searchsorted(self._ends, pairs, side="right")
        begins = self._ends - [len(corpus) for corpus in self._corpora]
        found = []
        for number, corpus in enumerate(self._corpora):
            places = np.flatnonzero(owner == number)
            if len(places):
                found.append((corpus, places, pairs[places] - begins[number]))
        return found

    def _expected(self, count: Callable[[EncodedPairs], np.ndarray]) -> np.ndarray:
        """Return counts of an epoch, from those of one pass over each corpus."""
        total = np.zeros(0)
        for corpus, weight in zip(self._corpora, self._weights, strict=True):
            share = weight / sum(self._weights) * len(self) / len(corpus)
            own = count(corpus) * share
            width = max(len(total), len(own))
            total = np.pad(total, (0, width - len(total))) + np.pad(own, (0, width - len(own)))
        return total


def _labelled(corpus: int, draw: int) -> tuple[int, int]:
    return corpus, draw
