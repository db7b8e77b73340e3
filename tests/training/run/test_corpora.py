"""The validation pairs that are held out of a training text."""

import pytest

from jax_transformer import InputError
from jax_transformer.data.corpus import ParallelCorpus
from jax_transformer.training.run.corpora import hold_out


def text(pairs):
    return ParallelCorpus(
        tuple(map(str, range(pairs))), tuple(f"<{index}>" for index in range(pairs)), 7
    )


@pytest.mark.parametrize(
    ("pairs", "wanted", "expected"),
    [(2, None, 1), (19, None, 1), (60, None, 3), (30_000, None, 1000), (60, 40, 40), (2, 1, 1)],
)
def test_each_pair_is_in_one_part_in_the_order_of_the_text(pairs, wanted, expected):
    training, validation, held_out = hold_out(text(pairs), wanted, seed=3)
    assert held_out == len(validation.sources) == expected
    numbers = [[int(source) for source in part.sources] for part in (training, validation)]
    assert all(part == sorted(part) for part in numbers)
    assert sorted(numbers[0] + numbers[1]) == list(range(pairs))
    for part in (training, validation):
        assert part.targets == tuple(f"<{source}>" for source in part.sources)
    assert (training.dropped_empty, validation.dropped_empty) == (7, 0)


def test_the_seed_alone_chooses():
    assert hold_out(text(200), 20, seed=3) == hold_out(text(200), 20, seed=3)
    assert hold_out(text(200), 20, seed=3) != hold_out(text(200), 20, seed=4)


@pytest.mark.parametrize(("pairs", "wanted"), [(1, None), (5, 5), (5, 6)])
def test_a_split_without_training_pairs_is_refused(pairs, wanted):
    with pytest.raises(InputError, match=f"valid_pairs={wanted or 1} leaves none of {pairs} pairs"):
        hold_out(text(pairs), wanted, seed=0)
