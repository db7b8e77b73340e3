"""BPE-dropout in training: the ids of an epoch depend on seed, epoch and pair, and nothing else."""

import dataclasses

import numpy as np
import pytest

from jax_transformer.text import bpe_dropout
from jax_transformer.text.batches import epoch_batches
from jax_transformer.text.bpe_dropout import BPEDropout, ResampledCorpus
from jax_transformer.text.encoding import encode_text
from jax_transformer.text.parallel_text import Text
from jax_transformer.text.plan import epoch_layout
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from tests.text.texts import WORDS, lines, sides

TOKENIZER = train_byte_pair(WORDS * 3, vocab_size=60)
SIDES = lines(120)
SETTINGS = TrainingConfig(max_tokens=200, bucket_count=2, bpe_dropout=0.3)


def encoded():
    return encode_text(Text(*map(tuple, SIDES)), TOKENIZER, 60)


def pairs_of(seed=0, epoch=0, rate=0.3):
    return ResampledCorpus(encoded(), BPEDropout(TOKENIZER, rate), seed, epoch)


def ids_by_pair(pairs, order):
    return {int(pair): [part.tolist() for part in pairs.read(np.array([pair]))] for pair in order}


def test_the_order_of_reading_changes_nothing(monkeypatch):
    order = np.random.default_rng(0).permutation(120)
    expected = ids_by_pair(pairs_of(), range(120))
    assert ids_by_pair(pairs_of(), order) == expected
    whole = pairs_of().read(np.arange(120))
    assert whole.ids.tolist() == [token for pair in range(120) for token in expected[pair][0]]
    few = pairs_of()
    monkeypatch.setattr(bpe_dropout, "MOST_PAIRS", 5)
    assert ids_by_pair(few, [*order, *order]) == expected
    assert len(few._cache) == 5
    at_once = few.read(np.arange(120))  # more than are kept
    np.testing.assert_array_equal(at_once.ids, whole.ids)
    lengths = few.side_lengths(order)
    np.testing.assert_array_equal(lengths[:, 0], whole.source_lengths[order])
    np.testing.assert_array_equal(lengths[:, 1], whole.target_lengths[order] - 1)


def test_seed_and_epoch_decide_and_the_text_stays():
    read = {
        (seed, epoch): pairs_of(seed, epoch).read(np.arange(120)).ids.tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({str(ids) for ids in read.values()}) == 4
    assert read[1, 0] != read[0, 1]
    tokens = pairs_of(1, 1).read(np.arange(120))
    for pair, (source, target) in enumerate(tokens.sides()):
        assert source[-1] == target[-1] == TOKENIZER.eos_id
        assert target[0] == TOKENIZER.bos_id
        assert TOKENIZER.decode(source[:-1].tolist()) == SIDES[0][pair]
        assert TOKENIZER.decode(target[1:-1].tolist()) == SIDES[1][pair]


def test_rate_0_changes_nothing():
    plain = encoded().read(np.arange(120))
    resampled_pairs = pairs_of(rate=0.0).read(np.arange(120))
    for ours, theirs in zip(resampled_pairs, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_pair_that_would_be_too_long_keeps_its_ids():
    corpus = encoded()
    every = np.arange(120)
    longest = len(corpus.length_counts) - 1
    merges, too_long = BPEDropout(TOKENIZER, 0.4), 0
    pairs = zip(sides(corpus), pairs_of(rate=0.4).read(every).sides(), strict=True)
    for pair, (before, after) in enumerate(pairs):
        new = [merges.encode(ids, (0, 0, pair, side)) for side, ids in enumerate(before)]
        if max(len(new[0]), len(new[1]) - 1) > longest:
            new, too_long = before, too_long + 1
        assert all(map(np.array_equal, after, new))
    assert 5 < too_long < 115


@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_an_epoch_holds_every_pair_once_and_goes_on_from_any_batch(batching):
    settings = dataclasses.replace(SETTINGS, batching=batching, pack_length=64)
    layout = epoch_layout(encoded(), settings)

    def batches(first=(0, 0)):
        return list(epoch_batches(pairs_of(0, 4), settings, layout, 4, first))

    whole = batches()
    members = np.concatenate([one.planned.members for one in whole])
    assert sorted(members.tolist()) == list(range(120))
    for begin in (1, len(whole) // 2, len(whole) - 1):
        for ours, theirs in zip(batches((0, begin)), whole[begin:], strict=True):
            for array, expected in zip(ours.batch[:3], theirs.batch[:3], strict=True):
                np.testing.assert_array_equal(array, expected)
