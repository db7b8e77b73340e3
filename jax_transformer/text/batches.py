"""Batches of a few fixed shapes (each needs one compilation); ragged ids as one array."""

import concurrent.futures
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int32, Int64, Integer

from jax_transformer.errors import InputError, shorten
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.plan import BatchSettings, EpochLayout, PlannedBatch, plan_window

READ_AHEAD = 16  # batches that a thread has ready
Item = TypeVar("Item")


class Batch(NamedTuple):
    """Pairs as rows of one length, padded at the right; a row may be all padding.

    A row contains one pair. In a packed batch it contains several pairs side by side: its segments
    1, 2, ... of source and of target; padding is segment 0.

    Attributes:
        src: Source ids, then EOS [batch, length]; or sound [batch, frames, bands].
        tgt_in: BOS, then target ids [batch, length].
        tgt_out: Target ids, then EOS [batch, length].
        src_segments: Segment of each source token [batch, length]; None if it is not packed.
        tgt_segments: Segment of each target token [batch, length]; None if it is not packed.
    """

    src: Int32[np.ndarray, "batch length"] | Float[np.ndarray, "batch frames bands"]
    tgt_in: Int32[np.ndarray, "batch length"]
    tgt_out: Int32[np.ndarray, "batch length"]
    src_segments: Int32[np.ndarray, "batch length"] | None = None
    tgt_segments: Int32[np.ndarray, "batch length"] | None = None


def pad(
    rows: Sequence[Sequence[int]], pad_id: int, length: int | None = None
) -> Int32[np.ndarray, "batch length"]:
    """Return rows of ids as one array, padded at the right.

        src = jax_transformer.pad([[5, 6, 2], [7, 2]], config.pad_id)

    Args:
        rows: Ids, for example of `tokenizer.encode_source(lines)`; their lengths may differ.
        pad_id: `config.pad_id`.
        length: Length of the array; None is that of the longest row. `jax.jit` compiles each
            length anew, so few lengths are better than many.

    Returns:
        Ids [batch, length].

    Raises:
        InputError: A row is not a sequence of whole numbers of 32 bits, or is longer than `length`.
    """
    try:
        longest = max(map(len, rows), default=0)
        length = longest if length is None else length
        if longest > length:
            raise InputError(f"a row has {longest} ids, more than length={length}; raise length")
        padded = np.full((len(rows), length), operator.index(pad_id), np.int32)
        for ids, row in zip(padded, rows, strict=True):
            ids[: len(row)] = [operator.index(token_id) for token_id in row]
    except (TypeError, OverflowError) as error:
        raise InputError(
            f"rows={shorten(rows)} must be rows of ids, whole numbers of 32 bits, as "
            "encode_source returns them"
        ) from error
    return padded


class NumberedBatch(NamedTuple):
    """A batch of an epoch and its place there."""

    window: int  # number of its window in the epoch, from 0
    number: int  # its number in the window, from 0
    planned: PlannedBatch
    batch: Batch  # the whole, or the rows of it that were asked for
    task_counts: tuple[int, ...] = ()  # examples of each of the corpus's tasks, if it has several


def epoch_batches(
    corpus: Corpus,
    settings: BatchSettings,
    layout: EpochLayout,
    epoch: int,
    first: tuple[int, int] = (0, 0),
    rows_to_read: Callable[[PlannedBatch], PlannedBatch] = lambda planned: planned,
) -> Iterator[NumberedBatch]:
    """Yield the batches of an epoch from `first` (window, number) on; threads read ahead."""

    def plans() -> Iterator[tuple[int, list[PlannedBatch]]]:
        for window in range(first[0], layout.windows):
            yield window, plan_window(corpus, settings, layout, epoch, window)

    def batches() -> Iterator[NumberedBatch]:
        for window, plan in _read_ahead(plans(), 1):
            begin = first[1] if window == first[0] else 0
            for number, planned in enumerate(plan[begin:], begin):
                batch, counts = make_batch(corpus, rows_to_read(planned)), ()
                if len(corpus.tasks) > 1:
                    counts = corpus.task_counts(planned.pieces)
                yield NumberedBatch(window, number, planned, batch, counts)

    return _read_ahead(batches(), READ_AHEAD)


def training_batches(corpus: Corpus, plan: list[PlannedBatch]) -> Iterator[Batch]:
    """Yield the planned batches in order; a thread makes them in advance."""
    return _read_ahead((make_batch(corpus, planned) for planned in plan), READ_AHEAD)


def _read_ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield the items; a thread makes the next `count` in advance."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        coming = deque(thread.submit(next, items, None) for _ in range(count))
        try:
            while (item := coming.popleft().result()) is not None:
                coming.append(thread.submit(next, items, None))
                yield item
        finally:
            thread.shutdown(cancel_futures=True)


def padding_share(corpus: Corpus, plan: list[PlannedBatch]) -> float:
    """Return the share of padding in all source and target columns of a plan, from 0 to 1."""
    slots = sum(
        planned.rows * (planned.length + (planned.target_length or planned.length))
        for planned in plan
    )
    if plan[0].pieces:
        pieces = (piece for planned in plan for piece in planned.pieces)
        return 1 - sum(piece.source + piece.target for piece in pieces) / slots
    pairs = np.concatenate([planned.members for planned in plan])
    return 1 - int(corpus.side_lengths(pairs).sum()) / slots


def make_batch(corpus: Corpus, planned: PlannedBatch) -> Batch:
    """Build one planned batch."""
    if corpus.has_texts:
        ids, source_lengths, target_lengths = corpus.read_pieces(planned.pieces)
    else:
        ids, source_lengths, target_lengths = corpus.read(planned.members)
    target_length = planned.target_length or planned.length
    ends = np.cumsum(source_lengths + target_lengths)
    targets = ends - target_lengths
    sources = targets - source_lengths
    in_rows = functools.partial(_lay_out, ids, planned, corpus.pad_id)
    src = _as_int32("src", in_rows(sources, source_lengths, planned.length), corpus.src_vocab_size)
    if corpus.source_length:  # of a `SoundCorpus`
        src = corpus.features(planned.members, planned.rows)
    tgt_in = in_rows(targets, target_lengths - 1, target_length)
    tgt_out = in_rows(targets + 1, target_lengths - 1, target_length)
    is_packed = planned.member_rows is not None
    return Batch(
        src=src,
        tgt_in=_as_int32("tgt_in", tgt_in, corpus.tgt_vocab_size),
        tgt_out=_as_int32("tgt_out", tgt_out, corpus.tgt_vocab_size),
        src_segments=_segments(source_lengths, planned, planned.length) if is_packed else None,
        tgt_segments=_segments(target_lengths - 1, planned, target_length) if is_packed else None,
    )


def _as_int32(
    name: str, ids: Integer[np.ndarray, "rows length"], vocab_size: int
) -> Int32[np.ndarray, "rows length"]:
    """Return ids as int32, which would wrap those around that are outside the vocabulary."""
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise InputError(
            f"{name} has ids from {ids.min()} to {ids.max()}, but those of the vocabulary go from "
            f"0 to {vocab_size - 1}"
        )
    return ids.astype(np.int32)


def _lay_out(
    ids: Integer[np.ndarray, "tokens"],
    planned: PlannedBatch,
    padding: int,
    starts: Int64[np.ndarray, "members"],
    lengths: Int64[np.ndarray, "members"],
    row_length: int,
) -> Integer[np.ndarray, "rows length"]:
    """Return parts of `ids` in the rows of their members, side by side, padded at the right."""
    dtype = np.promote_types(ids.dtype, np.min_scalar_type(padding))
    laid_out = np.full((planned.rows, row_length), padding, dtype)
    begins = lengths.cumsum() - lengths  # among all tokens of the batch
    if planned.member_rows is None:
        rows, columns = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    else:
        rows = planned.member_rows
        columns = begins - begins[np.searchsorted(rows, rows)]  # a row begins with its first member
    place = np.arange(lengths.sum())
    cells = np.repeat(rows * row_length + columns - begins, lengths) + place
    laid_out.ravel()[cells] = ids[np.repeat(starts - begins, lengths) + place]
    return laid_out


def _segments(
    lengths: Int64[np.ndarray, "members"], planned: PlannedBatch, row_length: int
) -> Int32[np.ndarray, "rows length"]:
    """Return, for each token, the number of its member in the row, from 1; 0 is padding."""
    rows = planned.member_rows
    numbers = 1 + np.arange(len(rows), dtype=np.int32) - np.searchsorted(rows, rows)
    starts = lengths.cumsum() - lengths
    laid_out = _lay_out(np.repeat(numbers, lengths), planned, 0, starts, lengths, row_length)
    return laid_out.astype(np.int32)
