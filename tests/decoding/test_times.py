"""The rule of times against the processor of transformers, on the same sequences and scores."""

import jax
import numpy as np
import pytest
import torch

from jax_transformer.decoding import GenerationConfig
from jax_transformer.decoding.rules import apply_rules, keep_times, make_rules
from tests.models import shallow_config

transformers = pytest.importorskip("transformers")
from transformers.generation.logits_process import (  # noqa: E402
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

EOS, NO_TIMES, VOCABULARY = 9, 13, 29
FIRST = NO_TIMES + 1
BATCH, BEAMS = 6, 3
LATEST = (None, 0, 3)  # the last time, counted from the first one, that a target may begin with


def keeper(begin, latest):
    config = transformers.GenerationConfig(eos_token_id=EOS, bos_token_id=EOS)
    config.no_timestamps_token_id = NO_TIMES
    if latest is not None:
        config.max_initial_timestamp_index = latest
    return WhisperTimeStampLogitsProcessor(config, begin_index=begin)


def rules_of(prefix, latest, length, **options):
    ids = dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), VOCABULARY)
    config = shallow_config("vaswani2017", **ids, eos_id=EOS, bos_id=EOS + 1)
    options = GenerationConfig(max_new_tokens=length, allow_padding=True, **options)
    src = np.ones((BATCH, 2), np.int32)
    rules = make_rules(options, config, src, prefix)
    last = FIRST + (VOCABULARY if latest is None else latest)
    return rules.replace(times=np.array([FIRST, last], np.int32))


def drawn(random, prefixes, length):
    """Return sequences [B, N, 1 + length] whose times never go back, and how many tokens count."""
    steps = random.integers(prefixes, np.minimum(prefixes + 5, length)).astype(np.int32)
    history = random.integers(1, VOCABULARY, (BATCH, BEAMS, 1 + length)).astype(np.int32)
    for row, beam in np.ndindex(BATCH, BEAMS):
        tokens, low = history[row, beam], FIRST
        share = random.uniform(0.1, 0.9)
        for place in range(1 + prefixes[row], 1 + steps[row]):  # what follows is of no meaning
            tokens[place] = random.integers(1, EOS)
            if random.random() < share:
                low = tokens[place] = random.integers(low, min(low + 4, VOCABULARY))
    return history, steps


def scores_of(random):
    """Return scores in which sometimes the times are likelier, sometimes a token of text."""
    scores = random.normal(0, random.uniform(0.5, 3), (BATCH, BEAMS, VOCABULARY))
    scores[..., FIRST:] += random.normal(0, 3, (BATCH, BEAMS, 1))
    scores[..., EOS] += random.normal(0, 3, (BATCH, BEAMS))
    return scores.astype(np.float32)


def prefixes_of(random, longest):
    """Return how many tokens each prefix has, and the prefixes, in which times have no meaning."""
    lengths = random.integers(0, longest + 1, BATCH)
    lengths[0] = longest
    prefix = random.integers(1, VOCABULARY, (BATCH, longest))
    for row, length in enumerate(lengths):
        prefix[row, length:] = 0
    return lengths, prefix if longest else None


@pytest.mark.parametrize("latest", LATEST)
@pytest.mark.parametrize(("length", "longest"), [(3, 0), (7, 1), (12, 4)])
def test_times_stand_where_transformers_lets_them_stand(latest, length, longest):
    keep, counts = jax.jit(keep_times), np.zeros(3, int)
    for seed in range(12):
        random = np.random.default_rng(seed)
        lengths, prefix = prefixes_of(random, longest)
        history, steps = drawn(random, lengths, length)
        scores = scores_of(random)
        scores[..., NO_TIMES] = -np.inf  # by another rule
        rules = rules_of(prefix, latest, length)
        found = np.asarray(keep(scores, history, steps, rules))
        for row, beam in np.ndindex(BATCH, BEAMS):
            ids = torch.from_numpy(history[row, beam, None, : steps[row] + 1]).long()
            process = keeper(int(lengths[row]) + 1, latest)
            expected = process(ids, torch.from_numpy(scores[row, beam, None]))[0].numpy()
            np.testing.assert_array_equal(found[row, beam], expected)
            allowed = expected > -np.inf
            counts += allowed[:EOS].any(), allowed[FIRST:].any(), steps[row] == lengths[row]
    assert (counts > 20).all()  # text, a time, a begin: each came


@pytest.mark.parametrize("latest", LATEST)
def test_times_come_after_the_other_rules(latest):
    """Times are likelier than what is left of the text."""
    suppressed, at_begin = [3, 5, NO_TIMES], [EOS, 4]
    options = {"banned_tokens": (*suppressed,), "begin_suppressed_tokens": (*at_begin,)}
    apply = jax.jit(apply_rules)
    for seed in range(6):
        random = np.random.default_rng(100 + seed)
        lengths, prefix = prefixes_of(random, 2)
        history, steps = drawn(random, lengths, 8)
        scores = scores_of(random)
        found = np.asarray(apply(scores, history, steps, rules_of(prefix, latest, 8, **options)))
        for row, beam in np.ndindex(BATCH, BEAMS):
            begin = int(lengths[row]) + 1
            ids = torch.from_numpy(history[row, beam, None, : steps[row] + 1]).long()
            expected = torch.from_numpy(scores[row, beam, None])
            for process in (
                SuppressTokensLogitsProcessor(suppressed),
                SuppressTokensAtBeginLogitsProcessor(at_begin, begin),
                keeper(begin, latest),
            ):
                expected = process(ids, expected)
            np.testing.assert_array_equal(found[row, beam], expected[0].numpy())
