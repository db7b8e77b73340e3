"""From pairs of lines to batches of a few fixed shapes; each shape needs one compilation."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int32, Int64, Integer

from jax_transformer.checks import check_ids
from jax_transformer.data.bucketing import bucket_lengths
from jax_transformer.data.corpus import ParallelCorpus
from jax_transformer.data.packing import pack_rows
from jax_transformer.data.tokenizers import Tokenizer
from jax_transformer.errors import InputError


class Batch(NamedTuple):
    """Pairs as rows of one length, padded at the right; a row may be all padding.

    A row contains one pair. In a packed batch it contains several pairs side by side: its segments
    1, 2, ... of source and of target; padding is segment 0.

    Attributes:
        src: Source ids, then EOS [batch, length].
        tgt_in: BOS, then target ids [batch, length].
        tgt_out: Target ids, then EOS [batch, length].
        src_segments: Segment of each source token [batch, length]; None if the batch is not
            packed.
        tgt_segments: Segment of each target token [batch, length]; None if the batch is not
            packed.
    """

    src: Int32[np.ndarray, "batch length"]
    tgt_in: Int32[np.ndarray, "batch length"]
    tgt_out: Int32[np.ndarray, "batch length"]
    src_segments: Int32[np.ndarray, "batch length"] | None = None
    tgt_segments: Int32[np.ndarray, "batch length"] | None = None


class PlannedBatch(NamedTuple):
    """The shape of a batch and its pairs.

    Attributes:
        rows: Length of the batch axis.
        length: Length of the token axis.
        members: Indices of the pairs in the batch [members].
        member_rows: Row of each member in a packed batch, ascending [members]. None if the batch
            is not packed: member i is then in row i.
    """

    rows: int
    length: int
    members: Integer[np.ndarray, "members"]
    member_rows: Integer[np.ndarray, "members"] | None = None


@runtime_checkable
class BatchSettings(Protocol):
    """The settings that decide the plan of an epoch.

    Attributes:
        batching: "buckets" or "packed".
        max_tokens: Most tokens, padding included (rows times length), of a batch of more than one
            row.
        bucket_count: Most batch lengths of "buckets".
        pack_length: The batch length of "packed".
        seed: Seed of the order; the number of the epoch is the other part of the seed.
    """

    batching: str
    max_tokens: int
    bucket_count: int
    pack_length: int
    seed: int


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

    @property
    def side_lengths(self) -> Integer[np.ndarray, "pairs 2"]:
        """Columns that the source and the target of each pair need, EOS included."""
        pairs = zip(self.sources, self.targets, strict=True)
        return np.array([(len(source), len(target) - 1) for source, target in pairs])

    @property
    def lengths(self) -> Integer[np.ndarray, "pairs"]:
        """Columns that each pair needs: those of its longer side, EOS included."""
        return self.side_lengths.max(axis=1)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch without padding: sources and shifted targets, EOS included."""
        return sum(map(len, self.sources)) + sum(map(len, self.targets)) - len(self.targets)

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


def plan_epoch(encoded: EncodedCorpus, settings: BatchSettings, epoch: int) -> list[PlannedBatch]:
    """Plan the batches of an epoch by `settings.batching`: buckets or packed.

    A pure function of its arguments, so a resumed run slices the plan of its epoch. The shapes of
    packed batches are the same in every epoch, but their number may differ.

    Args:
        encoded: The pairs.
        settings: A `TrainingConfig`.
        epoch: Number of the pass over the corpus, from 0.

    Raises:
        InputError: A pair does not fit into a packed row.
    """
    if settings.batching == "packed":
        return packed_plan(
            encoded.side_lengths,
            length=settings.pack_length,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
            epoch=epoch,
        )
    return epoch_plan(
        encoded.lengths,
        bucket_count=settings.bucket_count,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        epoch=epoch,
    )


def epoch_plan(
    lengths: Integer[np.ndarray, "pairs"],
    *,
    bucket_count: int,
    max_tokens: int,
    seed: int,
    epoch: int,
) -> list[PlannedBatch]:
    """Plan an epoch in buckets: every pair once, pairs shuffled in their bucket, then the batches.

    A pure function of its arguments. The number of batches and their shapes, at most
    `bucket_count`, are the same in every epoch.

    Args:
        lengths: Columns that each pair needs [pairs]; `EncodedCorpus.lengths`.
        bucket_count: Most batch shapes.
        max_tokens: Most tokens, padding included (rows times length), of a batch of more than one
            row.
        seed: Seed of the order; `epoch` is the other part of the seed.
        epoch: Number of the pass over the corpus, from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    plan = _plan(generator.permutation(len(lengths)), lengths, bucket_count, max_tokens)
    return [plan[index] for index in generator.permutation(len(plan))]


def packed_plan(
    side_lengths: Integer[np.ndarray, "pairs 2"],
    *,
    length: int,
    max_tokens: int,
    seed: int,
    epoch: int,
) -> list[PlannedBatch]:
    """Plan an epoch of packed batches: every pair once, shuffled, all batches of one shape.

    A pure function of its arguments. The last rows of the last batch may be empty.

    Args:
        side_lengths: Columns that the two sides of each pair need [pairs, 2];
            `EncodedCorpus.side_lengths`.
        length: Columns of a batch.
        max_tokens: Most tokens, padding included (rows times length), of a batch of more than one
            row.
        seed: Seed of the order; `epoch` is the other part of the seed.
        epoch: Number of the pass over the corpus, from 0.

    Raises:
        InputError: A pair is longer than a row.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(side_lengths))
    packed = pack_rows(side_lengths, order, length)
    rows = max(1, max_tokens // length)
    plan = []
    for start in range(0, len(packed), rows):
        batch_rows = packed[start : start + rows]
        member_rows = np.repeat(
            np.arange(len(batch_rows)), [len(members) for members in batch_rows]
        )
        plan.append(PlannedBatch(rows, length, np.concatenate(batch_rows), member_rows))
    return plan


def padding_share(encoded: EncodedCorpus, plan: list[PlannedBatch]) -> float:
    """Return the share of padding in all source and target batches of an epoch, from 0 to 1."""
    slots = sum(2 * planned.rows * planned.length for planned in plan)
    return 1 - encoded.tokens / slots


def training_batches(encoded: EncodedCorpus, plan: list[PlannedBatch]) -> Iterator[Batch]:
    """Yield the planned batches in order; a background thread builds them in advance.

    Raises:
        InputError: An id is outside the vocabulary.
    """

    # A closure and no partial: grain prints the repr of what it maps, and the repr of a partial
    # contains the whole corpus.
    def collate(planned: PlannedBatch) -> Batch:
        return make_batch(encoded, planned)

    dataset = grain.MapDataset.source(plan).map(collate)
    # One thread: the work is small, and more threads would only wait for the interpreter lock.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)))


def take_rows(planned: PlannedBatch, rows: Integer[np.ndarray, "rows"]) -> PlannedBatch:
    """Return a planned batch of some rows of this one; `rows` are ascending indices [rows]."""
    members, member_rows = planned.members, planned.member_rows
    if member_rows is None:
        return PlannedBatch(len(rows), planned.length, members[rows[rows < len(members)]])
    taken = np.isin(member_rows, rows)
    taken_rows = np.searchsorted(rows, member_rows[taken])
    return PlannedBatch(len(rows), planned.length, members[taken], taken_rows)


def make_batch(encoded: EncodedCorpus, planned: PlannedBatch) -> Batch:
    """Build one planned batch.

    Raises:
        InputError: An id is outside the vocabulary.
    """
    sources = [encoded.sources[index] for index in planned.members]
    targets = [encoded.targets[index] for index in planned.members]
    sides = {
        "src": sources,
        "tgt_in": [ids[:-1] for ids in targets],
        "tgt_out": [ids[1:] for ids in targets],
    }
    arrays = {name: _lay_out(side, planned, encoded.pad_id) for name, side in sides.items()}
    for name, ids in arrays.items():
        size = encoded.src_vocab_size if name == "src" else encoded.tgt_vocab_size
        check_ids(name, ids, size)  # before the cast, which would wrap around
    if planned.member_rows is not None:
        arrays["src_segments"] = _segments(sides["src"], planned)
        arrays["tgt_segments"] = _segments(sides["tgt_in"], planned)
    return Batch(**{name: ids.astype(np.int32) for name, ids in arrays.items()})


def _plan(
    order: Integer[np.ndarray, "pairs"],
    lengths: Integer[np.ndarray, "pairs"],
    bucket_count: int,
    max_tokens: int,
) -> list[PlannedBatch]:
    """Split pairs into batches, bucket by bucket; pairs keep the given order in their bucket.

    The batches of a bucket have equally many members: if each were filled up to `max_tokens`, the
    last one would be mostly padding.
    """
    buckets = bucket_lengths(lengths, bucket_count)
    bucket_of = np.searchsorted(buckets, lengths[order])
    plan = []
    for index, length in enumerate(buckets):
        members = order[bucket_of == index]
        parts = np.array_split(members, math.ceil(len(members) / max(1, max_tokens // length)))
        plan += [PlannedBatch(len(parts[0]), length, part) for part in parts]
    return plan


def _lay_out(
    sequences: Sequence[Integer[np.ndarray, "_"]], planned: PlannedBatch, padding: int
) -> Int64[np.ndarray, "rows length"]:
    """Return the sequences in the rows of their members, side by side, padded at the right."""
    laid_out = np.full((planned.rows, planned.length), padding, np.int64)
    member_rows = range(len(sequences)) if planned.member_rows is None else planned.member_rows
    ends = [0] * planned.rows
    for row, sequence in zip(member_rows, sequences, strict=True):
        end = ends[row] + len(sequence)
        laid_out[row, ends[row] : end] = sequence
        ends[row] = end
    return laid_out


def _segments(
    sequences: Sequence[Integer[np.ndarray, "_"]], planned: PlannedBatch
) -> Int64[np.ndarray, "rows length"]:
    """Return, for each token, the number of its member in the row, from 1; 0 is padding."""
    rows = planned.member_rows
    numbers = 1 + np.arange(len(rows)) - np.searchsorted(rows, rows)
    pairs = zip(numbers, sequences, strict=True)
    return _lay_out([np.full(len(ids), number) for number, ids in pairs], planned, padding=0)
