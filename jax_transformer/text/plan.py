"""The plan of an epoch: which pairs share a batch, and the shape of each batch.

The pairs are shuffled by number over the whole corpus and cut into windows. The batches of a window
depend on the window alone: a resumed run plans only the window that it is in.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, Integer

from jax_transformer.errors import InputError
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.denoising import Objective
from jax_transformer.text.pieces import Piece, fill_rows

WINDOW_PAIRS = 2**16  # fewest pairs of a window, if the corpus has more
WINDOW_BATCHES = 300  # fewest batches of a window: the last one of each shape is partly padding
WINDOW_TOKENS = 2**21  # fewest tokens of a window of a corpus with texts
# What decides how long the rows of source and target are: so many texts and pairs, or tokens.
MEASURED_TEXTS, MEASURED_TOKENS = 2**12, 2**16


@runtime_checkable
class BatchSettings(Protocol):
    """The settings that decide the plan of an epoch; see `TrainingConfig`."""

    batching: str
    max_tokens: int
    bucket_count: int
    pack_length: int
    seed: int


class PlannedBatch(NamedTuple):
    """The shape of a batch and its pairs."""

    rows: int
    length: int  # of a row, in tokens
    members: Integer[np.ndarray, "members"]  # numbers of the pairs
    # The row of each member of a packed batch, ascending; else None: member i is in row i.
    member_rows: Integer[np.ndarray, "members"] | None = None
    target_length: int | None = None  # of a row's target; None: `length`
    pieces: tuple[Piece, ...] = ()  # the members of a packed batch


class EpochLayout(NamedTuple):
    """What all epochs of a corpus share."""

    windows: int  # number of windows
    window_pairs: int  # of each window; the last one may have fewer
    shapes: tuple[tuple[int, int], ...]  # rows and length of each kind of batch, by length
    target_length: int | None = None  # where sources and targets have rows of other lengths


def epoch_layout(corpus: Corpus, settings: BatchSettings) -> EpochLayout:
    """Return the windows of every epoch and the shapes of its batches.

    The batches of a bucket have equally many members if the corpus is one window: filled up to
    `max_tokens`, the last one would be mostly padding.
    """
    counts, pairs = corpus.length_counts, len(corpus)
    mean = np.average(np.arange(len(counts)), weights=counts)
    fewest = math.ceil(WINDOW_TOKENS / mean) if corpus.has_texts else WINDOW_PAIRS
    wanted = max(fewest, math.ceil(WINDOW_BATCHES * settings.max_tokens / mean))
    windows = math.ceil(pairs / wanted)
    window_pairs = math.ceil(pairs / windows)
    if settings.batching == "packed":
        longest = corpus.longest_side
        if longest > settings.pack_length:
            raise InputError(
                f"pack_length={settings.pack_length} is shorter than the longest sentence, which "
                f"has {longest} tokens; raise it or lower max_length"
            )
        rows = max(1, settings.max_tokens // settings.pack_length)
        length, target_length = settings.pack_length, None
        if corpus.has_texts:
            length, target_length = row_lengths(corpus, settings)
        return EpochLayout(windows, window_pairs, ((rows, length),), target_length)
    shapes, shorter = [], 0
    for length in bucket_lengths(counts, settings.bucket_count):
        share = round(counts[shorter : length + 1].sum() / counts.sum() * pairs / windows)
        longer = max(length, corpus.source_length)
        batches = max(1, math.ceil(share / max(1, settings.max_tokens // longer)))
        shapes.append((max(1, math.ceil(share / batches)), length))
        shorter = length + 1
    return EpochLayout(windows, window_pairs, tuple(shapes))


def plan_window(
    corpus: Corpus, settings: BatchSettings, layout: EpochLayout, epoch: int, window: int
) -> list[PlannedBatch]:
    """Plan the batches of a window of an epoch, both numbered from 0; a pure function."""
    begin = window * layout.window_pairs
    end = min(begin + layout.window_pairs, len(corpus))
    first = epoch * len(corpus)
    places = range(first + begin, first + end)
    generator = np.random.default_rng([settings.seed, epoch, window])
    if settings.batching == "packed":
        ((rows, length),) = layout.shapes
        drawn = _whole(corpus, settings.seed, places)
        filled = fill_rows(drawn, (length, layout.target_length or length))
        if corpus.has_texts:  # the pieces of a text follow each other; they go to other batches
            filled = [filled[index] for index in generator.permutation(len(filled))]
        parts = (filled[start : start + rows] for start in range(0, len(filled), rows))
        return [_packed(part, rows, length, layout.target_length) for part in parts]
    numbers, _ = corpus.draw(settings.seed, places)
    sides = corpus.side_lengths(numbers)
    plan = _buckets(numbers, sides.max(axis=1), layout.shapes)
    return [plan[index] for index in generator.permutation(len(plan))]


def plan_epoch(corpus: Corpus, settings: BatchSettings, epoch: int) -> list[PlannedBatch]:
    """Return the batches of all windows of an epoch, for a corpus that is small."""
    layout = epoch_layout(corpus, settings)
    return [
        planned
        for window in range(layout.windows)
        for planned in plan_window(corpus, settings, layout, epoch, window)
    ]


def row_lengths(corpus: Corpus, settings: BatchSettings) -> tuple[int, int]:
    """Return the tokens of the rows of source and target; the longer one has `pack_length`.

    Their proportion is that of the first examples of the run, but any pair fits.
    """
    longest, needed = settings.pack_length, corpus.longest_side
    drawn = list(_whole(corpus, settings.seed, range(min(MEASURED_TEXTS, len(corpus)))))
    tokens = np.cumsum([piece.source for piece, _ in drawn])
    drawn = drawn[: 1 + np.searchsorted(tokens, MEASURED_TOKENS)]
    row = longest, longest
    for _ in range(2):  # where a text is cut, and so its proportion, depends on the row
        pieces = itertools.chain(*fill_rows(drawn, row))
        sums = np.sum([(piece.source, piece.target) for piece in pieces], axis=0)
        row = tuple(max(math.ceil(longest * side / max(sums)), needed) for side in sums)
    return row


def _whole(corpus: Corpus, seed: int, places: range) -> Iterator[tuple[Piece, Objective | None]]:
    """Yield the texts and pairs at some places of all epochs, with what makes their examples."""
    numbers, epochs = corpus.draw(seed, places)
    sides, objectives = corpus.side_lengths(numbers), corpus.objectives(numbers)
    drawn = zip(numbers.tolist(), epochs.tolist(), sides.tolist(), objectives, strict=True)
    for number, epoch, (source, target), objective in drawn:
        end = 0 if objective is None else source
        yield Piece(number, epoch, 0, end, source, target), objective


def _packed(
    filled: list[list[Piece]], rows: int, length: int, target_length: int | None
) -> PlannedBatch:
    """Return a batch of some rows of pieces; those that are missing stay empty."""
    pieces = tuple(itertools.chain(*filled))
    members = np.array([piece.number for piece in pieces], np.int64)
    member_rows = np.repeat(np.arange(len(filled)), list(map(len, filled)))
    return PlannedBatch(rows, length, members, member_rows, target_length, pieces)


def take_rows(planned: PlannedBatch, rows: Integer[np.ndarray, "rows"]) -> PlannedBatch:
    """Return a planned batch of some rows of this one; `rows` are ascending indices [rows]."""
    members, member_rows = planned.members, planned.member_rows
    if member_rows is None:
        return PlannedBatch(len(rows), planned.length, members[rows[rows < len(members)]])
    taken = np.isin(member_rows, rows)
    return planned._replace(
        rows=len(rows),
        members=members[taken],
        member_rows=np.searchsorted(rows, member_rows[taken]),
        pieces=tuple(itertools.compress(planned.pieces, taken)),
    )


def _buckets(
    numbers: Int64[np.ndarray, "pairs"],
    lengths: Int64[np.ndarray, "pairs"],
    shapes: tuple[tuple[int, int], ...],
) -> list[PlannedBatch]:
    """Split the pairs of a window into batches, bucket by bucket, in the given order.

    Pairs that do not fill a batch go into the next longer bucket where that pads fewer columns
    than rows of padding would.
    """
    bucket_of = np.searchsorted([length for _, length in shapes], lengths)
    plan, left = [], np.array([], np.int64)
    for index, (rows, length) in enumerate(shapes):
        members = np.concatenate([left, numbers[bucket_of == index]])
        surplus = len(members) % rows
        left = members[:0]
        if surplus and index + 1 < len(shapes):
            longer = shapes[index + 1][1]
            if surplus * (longer - length) < (rows - surplus) * length:
                members, left = np.split(members, [len(members) - surplus])
        if len(members):
            parts = np.array_split(members, math.ceil(len(members) / rows))
            plan += [PlannedBatch(rows, length, part) for part in parts]
    return plan


def bucket_lengths(counts: Integer[np.ndarray, "lengths"], count: int) -> tuple[int, ...]:
    """Return at most `count` lengths of buckets that minimise the columns of all pairs; ascending.

    Exact, by dynamic programming. `counts` has the number of pairs by their columns [longest + 1].
    """
    values = np.flatnonzero(counts)
    pairs_up_to = np.cumsum(counts[values])
    # columns[j]: fewest columns of all pairs up to length values[j], where the last bucket ends.
    # Here with one bucket; each round of the loop allows one bucket more.
    columns = values * pairs_up_to
    # added[i, j]: columns of the pairs longer than values[i] in a bucket of length values[j].
    added = values * (pairs_up_to - pairs_up_to[:, None])
    added = np.where(added < 0, np.inf, added)
    previous_ends = []
    for _ in range(min(count, len(values)) - 1):
        totals = columns[:, None] + added
        previous_ends.append(np.argmin(totals, axis=0))
        columns = np.min(totals, axis=0)
    ends = [len(values) - 1]
    for previous_end in reversed(previous_ends):
        ends.append(int(previous_end[ends[-1]]))
    return tuple(int(values[end]) for end in sorted(set(ends)))
