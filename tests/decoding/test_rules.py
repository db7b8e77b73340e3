"""Each rule against its definition in numpy, and in a search with the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.decoding import GenerationConfig
from jax_transformer.decoding.rules import apply_rules, make_rules
from tests.decoding.conftest import LONGEST, sequences
from tests.decoding.plain import Plain, assert_found, biased, quick_generate, random_model, run

STEP, LENGTH, VOCABULARY = 9, 12, 8  # few ids, so that sequences repeat
NO_EFFECT = [
    {},
    {"banned_sequences": ((*range(1, 8), *range(1, 8)),)},  # longer than any target
    {"no_repeat_ngram_size": STEP + 5},
    {"encoder_no_repeat_ngram_size": STEP + 5},
    {"min_new_tokens": STEP},
]
CASES = [
    *NO_EFFECT,
    {"allow_padding": True},
    {"banned_tokens": (4, 6)},
    {"banned_sequences": ((3,), (2,), (4, 5), (1, 6), (5, 5, 4), (6, 7, 5), (7, 7))},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 1, "allow_padding": True},  # padding is no n-gram
    {"encoder_no_repeat_ngram_size": 2},
    {"min_new_tokens": STEP + 1},
    {"min_new_tokens": STEP + 1, "eos_ids": (2, 7)},
    {"min_new_tokens": STEP - 2, "prefix": True},
    {"prefix": True, "forced_first_token": 3, "begin_suppressed_tokens": (4, 5)},
    {"forced_last_token": 6, "begin_suppressed_tokens": (4, 5)},
    {"renormalize": True, "banned_tokens": (4, 6)},
    {
        "min_new_tokens": STEP + 1,
        "banned_tokens": (5,),
        "prefix": True,
        "repetition_penalty": 2.0,
        "forced_last_token": 5,
    },
]


def assert_rules(config, src, scores, history, step, options, prefix, length_limits):
    """Assert that rules change scores as the plain definition does; return how many change."""
    chosen = GenerationConfig(max_new_tokens=LENGTH, **options)
    rules = make_rules(chosen, config, jnp.asarray(src), prefix, length_limits)
    found = jax.jit(apply_rules)(scores, history, np.asarray(step, np.int32), rules)
    changed = 0
    for row, beam in np.ndindex(scores.shape[:2]):
        given = () if prefix is None else tuple(int(id) for id in prefix[row] if id)
        limit = LENGTH if length_limits is None else int(length_limits[row])
        plain = Plain(None, config, src[row], limit, prefix=given, **options)
        expected = plain.rule(scores[row, beam], history[row, beam, 1 : step + 1].tolist())
        np.testing.assert_allclose(found[row, beam], expected, rtol=1e-6, atol=1e-6)
        changed += (expected != scores[row, beam]).sum()
    return changed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_is_its_definition(case):
    options = dict(case)
    config, _, src = random_model("vaswani2017", vocab_size=VOCABULARY)
    random = np.random.default_rng(1)
    scores = random.normal(size=(5, 3, VOCABULARY)).astype(np.float32)
    history = random.integers(1, VOCABULARY, (5, 3, LENGTH + 1)).astype(np.int32)  # past STEP, too
    history[..., 0] = config.bos_id
    prefix = limits = None
    if options.pop("prefix", False):  # of STEP + 1, STEP, 2, no and 2 tokens
        prefix = random.integers(1, VOCABULARY, (5, STEP + 1))
        for row, length in enumerate((STEP + 1, STEP, 2, 0, 2)):
            prefix[row, length:] = config.pad_id
    if "forced_last_token" in options:
        lengths = np.count_nonzero(prefix, axis=1) if prefix is not None else np.zeros(5, int)
        limits = np.clip(STEP + np.array([1, 1, 1, 2, 3]) - lengths, 1, LENGTH)
    changed = assert_rules(config, src, scores, history, STEP, options, prefix, limits)
    if case == {"allow_padding": True}:
        assert changed == 0
    else:  # padding is forbidden, and every rule that applies here changes more
        assert (changed == 15) == (case in NO_EFFECT)


@pytest.mark.parametrize("forced", [{}, {"forced_first_token": 6, "forced_last_token": 5}])
def test_the_first_positions_have_their_rules(forced):
    """Before as many tokens as a sequence has, at the first free position, and before it."""
    config, _, src = random_model("vaswani2017", vocab_size=VOCABULARY)
    random = np.random.default_rng(2)
    options = {
        "begin_suppressed_tokens": (3, 4),
        "banned_sequences": ((1, 5), (1, 6), (7, 1, 7)),
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 3,
        **forced,
    }
    prefix = np.array([[5, 2], [7, 0], [0, 0], [1, 0], [0, 0]])
    limits = np.array([1, 2, 1, 12, 3])
    for step in range(4):
        scores = random.normal(size=(5, 2, VOCABULARY)).astype(np.float32)
        history = random.integers(1, VOCABULARY, (5, 2, LENGTH + 3)).astype(np.int32)
        history[..., 0] = config.bos_id
        for row in range(5):
            given = prefix[row][prefix[row] > 0]
            history[row, :, 1 : 1 + len(given)] = given
        assert assert_rules(config, src, scores, history, step, options, prefix, limits) > 10


@pytest.mark.parametrize("beam_size", [1, 3])
def test_rules_hold_in_a_search(reversal_model, beam_size):
    config, params = reversal_model
    src, _ = sequences(6, seed=7)
    prefix = np.array([[5, 6], [7, 0], [0, 0], [8, 9], [2, 0], [10, 0]], np.int32)
    limits = np.array([LONGEST + 1, 9, LONGEST + 1, 7, 12, 8])
    options = {
        "max_new_tokens": LONGEST + 1,
        "min_new_tokens": 5,
        "banned_tokens": (11, 13),
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2,
        "start_token": 4,
        "forced_first_token": 9,
        "forced_last_token": 2,
        "length_penalty": 1.0,
        "renormalize": True,
        "early_stopping": False,
    }
    found = quick_generate(
        params, config, src, beam_size=beam_size, prefix=prefix, length_limits=limits, **options
    )
    free = quick_generate(params, config, src, beam_size=beam_size, max_new_tokens=LONGEST + 3)
    assert (found.tokens != free.tokens).any(axis=(1, 2)).sum() >= 4
    for row, source in enumerate(src):
        given = tuple(int(id) for id in prefix[row] if id)
        plain = Plain(
            params, config, source, prefix=given, **options | {"max_new_tokens": int(limits[row])}
        )
        expected = plain.greedy() if beam_size == 1 else plain.beam(beam_size)[0]
        assert_found(found, row, [expected], config, atol=3e-5)
        assert found.lengths[row, 0] > len(given) + options["min_new_tokens"]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_forced_tokens_and_prefixes_add_nothing_to_the_score(reversal_model, beam_size):
    """The same tokens, given in three ways, and the sum of the log-probabilities of the others."""
    config, params = reversal_model
    src, _ = sequences(6, seed=8)
    options = {"max_new_tokens": LONGEST, "beam_size": beam_size}
    forced = quick_generate(
        params, config, src, **options | {"max_new_tokens": LONGEST + 1}, forced_first_token=9
    )
    prefixed = quick_generate(params, config, src, prefix=np.full((6, 1), 9), **options)
    assert (forced.tokens[:, :, 0] == 9).all()
    for a, b in zip(forced, prefixed, strict=True):  # without a penalty, the length does not matter
        np.testing.assert_array_equal(a, b)
    both = quick_generate(
        params, config, src, prefix=np.full((6, 1), 9), forced_first_token=5, **options
    )
    np.testing.assert_array_equal(both.tokens, prefixed.tokens)  # not forced after a prefix
    begun = np.concatenate([np.full((6, 1), config.bos_id), forced.tokens[:, 0, :-1]], axis=1)
    logits = run(params, config, src, begun)
    seen = jax.nn.log_softmax(logits)[
        np.arange(6)[:, None], np.arange(LONGEST + 1), forced.tokens[:, 0]
    ]
    chosen = (np.arange(LONGEST + 1) > 0) & (np.arange(LONGEST + 1) < forced.lengths)
    np.testing.assert_allclose(
        forced.scores[:, 0], np.where(chosen, seen, 0).sum(axis=1), atol=3e-5
    )


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
