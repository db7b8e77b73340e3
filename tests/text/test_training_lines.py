"""The lines that a tokenizer is trained on: a bounded sample, without overlong words."""

import functools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.text.samples import LONGEST_WORD, has_long_word, sampled
from jax_transformer.tokenizers import train_byte_pair, trained


@given(count=st.integers(1, 60), pairs=st.integers(0, 10**12), seed=st.integers(0, 2**32 - 1))
def test_a_sample_has_distinct_pairs_in_order(count, pairs, seed):
    indices = sampled(count, pairs, seed)
    assert indices.dtype == np.int64
    assert len(indices) == min(count, pairs)
    assert np.all(np.diff(indices) > 0)
    assert len(indices) == 0 or 0 <= indices[0] <= indices[-1] < pairs


def test_the_seed_decides_the_sample_and_a_larger_one_contains_the_smaller():
    assert set(sampled(50, 10**9, 3)) < set(sampled(100, 10**9, 3))
    assert not set(sampled(50, 10**9, 3)) & set(sampled(50, 10**9, 4))


def test_words_that_would_take_the_trainer_long_are_long():
    long, marks = "字" * LONGEST_WORD, "\u200d" * (LONGEST_WORD + 1)  # joiners end no word
    short = [long, f"{long}。{long}", f"{long} {long}", f"{long}+{long}", "a," * LONGEST_WORD]
    assert not any(map(has_long_word, short))
    assert all(map(has_long_word, [long + "字", f"a {marks} b", "x" * 10**5, f"{long}\u0301"]))
    words = functools.partial(trained.words, train_byte_pair(["a b"], 10))
    assert max(map(len, (word for line in short for word in words(f" {line}")))) == LONGEST_WORD + 1
    assert len(words(f"a {marks} b")[1]) == LONGEST_WORD + 2  # with its space


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
