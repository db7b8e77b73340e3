"""Rows of several pairs: which share one, how they lie in it, and how little padding is left."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text.batches import make_batch, training_batches
from jax_transformer.text.pieces import LOOK_AHEAD, Piece, fill_rows
from jax_transformer.text.plan import plan_epoch, take_rows
from jax_transformer.training.config import TrainingConfig
from tests.text.texts import random_corpus

PACKED = TrainingConfig(batching="packed", pack_length=64, max_tokens=256)


@pytest.fixture(scope="module")
def encoded():
    """2,000 pairs of random ids, as long as captions are: 5 to 40 tokens a side."""
    random = np.random.default_rng(0)
    source_lengths = 5 + random.poisson(random.gamma(3, 4, size=2000)).clip(0, 35)
    target_lengths = (source_lengths + random.integers(-3, 4, size=2000)).clip(5, 40)
    return random_corpus(random, source_lengths, target_lengths)


def pack_rows(side_lengths, row_length):
    """Return the numbers of the pairs of each row."""
    pairs = ((Piece(i, 0, 0, 0, *sides), None) for i, sides in enumerate(side_lengths.tolist()))
    rows = fill_rows(pairs, (row_length, row_length))
    return [np.array([piece.number for piece in row]) for row in rows]


@given(
    sides=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=60),
    row_length=st.integers(9, 30),
)
def test_rows_hold_every_pair_once_and_none_too_many(sides, row_length):
    side_lengths = np.array(sides, int).reshape(-1, 2)
    rows = pack_rows(side_lengths, row_length)
    packed = np.concatenate(rows) if rows else np.array([], int)
    assert sorted(packed.tolist()) == list(range(len(sides)))
    assert all((side_lengths[row].sum(axis=0) <= row_length).all() for row in rows)
    # First fit: no pair of a later row would have found room in an earlier one.
    for index, row in enumerate(rows[:-1]):
        later = np.concatenate(rows[index + 1 :])
        free = row_length - side_lengths[row].sum(axis=0)
        assert not (side_lengths[later] <= free).all(axis=1).any()


def test_the_first_that_fits_is_taken():
    side_lengths = np.array([(5, 4), (6, 1), (3, 3), (2, 7), (2, 2), (1, 1)])
    rows = pack_rows(side_lengths, row_length=10)
    assert [row.tolist() for row in rows] == [[0, 2, 4], [1, 3, 5]]


def test_a_pair_waits_for_no_more_than_the_look_ahead():
    wide = np.array([(9, 9), *[(6, 6)] * (LOOK_AHEAD - 1), (1, 1)])
    rows = pack_rows(wide, row_length=10)
    assert rows[0].tolist() == [0]  # (1, 1) comes into sight with the next row
    assert rows[1].tolist() == [1, len(wide) - 1]


def test_a_pair_longer_than_a_row_is_refused(encoded):
    longest = len(encoded.length_counts) - 1
    settings = dataclasses.replace(PACKED, pack_length=longest - 1)
    message = rf"pack_length={longest - 1} is shorter than the longest .*has {longest} tokens"
    with pytest.raises(InputError, match=message):
        plan_epoch(encoded, settings, epoch=0)


def test_pairs_lie_side_by_side_in_segments_of_the_same_number(encoded):
    plan = plan_epoch(encoded, PACKED, epoch=0)
    for planned, batch in zip(plan, training_batches(encoded, plan), strict=True):
        for row in range(planned.rows):
            members = planned.members[planned.member_rows == row]
            pairs = encoded.read(members).sides()
            sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
            for array, segments, sequences in (
                (batch.src, batch.src_segments, sources),
                (batch.tgt_in, batch.tgt_segments, [ids[:-1] for ids in targets]),
                (batch.tgt_out, batch.tgt_segments, [ids[1:] for ids in targets]),
            ):
                ids = np.concatenate([*sequences, np.zeros(64, np.int32)])[:64]
                assert array[row].tolist() == ids.tolist()
                numbers = np.repeat(np.arange(len(members)) + 1, list(map(len, sequences)))
                assert segments[row].tolist() == np.pad(numbers, (0, 64 - len(numbers))).tolist()
        assert all(array.dtype == np.int32 for array in batch)


@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_some_rows_of_a_batch_are_those_of_the_whole(encoded, batching):
    settings = dataclasses.replace(PACKED, batching=batching, max_tokens=700)
    plan = plan_epoch(encoded, settings, epoch=0)
    plan = [planned._replace(rows=planned.rows + 2) for planned in plan]  # the last: padding
    random = np.random.default_rng(0)
    taken = [
        np.flatnonzero(random.random(planned.rows) < share)
        for planned, share in zip(plan, itertools.cycle((0, 0.3, 0.7, 1)), strict=False)
    ]
    parts = [take_rows(planned, rows) for planned, rows in zip(plan, taken, strict=True)]
    for planned, rows, part in zip(plan, taken, parts, strict=True):
        for array, whole in zip(
            make_batch(encoded, part), make_batch(encoded, planned), strict=True
        ):
            assert (array is None) == (whole is None)
            assert array is None or np.array_equal(array, whole[rows])
