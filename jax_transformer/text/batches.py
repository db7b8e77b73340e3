"""Batches of a few fixed shapes; each shape needs one compilation."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Int32, Int64, Integer

from jax_transformer.model.checks import check_ids
from jax_transformer.text.batch import Batch
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.plan import BatchSettings, EpochLayout, PlannedBatch, plan_window

READ_AHEAD = 16  # batches that a thread has ready


class NumberedBatch(NamedTuple):
    """A batch of an epoch and its place there."""

    window: int  # number of its window in the epoch, from 0
    number: int  # its number in the window, from 0
    planned: PlannedBatch
    batch: Batch  # the whole, or the rows of it that were asked for


def epoch_batches(
    corpus: Corpus,
    settings: BatchSettings,
    layout: EpochLayout,
    epoch: int,
    first: tuple[int, int] = (0, 0),
    rows_to_read: Callable[[PlannedBatch], PlannedBatch] = lambda planned: planned,
) -> Iterator[NumberedBatch]:
    """Yield the batches of an epoch from one of them on; threads plan and read them in advance.

    Args:
        settings: A `TrainingConfig`.
        layout: What `epoch_layout` returned for corpus and settings.
        epoch: Number of the pass over the corpus, from 0.
        first: Window and number in the window of the first batch; earlier windows are not read.
        rows_to_read: Given a planned batch, returns the part of it that is read.
    """

    def plan(window: int) -> list[tuple]:
        planned = plan_window(corpus, settings, layout, epoch, window)
        begin = first[1] if window == first[0] else 0
        return [(window, number, planned[number]) for number in range(begin, len(planned))]

    def read(place: tuple[int, int, PlannedBatch]) -> NumberedBatch:
        return NumberedBatch(*place, make_batch(corpus, rows_to_read(place[2])))

    windows = grain.MapDataset.range(first[0], layout.windows).map(plan)
    planned = windows.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    batches = grain.experimental.FlatMapIterDataset(planned, _EachOf()).map(read)
    return iter(
        grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=READ_AHEAD)
    )


class _EachOf(grain.experimental.FlatMapTransform):
    """Takes a list apart."""

    max_fan_out = 2**31

    def flat_map(self, element: list[tuple]) -> list[tuple]:
        """Return the elements of a list."""
        return element


def training_batches(corpus: Corpus, plan: list[PlannedBatch]) -> Iterator[Batch]:
    """Yield the planned batches in order; a background thread builds them in advance."""

    # A closure and no partial: grain prints the repr of what it maps, and the repr of a partial
    # contains the whole corpus.
    def collate(planned: PlannedBatch) -> Batch:
        return make_batch(corpus, planned)

    dataset = grain.MapDataset.source(plan).map(collate)
    # One thread: the work is small, and more threads would only wait for the interpreter lock.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    return iter(dataset.to_iter_dataset(options))


def padding_share(corpus: Corpus, plan: list[PlannedBatch]) -> float:
    """Return the share of padding in all source and target columns of a plan, from 0 to 1."""
    slots = sum(2 * planned.rows * planned.length for planned in plan)
    tokens = sum(int(corpus.side_lengths(planned.members).sum()) for planned in plan)
    return 1 - tokens / slots


def make_batch(corpus: Corpus, planned: PlannedBatch) -> Batch:
    """Build one planned batch."""
    ids, source_lengths, target_lengths = corpus.read(planned.members)
    ends = np.cumsum(source_lengths + target_lengths)
    targets = ends - target_lengths
    sources = targets - source_lengths
    lay = partial(_lay_out, ids, planned, corpus.pad_id)
    sides = {
        "src": lay(sources, source_lengths),
        "tgt_in": lay(targets, target_lengths - 1),
        "tgt_out": lay(targets + 1, target_lengths - 1),
    }
    for name, side in sides.items():
        size = corpus.src_vocab_size if name == "src" else corpus.tgt_vocab_size
        check_ids(name, side, size)  # before the cast, which would wrap around
    arrays = {name: side.astype(np.int32) for name, side in sides.items()}
    if planned.member_rows is not None:
        arrays["src_segments"] = _segments(source_lengths, planned)
        arrays["tgt_segments"] = _segments(target_lengths - 1, planned)
    return Batch(**arrays)


def _lay_out(
    ids: Integer[np.ndarray, "tokens"],
    planned: PlannedBatch,
    padding: int,
    starts: Int64[np.ndarray, "members"],
    lengths: Int64[np.ndarray, "members"],
) -> Integer[np.ndarray, "rows length"]:
    """Return parts of `ids` in the rows of their members, side by side, padded at the right."""
    dtype = np.promote_types(ids.dtype, np.min_scalar_type(padding))
    laid_out = np.full((planned.rows, planned.length), padding, dtype)
    begins = lengths.cumsum() - lengths  # among all tokens of the batch
    if planned.member_rows is None:
        rows, columns = np.arange(len(lengths)), np.zeros(len(lengths), np.int64)
    else:
        rows = planned.member_rows
        columns = begins - begins[np.searchsorted(rows, rows)]  # a row begins with its first member
    place = np.arange(lengths.sum())
    cells = np.repeat(rows * planned.length + columns - begins, lengths) + place
    laid_out.ravel()[cells] = ids[np.repeat(starts - begins, lengths) + place]
    return laid_out


def _segments(
    lengths: Int64[np.ndarray, "members"], planned: PlannedBatch
) -> Int32[np.ndarray, "rows length"]:
    """Return, for each token, the number of its member in the row, from 1; 0 is padding."""
    rows = planned.member_rows
    numbers = 1 + np.arange(len(rows), dtype=np.int32) - np.searchsorted(rows, rows)
    starts = lengths.cumsum() - lengths
    return _lay_out(np.repeat(numbers, lengths), planned, 0, starts, lengths).astype(np.int32)
