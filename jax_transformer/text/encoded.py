"""Pairs as token ids: what every corpus offers, and a corpus in memory."""

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int64, Integer

from jax_transformer.errors import InputError
from jax_transformer.text.corpus import ParallelCorpus
from jax_transformer.text.plan import PairNumbers
from jax_transformer.tokenizers import Tokenizer


class Tokens(NamedTuple):
    """The ids of some pairs, one after the other: a source, then its target.

    Attributes:
        ids: Source ids with EOS, then BOS, target ids and EOS, of each pair [tokens].
        source_lengths: Ids of each source [pairs].
        target_lengths: Ids of each target, BOS and EOS included [pairs].
    """

    ids: Integer[np.ndarray, "tokens"]
    source_lengths: Int64[np.ndarray, "pairs"]
    target_lengths: Int64[np.ndarray, "pairs"]


@runtime_checkable
class EncodedPairs(PairNumbers, Protocol):
    """A parallel corpus as token ids, in memory or on disk.

    Attributes:
        src_vocab_size: Number of ids in the vocabulary of the sources.
        tgt_vocab_size: Number of ids in the vocabulary of the targets.
        pad_id: Id of padding.
    """

    src_vocab_size: int
    tgt_vocab_size: int
    pad_id: int

    @property
    def tokens(self) -> int:
        """Tokens of one epoch without padding: sources and shifted targets, EOS included."""

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """Return the ids of some pairs."""


def shuffled_numbers(count: int, seed: int, places: Iterable[int]) -> Int64[np.ndarray, "places"]:
    """Return what is at some places of 0 to count - 1, shuffled epoch after epoch without end.

    Each epoch has an order of its own, which is computed number by number: it takes no memory.

    Args:
        count: How many numbers an epoch has, at most 2**32.
        seed: Decides the orders.
        places: Places from 0; place count is the first one of the second epoch.
    """
    # As grain does, the number of the epoch is added to the seed; neighbouring seeds must not share
    # orders.
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    shuffle, last, rounds = grain.experimental.index_shuffle, count - 1, 4
    numbers = [
        shuffle(place % count, last, (spread + place // count) % 2**32, rounds) for place in places
    ]
    return np.array(numbers, np.int64)


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """A parallel corpus as token ids.

    Attributes:
        sources: Ids of each source as the encoder reads them.
        targets: BOS and the ids of each target, EOS included.
        src_vocab_size: Number of ids in the vocabulary of the sources.
        tgt_vocab_size: Number of ids in the vocabulary of the targets.
        dropped_overlong: Number of pairs that were dropped because a side was too long.
        unknown_tokens: Number of unknown tokens in the pairs that were kept.
        pad_id: Id of padding.
    """

    sources: tuple[Integer[np.ndarray, "_"], ...]
    targets: tuple[Integer[np.ndarray, "_"], ...]
    src_vocab_size: int
    tgt_vocab_size: int
    dropped_overlong: int
    unknown_tokens: int
    pad_id: int = 0

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.sources)

    @cached_property
    def _side_lengths(self) -> Int64[np.ndarray, "pairs 2"]:
        pairs = zip(self.sources, self.targets, strict=True)
        return np.array([(len(source), len(target) - 1) for source, target in pairs], np.int64)

    @property
    def length_counts(self) -> Int64[np.ndarray, "lengths"]:
        """Number of pairs by the columns of their longer side, EOS included [longest + 1]."""
        return np.bincount(self._side_lengths.max(axis=1))

    @property
    def tokens(self) -> int:
        """Tokens of one epoch without padding: sources and shifted targets, EOS included."""
        return int(self._side_lengths.sum())

    def order(self, seed: int, places: range) -> Int64[np.ndarray, "places"]:
        """Return the pairs at some places of all epochs, shuffled by a seed."""
        return shuffled_numbers(len(self), seed, places)

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """Return the columns that source and target of each pair need, EOS included."""
        return self._side_lengths[pairs]

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """Return the ids of some pairs."""
        sides = [side[pair] for pair in pairs for side in (self.sources, self.targets)]
        lengths = np.array([len(side) for side in sides], np.int64).reshape(-1, 2)
        ids = np.concatenate(sides) if sides else np.array([], np.int64)
        return Tokens(ids, *lengths.T)

    def report(self) -> str:
        """Return one line: pairs and tokens kept, pairs dropped, share of unknown tokens."""
        return (
            f"{len(self.sources):,} pairs of {self.tokens:,} tokens kept, "
            f"{self.dropped_overlong:,} dropped as too long, "
            f"{self.unknown_tokens / self.tokens:.2%} of the tokens unknown"
        )


def encode_corpus(corpus: ParallelCorpus, tokenizer: Tokenizer, max_length: int) -> EncodedCorpus:
    """Encode both sides of every pair; drop and count the pairs with a side that is too long.

    Args:
        corpus: Pairs of lines.
        tokenizer: The tokenizer of both sides.
        max_length: Most tokens of a side, EOS (or BOS) included.

    Raises:
        InputError: Every pair was dropped.
    """
    encoded = zip(
        tokenizer.encode_source(corpus.sources),
        tokenizer.encode_target(corpus.targets),
        strict=True,
    )
    kept = [pair for pair in encoded if max(map(len, pair)) <= max_length]
    if not kept:
        raise InputError(
            f"max_length={max_length} leaves none of {len(corpus.sources):,} pairs; "
            "raise it or name a corpus with shorter lines"
        )
    return EncodedCorpus(
        sources=tuple(np.array(ids, np.int32) for ids, _ in kept),
        targets=tuple(np.array([tokenizer.bos_id, *ids], np.int32) for _, ids in kept),
        src_vocab_size=tokenizer.src_vocab_size,
        tgt_vocab_size=tokenizer.tgt_vocab_size,
        dropped_overlong=len(corpus.sources) - len(kept),
        unknown_tokens=sum(ids.count(tokenizer.unk_id) for pair in kept for ids in pair),
        pad_id=tokenizer.pad_id,
    )
