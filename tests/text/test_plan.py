"""Plans of many windows: every pair once, the shapes of the layout, any place to go on from."""

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from jax_transformer.text import plan as planning
from jax_transformer.text.batches import epoch_batches, padding_share
from jax_transformer.text.corpus import INDEX_TYPE, FileArray
from jax_transformer.text.plan import epoch_layout, plan_epoch, plan_window, take_rows
from jax_transformer.text.prepare import open_folder
from jax_transformer.training.config import TrainingConfig
from tests.text.texts import corpus as prepared
from tests.text.texts import corpus_of, lines, random_corpus, sides, write
from tests.tiers import tiered, tiered_rows

BUCKETS = TrainingConfig(max_tokens=256, bucket_count=3)
PACKED = dataclasses.replace(BUCKETS, batching="packed", pack_length=64)


def captions(pairs, seed=0):
    """Return a corpus whose lengths are about those of Multi30k: 14 tokens, few above 30."""
    random = np.random.default_rng(seed)
    source_lengths = 4 + random.gamma(5, 2.2, size=pairs).round().astype(int).clip(0, 46)
    target_lengths = (source_lengths + random.normal(0, 2.5, pairs).round()).clip(4, 50).astype(int)
    source_lengths[0] = target_lengths[0] = 50
    return random_corpus(random, source_lengths, target_lengths)


@pytest.fixture(scope="module")
def corpus():
    return captions(500)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(planning, "WINDOW_PAIRS", 70)
    monkeypatch.setattr(planning, "WINDOW_BATCHES", 0)


def described(plan):
    rows = [None if one.member_rows is None else one.member_rows.tolist() for one in plan]
    return [(*one[:2], one.members.tolist(), own) for one, own in zip(plan, rows, strict=True)]


@pytest.mark.parametrize("settings", [BUCKETS, PACKED])
def test_windows_hold_every_pair_once_in_the_shapes_of_the_layout(corpus, settings, small_windows):
    layout = epoch_layout(corpus, settings)
    assert layout.windows == 8
    assert layout.window_pairs == 63
    epochs = [plan_epoch(corpus, settings, epoch) for epoch in range(3)]
    for plan in epochs:
        members = np.concatenate([planned.members for planned in plan])
        assert sorted(members.tolist()) == list(range(500))
        assert {planned[:2] for planned in plan} <= set(layout.shapes)
        for planned in plan:
            columns = corpus.side_lengths(planned.members)
            assert columns.max() <= planned.length
            if planned.member_rows is None:
                assert len(planned.members) <= planned.rows
            else:
                rows = [np.bincount(planned.member_rows, side) for side in columns.T]
                assert max(map(max, rows)) <= planned.length
    assert described(epochs[0]) == described(plan_epoch(corpus, settings, 0))
    for one, other in itertools.combinations(epochs, 2):
        assert described(one) != described(other)
    seeded = dataclasses.replace(settings, seed=1)
    assert described(plan_epoch(corpus, seeded, 0)) != described(epochs[0])


def test_the_batches_of_each_window_have_an_order_of_their_own(small_windows):
    lengths = np.full(490, 5)  # so that every window has equally many batches
    corpus, settings = random_corpus(np.random.default_rng(0), lengths, lengths), BUCKETS
    settings, orders = dataclasses.replace(settings, max_tokens=50), set()
    layout = epoch_layout(corpus, settings)
    for window in range(layout.windows):
        plan = plan_window(corpus, settings, layout, 0, window)
        places = range(window * layout.window_pairs, (window + 1) * layout.window_pairs)
        place_of = {
            number: place for place, number in enumerate(corpus.draw(0, places)[0].tolist())
        }
        orders.add(tuple(place_of[int(planned.members[0])] for planned in plan))
    assert len(orders) == layout.windows == 7


@pytest.mark.exhaustive
@given(
    pairs=st.integers(1, 200),
    window=st.integers(1, 80),
    buckets=st.integers(1, 5),
    max_tokens=st.integers(1, 600),
    packed=st.booleans(),
)
@examples(deadline=None, max_examples=20)
def test_no_pair_is_lost_whatever_the_sizes(corpus, pairs, window, buckets, max_tokens, packed):
    some = corpus_of(*zip(*sides(corpus)[:pairs], strict=True), 90, 90)
    if packed:
        max_tokens = max(max_tokens, 64)  # a packed row fits into a batch
    settings = TrainingConfig(
        batching="packed" if packed else "buckets",
        max_tokens=max_tokens,
        bucket_count=buckets,
        pack_length=64,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "WINDOW_PAIRS", window)
        patch.setattr(planning, "WINDOW_BATCHES", 0)
        plan = plan_epoch(some, settings, 1)
        shapes = epoch_layout(some, settings).shapes
    members = np.concatenate([planned.members for planned in plan])
    assert sorted(members.tolist()) == list(range(pairs))
    assert {planned[:2] for planned in plan} <= set(shapes)
    assert len({length for _, length in shapes}) == len(shapes) <= buckets
    assert all(rows == 1 or rows * length <= max_tokens for rows, length in shapes)


def test_reading_goes_on_from_any_batch(corpus, small_windows):
    settings = PACKED
    layout = epoch_layout(corpus, settings)

    def places(first):
        return [
            (one.window, one.number, described([one.planned]), one.batch.src.tobytes())
            for one in epoch_batches(corpus, settings, layout, 2, first)
        ]

    whole = places((0, 0))
    assert [one[2][0] for one in whole] == described(plan_epoch(corpus, settings, 2))
    for begin, (window, number, *_) in enumerate(whole):
        if begin % 3 == 0 or number == 0:
            assert places((window, number)) == whole[begin:]
            last = whole[begin - 1]
            # A run that has made the last batch of a window goes on after it.
            assert number or not begin or places((last[0], last[1] + 1)) == whole[begin:]
    assert places((whole[-1][0], whole[-1][1] + 1)) == []


@pytest.fixture(scope="module")
def many():
    return captions(20_000)


@pytest.mark.parametrize(
    ("batching", "most"),
    tiered_rows([("buckets", 0.135), ("packed", 0.06)], lambda batching, _: batching == "buckets"),
)
def test_windows_of_300_batches_pad_hardly_more_than_one(many, monkeypatch, batching, most):
    settings = TrainingConfig(max_tokens=256, bucket_count=8, batching=batching, pack_length=64)
    assert epoch_layout(many, settings).windows == 1  # 2**16 pairs are one, whatever the batches
    one = padding_share(many, plan_epoch(many, settings, 0))
    monkeypatch.setattr(planning, "WINDOW_PAIRS", 1)
    assert epoch_layout(many, settings).windows == 5
    assert one < most
    assert padding_share(many, plan_epoch(many, settings, 0)) < one + 0.01


@pytest.mark.parametrize("max_tokens", [256, 4096])
def test_one_window_pads_no_more_than_batches_of_equal_size(many, max_tokens):
    """Each bucket by itself, in as few batches as hold it and as equal as can be."""
    settings = TrainingConfig(max_tokens=max_tokens, bucket_count=8)
    layout = epoch_layout(many, settings)
    assert layout.windows == 1
    lengths = many.side_lengths(np.arange(len(many))).max(axis=1)
    slots, shorter = 0, 0
    for rows, length in layout.shapes:
        members = np.count_nonzero((lengths > shorter) & (lengths <= length))
        batches = math.ceil(members / (max_tokens // length))
        assert rows == math.ceil(members / batches)
        slots += batches * rows * length
        shorter = length
    plan = plan_epoch(many, settings, 0)
    assert sum(planned.rows * planned.length for planned in plan) <= slots
    filled = [len(planned.members) / planned.rows for planned in plan]
    assert np.mean(filled) > 0.98


@pytest.fixture
def folder(tmp_path, one_process, small_windows, monkeypatch):
    monkeypatch.setattr(planning, "WINDOW_PAIRS", 100)
    return prepared(tmp_path / "store", write(tmp_path, *lines(300))).parts[0].folder


def part(planned, process, processes):
    """Return the rows of one process; the first ones take the rows that are left over."""
    rows = np.array_split(np.arange(planned.rows), processes)[process]
    return take_rows(planned, rows)


@pytest.mark.parametrize("batching", ["buckets", "packed"])
@pytest.mark.parametrize("processes", tiered([2, 4], quick=[2]))
def test_the_ids_are_read_once_by_all_processes_together(folder, batching, processes, monkeypatch):
    """Of several processes each reads its own rows."""
    bytes_read, read_slice = [0], FileArray.__getitem__

    def counted(array, span):
        part = read_slice(array, span)
        bytes_read[-1] += part.nbytes
        return part

    monkeypatch.setattr(FileArray, "__getitem__", counted)
    settings = dataclasses.replace(PACKED, max_tokens=512, bucket_count=2, batching=batching)
    corpus = open_folder(folder)
    layout = epoch_layout(corpus, settings)
    assert layout.windows == 3
    expected = list(epoch_batches(corpus, settings, layout, 0))
    index = 300 * INDEX_TYPE.itemsize
    ids = corpus.counts.tokens + len(corpus)  # of one byte
    assert bytes_read == [index + index + ids]  # for the plan, and for the batches

    batches = []
    for process in range(processes):
        bytes_read.append(0)
        rows_to_read = partial(part, process=process, processes=processes)
        corpus = open_folder(folder)
        batches.append(list(epoch_batches(corpus, settings, layout, 0, (0, 0), rows_to_read)))
    assert sum(bytes_read[1:]) == processes * index + index + ids
    assert max(bytes_read[1:]) - index < 1.35 * (index + ids) / processes
    for place, batch in enumerate(expected):
        for name in ("src", "tgt_in", "tgt_out"):
            rows = [getattr(parts[place].batch, name) for parts in batches]
            np.testing.assert_array_equal(np.concatenate(rows), getattr(batch.batch, name))
