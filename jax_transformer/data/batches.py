"""From pairs of lines to batches of few fixed shapes, one compilation each."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Int32, Integer

from jax_transformer.checks import check_ids
from jax_transformer.data.corpus import ParallelCorpus
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError


class Batch(NamedTuple):
    """Pairs of one bucket, padded to its length; rows that are all padding fill it up.

    Attributes:
        src: Source ids, then the end [batch, length].
        tgt_in: Begin, then target ids [batch, length].
        tgt_out: Target ids, then the end [batch, length].
    """

    src: Int32[np.ndarray, "batch length"]
    tgt_in: Int32[np.ndarray, "batch length"]
    tgt_out: Int32[np.ndarray, "batch length"]


class PlannedBatch(NamedTuple):
    """The shape of a batch and what goes into it.

    Attributes:
        rows: Its batch axis; at least as many as there are members.
        length: Its length axis.
        members: Indices of its pairs [members].
    """

    rows: int
    length: int
    members: Integer[np.ndarray, "members"]


@dataclasses.dataclass(frozen=True)
class EncodedCorpus:
    """A parallel corpus as token ids.

    Attributes:
        sources: Source ids, then the end, of each pair.
        targets: Begin, target ids, end, of each pair.
        vocab_size: Number of ids in the vocabulary of both.
        dropped_overlong: Pairs left out because a side was too long.
        unknown_tokens: Tokens of the pairs kept that are unknown.
    """

    sources: tuple[Int32[np.ndarray, "_"], ...]
    targets: tuple[Int32[np.ndarray, "_"], ...]
    vocab_size: int
    dropped_overlong: int
    unknown_tokens: int

    @property
    def lengths(self) -> Integer[np.ndarray, "pairs"]:
        """Columns that each pair needs: of its longer side, end included."""
        return np.array(
            [
                max(len(source), len(target) - 1)
                for source, target in zip(self.sources, self.targets, strict=True)
            ]
        )

    @property
    def tokens(self) -> int:
        """Tokens that are not padding in one pass: sources and shifted targets, ends included."""
        return sum(map(len, self.sources)) + sum(map(len, self.targets)) - len(self.targets)

    def report(self) -> str:
        """Return one line for the reader: pairs and tokens kept, pairs dropped, the unknown."""
        return (
            f"{len(self.sources):,} pairs of {self.tokens:,} tokens kept, "
            f"{self.dropped_overlong:,} dropped as too long, "
            f"{self.unknown_tokens / self.tokens:.2%} of the tokens unknown"
        )


def encode_corpus(corpus: ParallelCorpus, tokenizer: Tokenizer, max_length: int) -> EncodedCorpus:
    """Encode both sides of every pair; a pair with an overlong side is dropped whole, and counted.

    Args:
        corpus: Pairs of lines.
        tokenizer: The vocabulary of both sides.
        max_length: Most tokens of a side, its end (or begin) included.

    Raises:
        InputError: No pair is left.
    """
    encoded = zip(
        tokenizer.encode_batch(corpus.sources), tokenizer.encode_batch(corpus.targets), strict=True
    )
    kept = [pair for pair in encoded if max(map(len, pair)) < max_length]
    if not kept:
        raise InputError(
            f"max_length={max_length} leaves none of {len(corpus.sources):,} pairs; "
            "raise it or name a corpus with shorter lines"
        )
    return EncodedCorpus(
        sources=tuple(np.array([*ids, tokenizer.eos_id], np.int32) for ids, _ in kept),
        targets=tuple(
            np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], np.int32) for _, ids in kept
        ),
        vocab_size=tokenizer.vocab_size,
        dropped_overlong=len(corpus.sources) - len(kept),
        unknown_tokens=sum(ids.count(tokenizer.unk_id) for pair in kept for ids in pair),
    )


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


def epoch_plan(
    lengths: Integer[np.ndarray, "pairs"],
    *,
    bucket_count: int,
    token_budget: int,
    seed: int,
    epoch: int,
) -> list[PlannedBatch]:
    """Plan an epoch: every pair once, shuffled within its bucket, the batches shuffled too.

    A pure function of its arguments. The number of batches and their at most `bucket_count`
    shapes are the same in every epoch, so a run resumes by slicing the plan.

    Args:
        lengths: Columns that each pair needs; `EncodedCorpus.lengths`.
        bucket_count: Most shapes of a batch.
        token_budget: Most slots (rows times length) of a batch of more than one row.
        seed: With `epoch`, what the order depends on.
        epoch: Which pass over the corpus, from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    plan = _plan(generator.permutation(len(lengths)), lengths, bucket_count, token_budget)
    return [plan[index] for index in generator.permutation(len(plan))]


def padding_share(encoded: EncodedCorpus, plan: list[PlannedBatch]) -> float:
    """Return the share of an epoch's slots, source and target, that hold padding."""
    slots = sum(2 * planned.rows * planned.length for planned in plan)
    return 1 - encoded.tokens / slots


def training_batches(encoded: EncodedCorpus, plan: list[PlannedBatch]) -> Iterator[Batch]:
    """Yield the planned batches in order, made ahead by a thread of their own.

    Raises:
        InputError: An id is outside the vocabulary.
    """

    # A closure: grain writes out what it maps, and of a partial that would be the whole corpus.
    def collate(planned: PlannedBatch) -> Batch:
        sources = [encoded.sources[index] for index in planned.members]
        targets = [encoded.targets[index] for index in planned.members]
        return Batch(
            src=_padded("src", sources, planned, encoded.vocab_size),
            tgt_in=_padded("tgt_in", [ids[:-1] for ids in targets], planned, encoded.vocab_size),
            tgt_out=_padded("tgt_out", [ids[1:] for ids in targets], planned, encoded.vocab_size),
        )

    dataset = grain.MapDataset.source(plan).map(collate)
    # One thread: the work is small, and more of them would only contend for the interpreter.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)))


def _plan(
    order: Integer[np.ndarray, "pairs"],
    lengths: Integer[np.ndarray, "pairs"],
    bucket_count: int,
    token_budget: int,
) -> list[PlannedBatch]:
    """Cut pairs into batches, bucket by bucket, each bucket in the given order.

    The batches of a bucket share its members out evenly: filling each up to the token budget
    would leave the last one mostly padding.
    """
    buckets = bucket_lengths(lengths, bucket_count)
    bucket_of = np.searchsorted(buckets, lengths[order])
    plan = []
    for index, length in enumerate(buckets):
        members = order[bucket_of == index]
        parts = np.array_split(members, math.ceil(len(members) / max(1, token_budget // length)))
        plan += [PlannedBatch(len(parts[0]), length, part) for part in parts]
    return plan


def _padded(
    name: str,
    sequences: Sequence[Sequence[int] | np.ndarray],
    planned: PlannedBatch,
    vocab_size: int,
) -> Int32[np.ndarray, "batch length"]:
    """Return the sequences as rows, padded on the right, checked before the cast to int32."""
    padded = np.full((planned.rows, planned.length), Tokenizer.pad_id, np.int64)
    for row, ids in enumerate(sequences):
        padded[row, : len(ids)] = ids
    check_ids(name, padded, vocab_size)
    return padded.astype(np.int32)
