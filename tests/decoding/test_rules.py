"""Each rule against its definition in numpy, and in a search with the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.decoding import GenerationConfig
from jax_transformer.decoding.rules import apply_rules, make_rules
from tests.decoding.plain import biased, quick_generate, random_model

STEP, LENGTH, VOCABULARY = 9, 12, 8  # few ids, so that sequences repeat
NO_EFFECT = [
    {},
    {"banned_sequences": ((*range(1, 8), *range(1, 8)),)},  # longer than any target
    {"no_repeat_ngram_size": 10**9},
    {"encoder_no_repeat_ngram_size": 10**9},
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


def completed(sequences, sequence):
    """Return the last ids of those sequences whose other ids `sequence` ends with."""
    return [
        last
        for *before, last in sequences
        if not before or list(before) == sequence[-len(before) :]
    ]


def by_definition(options, config, scores, target, source, prefix, limit):
    """Return the scores [V] of the token after a target of one row, as the rules change them."""
    sequence, changed = [config.bos_id, *target], scores.copy()
    eos_ids = options.eos_ids or (config.eos_id,)
    for token in set(sequence) if options.repetition_penalty else ():
        factor = options.repetition_penalty
        changed[token] = scores[token] * (factor if scores[token] < 0 else 1 / factor)
    words = [id for id in source.tolist() if id != config.pad_id]
    for size, text in (
        (options.no_repeat_ngram_size, sequence),
        (options.encoder_no_repeat_ngram_size, words),
    ):
        starts = range(len(text) - size + 1) if size else ()
        changed[completed([text[start : start + size] for start in starts], sequence)] = -np.inf
    banned = [ids for ids in options.banned_sequences if ids not in zip(eos_ids)]
    changed[completed(banned, sequence)] = -np.inf
    changed[list(options.banned_tokens)] = -np.inf
    if not options.allow_padding:
        changed[config.pad_id] = -np.inf
    if len(target) - len(prefix) < (options.min_new_tokens or 0):
        changed[list(eos_ids)] = -np.inf
    forced = None if target else options.forced_first_token
    if len(target) < len(prefix):
        forced = prefix[len(target)]
    elif len(target) + 1 == len(prefix) + limit and options.forced_last_token is not None:
        forced = options.forced_last_token
    if forced is not None:
        changed[:] = -np.inf
        changed[forced] = 0
    if len(target) == max(len(prefix), options.forced_first_token is not None):
        changed[list(options.begin_suppressed_tokens)] = -np.inf
    return changed - np.log(np.exp(changed).sum()) if options.renormalize else changed


def assert_rules(config, src, scores, history, step, options, prefix, length_limits):
    """Assert that rules change scores as their definition does; return how many change."""
    options = GenerationConfig(max_new_tokens=LENGTH, **options)
    rules = make_rules(options, config, jnp.asarray(src), prefix, length_limits)
    found = jax.jit(apply_rules)(scores, history, np.full(len(src), step, np.int32), rules)
    changed = 0
    for row, beam in np.ndindex(scores.shape[:2]):
        begun = () if prefix is None else tuple(int(id) for id in prefix[row] if id)
        limit = LENGTH if length_limits is None else int(length_limits[row])
        target = history[row, beam, 1 : step + 1].tolist()
        expected = by_definition(options, config, scores[row, beam], target, src[row], begun, limit)
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


@pytest.mark.exhaustive
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
