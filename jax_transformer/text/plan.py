"""The plan of an epoch: which pairs share a batch, and the shape of each batch.

The pairs are shuffled by number over the whole corpus and cut into windows. The batches of a window
depend on the window alone: a resumed run plans only the window that it is in.
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, Integer

from jax_transformer.errors import InputError
from jax_transformer.text.corpus import Corpus

WINDOW_PAIRS = 2**16  # fewest pairs of a window, if the corpus has more
WINDOW_BATCHES = 300  # fewest batches of a window: the last one of each shape is partly padding
LOOK_AHEAD = 256  # pairs that are considered for the next packed row


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


class EpochLayout(NamedTuple):
    """What all epochs of a corpus share."""

    windows: int  # number of windows
    window_pairs: int  # of each window; the last one may have fewer
    shapes: tuple[tuple[int, int], ...]  # rows and length of each kind of batch, by length


def epoch_layout(corpus: Corpus, settings: BatchSettings) -> EpochLayout:
    """Return the windows of every epoch and the shapes of its batches.

    The batches of a bucket have equally many members if the corpus is one window: filled up to
    `max_tokens`, the last one would be mostly padding.
    """
    counts, pairs = corpus.length_counts, len(corpus)
    mean = np.average(np.arange(len(counts)), weights=counts)
    wanted = max(WINDOW_PAIRS, math.ceil(WINDOW_BATCHES * settings.max_tokens / mean))
    windows = math.ceil(pairs / wanted)
    window_pairs = math.ceil(pairs / windows)
    if settings.batching == "packed":
        longest = len(counts) - 1
        if longest > settings.pack_length:
            raise InputError(
                f"pack_length={settings.pack_length} is shorter than the longest sentence, which "
                f"has {longest} tokens; raise it or lower max_length"
            )
        rows = max(1, settings.max_tokens // settings.pack_length)
        return EpochLayout(windows, window_pairs, ((rows, settings.pack_length),))
    shapes, shorter = [], 0
    for length in bucket_lengths(counts, settings.bucket_count):
        share = round(counts[shorter : length + 1].sum() / counts.sum() * pairs / windows)
        batches = max(1, math.ceil(share / max(1, settings.max_tokens // length)))
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
    numbers = corpus.order(settings.seed, range(first + begin, first + end))
    sides = corpus.side_lengths(numbers)
    if settings.batching == "packed":
        (shape,) = layout.shapes
        return _packed(numbers, sides, *shape)
    plan = _buckets(numbers, sides.max(axis=1), layout.shapes)
    generator = np.random.default_rng([settings.seed, epoch, window])
    return [plan[index] for index in generator.permutation(len(plan))]


def plan_epoch(corpus: Corpus, settings: BatchSettings, epoch: int) -> list[PlannedBatch]:
    """Return the batches of all windows of an epoch, for a corpus that is small."""
    layout = epoch_layout(corpus, settings)
    return [
        planned
        for window in range(layout.windows)
        for planned in plan_window(corpus, settings, layout, epoch, window)
    ]


def take_rows(planned: PlannedBatch, rows: Integer[np.ndarray, "rows"]) -> PlannedBatch:
    """Return a planned batch of some rows of this one; `rows` are ascending indices [rows]."""
    members, member_rows = planned.members, planned.member_rows
    if member_rows is None:
        return PlannedBatch(len(rows), planned.length, members[rows[rows < len(members)]])
    taken = np.isin(member_rows, rows)
    taken_rows = np.searchsorted(rows, member_rows[taken])
    return PlannedBatch(len(rows), planned.length, members[taken], taken_rows)


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


def _packed(
    numbers: Int64[np.ndarray, "pairs"],
    side_lengths: Int64[np.ndarray, "pairs 2"],
    rows: int,
    length: int,
) -> list[PlannedBatch]:
    """Pack the pairs of a window, in the given order; the last rows may be empty."""
    packed, plan = pack_rows(side_lengths, length), []
    for start in range(0, len(packed), rows):
        batch = packed[start : start + rows]
        member_rows = np.repeat(np.arange(len(batch)), list(map(len, batch)))
        plan.append(PlannedBatch(rows, length, numbers[np.concatenate(batch)], member_rows))
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


def pack_rows(
    side_lengths: Integer[np.ndarray, "pairs 2"], row_length: int
) -> list[Integer[np.ndarray, "_"]]:
    """Fill row by row, by first fit among the next `LOOK_AHEAD` pairs; no side may be longer."""
    # Plain integers: for a few hundred pairs, calls of NumPy would take seven times as long.
    sources, targets = side_lengths.T.tolist()
    waiting, seen, rows = [*range(min(LOOK_AHEAD, len(sources)))], LOOK_AHEAD, []
    while waiting:
        free_source = free_target = row_length
        taken = []
        for place, pair in enumerate(waiting):
            if sources[pair] <= free_source and targets[pair] <= free_target:
                free_source -= sources[pair]
                free_target -= targets[pair]
                taken.append(place)
        rows.append(np.array([waiting[place] for place in taken]))
        for place in reversed(taken):
            del waiting[place]
        waiting += range(seen, min(seen + len(taken), len(sources)))
        seen += len(taken)
    return rows
