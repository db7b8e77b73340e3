"""Pairs that repeat an earlier one, against a set of Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text import duplicates
from jax_transformer.text.duplicates import DuplicateFinder, pair_digests

WORDS = st.sampled_from(["", "a", "b", "ab", "ä", "a b"])


def repeats_by_set(pairs):
    seen = set()
    return [pair in seen or bool(seen.add(pair)) for pair in pairs]


@given(
    pairs=st.lists(st.tuples(WORDS, WORDS), max_size=60),
    size=st.integers(1, 20),
    pending=st.integers(1, 40),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_all_but_the_first_of_equal_pairs_repeat(tmp_path_factory, pairs, size, pending, random):
    finder = DuplicateFinder(tmp_path_factory.mktemp("duplicates"))
    starts = list(range(0, len(pairs), size))
    random.shuffle(starts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "PENDING_RECORDS", pending)
        for start in starts:
            finder.add(start, pair_digests(pairs[start : start + size]))
    assert finder.repeats().tolist() == repeats_by_set(pairs)


def test_digests_tell_where_a_pair_is_split():
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "b "), ("b", "a")]
    digests = pair_digests(pairs)
    assert (digests.shape, digests.dtype) == ((5, 16), np.uint8)
    assert len(np.unique(digests, axis=0)) == 5
    assert pair_digests([]).shape == (0, 16)


@pytest.mark.parametrize("byte", range(16))
def test_digests_that_differ_in_one_byte_do_not_repeat(tmp_path, byte):
    digests = np.zeros((3, 16), np.uint8)
    digests[1, byte] = 1
    finder = DuplicateFinder(tmp_path)
    finder.add(0, digests)
    assert finder.repeats().tolist() == [False, False, True]


def test_numbers_that_were_not_added_do_not_repeat(tmp_path):
    finder = DuplicateFinder(tmp_path)
    finder.add(7, pair_digests([("a", "b"), ("c", "d")]))
    finder.add(2, pair_digests([("a", "b")]))
    assert np.flatnonzero(finder.repeats()).tolist() == [7]
    finder.add(9, pair_digests([("c", "d")]))
    assert np.flatnonzero(finder.repeats()).tolist() == [7, 9]


def test_files_of_an_earlier_finder_do_not_count(tmp_path):
    random = np.random.default_rng(0)
    digests = random.integers(0, 256, (1000, 16), dtype=np.uint8)
    earlier = DuplicateFinder(tmp_path / "folder")
    earlier.add(0, digests)
    assert not earlier.repeats().any()
    finder = DuplicateFinder(tmp_path / "folder")
    finder.add(1000, digests[:10])
    assert not finder.repeats().any()
    finder.remove()
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(InputError) as refusal:
        DuplicateFinder(file)
    assert str(refusal.value).startswith(f"{file}: ")


def test_a_full_disk_is_refused_by_name(tmp_path):
    finder = DuplicateFinder(tmp_path)
    for first in range(256):
        (tmp_path / f"{first:02x}.digests").symlink_to("/dev/full")
    finder.add(0, pair_digests([("a", "b")]))
    with pytest.raises(InputError, match="No space left on device") as refusal:
        finder.repeats()
    assert str(refusal.value).startswith(f"{tmp_path}: ")
