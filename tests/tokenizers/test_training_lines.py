import functools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.tokenizers import byte_pair, train_byte_pair
from jax_transformer.tokenizers.training_lines import LONGEST_WORD, LinesWithin, sampled


@given(count=st.integers(1, 60), pairs=st.integers(0, 10**12), seed=st.integers(0, 2**32 - 1))
def test_a_sample_has_distinct_pairs_in_order(count, pairs, seed):
    indices = sampled(count, pairs, seed)
    assert indices.dtype == np.int64
    assert len(indices) == min(count, pairs)
    assert np.all(np.diff(indices) > 0)
    assert len(indices) == 0 or 0 <= indices[0] <= indices[-1] < pairs


def test_a_corpus_as_small_as_the_sample_is_taken_whole():
    for pairs in (0, 1, 9, 10):
        assert sampled(10, pairs, 3).tolist() == list(range(pairs))
    assert len(set(sampled(10, 11, 3).tolist())) == 10


def test_the_seed_decides_the_sample():
    assert sampled(50, 10**9, 3).tolist() == sampled(50, 10**9, 3).tolist()
    assert not set(sampled(50, 10**9, 3)) & set(sampled(50, 10**9, 4))


def test_every_part_of_the_corpus_is_as_likely():
    counts = np.bincount(sampled(20_000, 10**9, 1) // 10**8, minlength=10)
    # 2,000 are expected in each tenth, with a standard deviation of 42
    assert abs(counts - 2000).max() < 5 * 42


def test_a_larger_sample_contains_the_smaller_one():
    assert set(sampled(100, 10**6, 5)) < set(sampled(200, 10**6, 5))


@pytest.mark.parametrize("count", [0, -1])
def test_a_sample_of_nothing_is_refused(count):
    with pytest.raises(InputError, match=f"a sample of {count} pairs .*; name 1 or more"):
        sampled(count, 10, 0)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(InputError, match=f"seed of the sample is {seed}; .* 0 to 4294967295"):
        sampled(5, 10, seed)


def test_overlong_lines_are_left_out_and_counted():
    lines = LinesWithin(iter(["", "abc", "äöü", "abcd", "a" * 10**7, "xyz"]), 3)
    assert lines.left_out == 0
    assert list(lines) == ["", "abc", "äöü", "xyz"]
    assert lines.left_out == 2


def test_lines_with_a_word_that_would_take_the_trainer_long_are_left_out_and_counted():
    long, marks = "字" * LONGEST_WORD, "\u200d" * (LONGEST_WORD + 1)  # joiners end no word
    kept = [long, f"{long}。{long}", f"{long} {long}", f"{long}+{long}", "a," * LONGEST_WORD]
    lines = LinesWithin([*kept, long + "字", f"a {marks} b", "x" * 10**6, f"{long}\u0301"], 10**7)
    assert list(lines) == kept
    assert lines.left_out == 4
    words = functools.partial(byte_pair.words, train_byte_pair(["a b"], 10))
    assert max(map(len, (word for line in kept for word in words(f" {line}")))) == LONGEST_WORD + 1
    assert len(words(f"a {marks} b")[1]) == LONGEST_WORD + 2  # with its space


def test_the_order_of_the_lines_does_not_change_the_vocabulary():
    # Every pair of letters is as frequent as many others, so that ties decide most merges.
    words = [a + b + c for a in "abcdef" for b in "ghijkl" for c in "mnopqr"]
    lines = [f"{word} {word[::-1]}. {word}!" for word in words]
    orders = [lines, lines[::-1], *(random.Random(i).sample(lines, len(lines)) for i in range(4))]
    assert len({train_byte_pair(order, 200).digest() for order in orders}) == 1


def test_training_holds_no_list_of_the_lines():
    living, most = 0, 0

    class Line(str):
        def __del__(self):
            nonlocal living
            living -= 1

    def lines():
        nonlocal living, most
        for number in range(20_000):
            living += 1
            most = max(most, living)
            yield Line(f"word {number % 7}")

    train_byte_pair(lines(), 20)
    assert living == 0
    assert most < 2_000
