import dataclasses
import itertools
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text import batches
from jax_transformer.text.batches import padding_share, training_batches
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.encoding import encode_text
from jax_transformer.text.parallel_text import Text
from jax_transformer.text.plan import bucket_lengths, plan_epoch
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from tests.text.texts import corpus_of, sides

SETTINGS = TrainingConfig(bucket_count=4, max_tokens=200)


@pytest.fixture(scope="module")
def tokenizer():
    """Every letter is a token of its own, and so is the space before a word; padding is not 0."""
    return dataclasses.replace(train_byte_pair(["a", "b"], vocab_size=7), pad_id=3)


@pytest.fixture(scope="module")
def corpus():
    """500 pairs of one word each, most of them short, with sides of different lengths."""
    generator = random.Random(0)
    words = [
        "".join(generator.choices("ab", k=1 + int(generator.expovariate(0.15)) % 40))
        for _ in range(1000)
    ]
    return Text(tuple(words[:500]), tuple(words[500:]))


@pytest.fixture(scope="module")
def encoded(corpus, tokenizer):
    return encode_text(corpus, tokenizer, max_length=100)


@pytest.fixture(scope="module")
def plan(encoded):
    return plan_epoch(encoded, SETTINGS, epoch=0)


def test_encoding_marks_the_ends_and_keeps_the_order(corpus, tokenizer, encoded):
    sources, targets = zip(*sides(encoded), strict=True)
    for source, ids in zip(corpus.sources, sources, strict=True):
        assert ids.tolist() == tokenizer.encode_source([source])[0]
    for target, ids in zip(corpus.targets, targets, strict=True):
        assert ids.tolist() == [tokenizer.bos_id, *tokenizer.encode_source([target])[0]]
    pairs = zip(corpus.sources, corpus.targets, strict=True)
    # Of a word, the space before it and the end after it are tokens too.
    expected = [max(map(len, pair)) + 2 for pair in pairs]
    lengths = encoded.side_lengths(np.arange(len(encoded))).max(axis=1)
    assert lengths.tolist() == expected
    assert encoded.length_counts.tolist() == np.bincount(expected).tolist()


def test_a_pair_with_an_overlong_side_is_dropped_and_counted(tokenizer):
    max_length = 20
    words = {length: "a" * (length - 2) for length in (19, 20, 21, 200)}
    pairs = list(itertools.product(words.values(), repeat=2))
    encoded = encode_text(Text(*zip(*pairs, strict=True)), tokenizer, max_length)
    kept = [(len(s), len(t) - 1) for s, t in sides(encoded)]
    assert kept == [(19, 19), (19, 20), (20, 19), (20, 20)]
    assert encoded.counts.dropped == {"dropped as too long": 12}
    assert encoded.counts.tokens == 4 * 19 + 4 * 20


def test_the_report_counts_what_is_kept_dropped_and_unknown(tokenizer):
    corpus = Text(("aa", "ax", "a" * 50), ("bb", "yz", "b"))
    encoded = encode_text(corpus, tokenizer, max_length=10)
    assert encoded.counts.unknown == 3
    assert encoded.counts.report() == (
        "3 pairs read, 1 dropped as too long; 2 pairs of 16 tokens kept, 18.75% of the tokens "
        "unknown"
    )


@pytest.mark.parametrize("sides", [((), ()), (("aaaa",), ("b",)), (("a",), ("bbbb",))])
def test_a_corpus_of_which_nothing_is_left_is_refused(tokenizer, sides):
    with pytest.raises(InputError, match="max_length=5 leaves none of"):
        encode_text(Text(*sides), tokenizer, max_length=5)


def test_a_plan_of_nothing_has_no_batches(encoded):
    assert list(training_batches(encoded, [])) == []


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30).map(np.array),
    count=st.integers(1, 5),
)
def test_bucket_lengths_are_the_best_of_all(lengths, count):
    def columns(buckets):
        return sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)

    others = itertools.combinations(range(1, lengths.max()), min(count, lengths.max()) - 1)
    best = min(columns((*shorter, lengths.max())) for shorter in others)
    chosen = bucket_lengths(np.bincount(lengths), count)
    assert columns(chosen) == best
    assert len(chosen) <= count
    assert list(chosen) == sorted(set(chosen))


def test_batches_and_their_members_are_shuffled(encoded, plan):
    lengths = [planned.length for planned in plan]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))
    assert any(planned.members.tolist() != sorted(planned.members) for planned in plan)
    later = plan_epoch(encoded, SETTINGS, epoch=1)
    assert lengths != [planned.length for planned in later]  # each epoch has another order


def test_few_shapes_serve_every_epoch(encoded):
    plans = [plan_epoch(encoded, SETTINGS, epoch) for epoch in range(4)]
    assert len({len(plan) for plan in plans}) == 1
    made = [batch for plan in plans for batch in training_batches(encoded, plan)]
    shapes = {batch.src.shape for batch in made}
    assert len(shapes) == len({length for _, length in shapes}) == SETTINGS.bucket_count
    assert all(rows * length <= SETTINGS.max_tokens for rows, length in shapes)
    assert all(array.dtype == np.int32 for batch in made for array in batch[:3])


def test_a_pair_longer_than_the_budget_has_a_batch_of_its_own(encoded):
    plan = plan_epoch(encoded, TrainingConfig(bucket_count=4, max_tokens=1), epoch=0)
    assert {planned.rows for planned in plan} == {1}
    assert len(plan) == len(encoded)


def test_batches_hold_the_planned_pairs_and_padding(encoded, plan, tokenizer):
    made = list(training_batches(encoded, plan))
    assert len(made) == len(plan)
    filled_up = 0
    for planned, batch in zip(plan, made, strict=True):
        shape = (planned.rows, planned.length)
        assert batch.src.shape == batch.tgt_in.shape == batch.tgt_out.shape == shape
        for row, member in enumerate(planned.members):
            ((source, target),) = encoded.read(np.array([member])).sides()
            for array, ids in (
                (batch.src, source),
                (batch.tgt_in, target[:-1]),
                (batch.tgt_out, target[1:]),
            ):
                assert array[row, : len(ids)].tolist() == ids.tolist()
                assert (array[row, len(ids) :] == tokenizer.pad_id).all()
        assert batch.src_segments is None
        assert batch.tgt_segments is None
        fill = [array[len(planned.members) :] for array in batch[:3]]
        assert all((rows == tokenizer.pad_id).all() for rows in fill)
        filled_up += len(fill[0])
    assert filled_up > 0
    pads = sum((array == tokenizer.pad_id).sum() for batch in made for array in batch[:3:2])
    slots = sum(array.size for batch in made for array in batch[:3:2])
    assert padding_share(encoded, plan) == pytest.approx(pads / slots, abs=1e-12)


def test_batches_are_made_off_the_main_thread(encoded, plan, monkeypatch):
    threads, lay_out = set(), batches._lay_out

    def record(*arguments):
        threads.add(threading.current_thread())
        return lay_out(*arguments)

    monkeypatch.setattr(batches, "_lay_out", record)
    list(training_batches(encoded, plan))
    assert threads
    assert threading.main_thread() not in threads


def test_an_id_outside_the_vocabulary_reaches_no_batch(encoded, plan, tokenizer):
    too_large = Corpus(encoded.parts, tokenizer.src_vocab_size - 1, tokenizer.src_vocab_size)
    with pytest.raises(InputError, match=r"src has ids from 0 to 6, but those"):
        list(training_batches(too_large, plan))
    for side in (0, 1):
        sequences = [list(side) for side in zip(*sides(encoded), strict=True)]
        sequences[side][3] = np.array([5, -1, 2], np.int32)
        negative = corpus_of(*sequences, tokenizer.src_vocab_size, tokenizer.src_vocab_size)
        with pytest.raises(InputError, match=r"(src|tgt_in) has ids from -1 to \d+, but those"):
            list(training_batches(negative, plan))
