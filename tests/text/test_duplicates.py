"""Pairs that repeat an earlier one, against a set of Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text.parallel_text import Text
from jax_transformer.text.prepare import pair_records, repeated_numbers, repeated_pairs
from jax_transformer.text.store import one_line_faults

WORDS = st.sampled_from(["", "a", "b", "ab", "ä", "a b"])


def blocks(pairs, size=100):
    return Text(*(tuple(pair[side] for pair in pairs) for side in (0, 1))).blocks(size)


@given(pairs=st.lists(st.tuples(WORDS, WORDS), max_size=60), size=st.integers(1, 20))
@settings(deadline=None, max_examples=12)
def test_all_but_the_first_of_equal_pairs_with_text_repeat(tmp_path_factory, pairs, size):
    folder, seen, expected = tmp_path_factory.mktemp("duplicates"), set(), []
    for number, pair in enumerate(pairs):
        if all(pair):
            if pair in seen:
                expected.append(number)
            seen.add(pair)
    (folder / "61.digests").write_bytes(bytes(48))  # of a process that was killed
    assert repeated_pairs(blocks(pairs, size), folder).tolist() == expected
    assert list(folder.iterdir()) == []


def test_digests_differ_where_a_pair_is_split():
    pairs = [("a", "b"), ("ab", "c"), ("a", "bc"), ("a", "b "), ("b", "a")]
    (block,) = blocks(pairs)
    records = pair_records(block)
    assert (records.shape, records.dtype) == ((5, 3), np.uint64)
    assert len(np.unique(records[:, :2], axis=0)) == 5


def test_digests_that_differ_in_one_byte_do_not_repeat():
    for byte in range(16):
        digests = np.zeros((3, 24), np.uint8)
        digests[1, byte] = 1
        digests[:, 16] = range(3)
        assert repeated_numbers(digests.view(np.uint64)).tolist() == [2]


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "61.digests").mkdir()
    with pytest.raises(InputError) as refusal, one_line_faults(tmp_path):
        repeated_pairs(blocks([("a", "b")]), tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path}: ")
    assert "name a folder that can be written with --prepared" in str(refusal.value)
