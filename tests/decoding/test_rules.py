"""Each rule against its definition in numpy, and in a search with the others."""

import jax
import numpy as np
import pytest

from jax_transformer.decoding.processors import Rules, apply_rules
from tests.decoding.conftest import LONGEST, sequences
from tests.decoding.plain import Plain, assert_found, biased, quick_generate, random_model

STEP, LENGTH, VOCABULARY = 9, 12, 8  # few ids, so that sequences repeat
CASES = [
    {},
    {"banned_tokens": (4, 6)},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": STEP + 5},
    {"min_new_tokens": STEP},
    {"min_new_tokens": STEP + 1},
    {"prefix": True},
    {"min_new_tokens": STEP + 1, "banned_tokens": (5,), "prefix": True, "repetition_penalty": 2.0},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_rule_is_its_definition(options):
    config, params, src = random_model("vaswani2017", vocab_size=VOCABULARY)
    random = np.random.default_rng(1)
    scores = random.normal(size=(5, 3, VOCABULARY)).astype(np.float32)
    history = random.integers(1, VOCABULARY, (5, 3, LENGTH)).astype(np.int32)  # past STEP, too
    history[..., 0] = config.bos_id
    prefix = np.full((5, STEP + 1), config.pad_id, np.int32)
    prefix[:3, STEP] = (5, 2, 4)  # free in the others
    banned = np.isin(np.arange(VOCABULARY), (config.pad_id, *options.get("banned_tokens", ())))
    arrays = {
        "min_new_tokens": lambda value: np.asarray(value, np.int32),
        "repetition_penalty": lambda value: np.asarray(value, np.float32),
        "prefix": lambda _: prefix,
    }
    given = {name: arrays[name](options[name]) for name in arrays if name in options}
    rules = Rules(banned, no_repeat_ngram_size=options.get("no_repeat_ngram_size"), **given)
    apply = jax.jit(apply_rules, static_argnames="config")
    found = apply(scores, history, np.asarray(STEP, np.int32), rules, config)
    changed = 0
    for row in range(5):
        plain = {name: value for name, value in options.items() if name != "prefix"}
        plain |= {"prefix": tuple(prefix[row])} if "prefix" in options else {}
        plain = Plain(params, config, src[row], LENGTH, **plain)
        for beam in range(3):
            expected = plain.rule(scores[row, beam], history[row, beam, 1 : STEP + 1].tolist())
            np.testing.assert_allclose(found[row, beam], expected, rtol=1e-6)
            changed += (expected != scores[row, beam]).sum()
    # Padding is always forbidden; every rule but those that do not apply here changes more.
    alone = options in ({}, {"no_repeat_ngram_size": STEP + 5}, {"min_new_tokens": STEP})
    assert (changed == 15) == alone


@pytest.mark.parametrize("beam_size", [1, 3])
def test_rules_hold_in_a_search(reversal_model, beam_size):
    config, params = reversal_model
    src, _ = sequences(6, seed=7)
    prefix = np.array([[5, 6], [7, 0], [0, 0], [8, 9], [0, 4], [10, 0]], np.int32)
    options = {
        "max_new_tokens": LONGEST + 1,
        "min_new_tokens": 5,
        "banned_tokens": (11, 13),
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2,
    }
    found = quick_generate(params, config, src, beam_size=beam_size, prefix=prefix, **options)
    free = quick_generate(params, config, src, beam_size=beam_size, max_new_tokens=LONGEST + 1)
    assert (found.tokens != free.tokens).any(axis=(1, 2)).sum() >= 4
    for row, source in enumerate(src):
        plain = Plain(params, config, source, prefix=tuple(prefix[row]), **options)
        expected = plain.greedy() if beam_size == 1 else plain.beam(beam_size)[0]
        assert_found(found, row, [expected], config, atol=3e-5)
        assert found.lengths[row, 0] > options["min_new_tokens"]


def test_a_forced_first_token_begins_every_row_and_counts(reversal_model):
    config, params = reversal_model
    src, _ = sequences(6, seed=8)
    options = {"max_new_tokens": LONGEST + 1, "beam_size": 3}
    found = quick_generate(params, config, src, forced_first_token=9, **options)
    assert (found.tokens[:, :, 0] == 9).all()
    prefixed = quick_generate(params, config, src, prefix=np.full((6, 1), 9), **options)
    np.testing.assert_array_equal(found.tokens, prefixed.tokens)
    np.testing.assert_array_equal(found.scores, prefixed.scores)
    plain = Plain(params, config, src[0], LONGEST + 1, prefix=(9,)).beam(3)[0]
    assert_found(found, 0, [plain], config, atol=3e-5)


def test_where_nothing_is_left_the_score_says_so():
    """Three ids besides padding, none of which may come twice, one of them the begin."""
    config, params, src = biased([0, 0, -9, 3])
    options = {"max_new_tokens": 6, "no_repeat_ngram_size": 1, "banned_tokens": (2,)}
    greedy = quick_generate(params, config, src, **options)
    assert (greedy.scores == -np.inf).all()
    beam = quick_generate(params, config, src, beam_size=2, num_hypotheses=2, **options)
    assert (beam.scores == -np.inf).all()
    assert (beam.lengths == 0).all()
    assert (beam.tokens == config.pad_id).all()


def test_fewer_targets_than_asked_for_are_finite_ones_first():
    config, params, src = biased([0, 0, 1, 2, 0, 0])
    options = {"banned_tokens": (1, 4, 5), "min_new_tokens": 0}
    found = quick_generate(
        params, config, src, max_new_tokens=1, beam_size=3, num_hypotheses=3, **options
    )
    assert found.tokens[0, :, 0].tolist() == [3, 2, 0]
    assert np.isfinite(found.scores[:, :2]).all()
    assert (found.scores[:, 2] == -np.inf).all()
    assert found.lengths[0].tolist() == [1, 1, 0]
