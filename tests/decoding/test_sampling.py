"""Draws follow their distribution, depend on the key alone, and are scored by the model."""

import functools

import jax
import numpy as np
import pytest

from jax_transformer import InputError, score
from jax_transformer.decoding.sampling import sample
from tests.decoding.plain import quick_generate
from tests.decoding.reversing import MAX_NEW_TOKENS, sources

ROWS = 20_000
LOGITS = np.log(np.array([0.3, 0.05, 0.25, 0.0, 0.2, 0.1, 0.1], np.float32) + 1e-30)
LOGITS[3] = -np.inf


def softmax(logits):
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def only(*ids, temperature=1.0):
    return softmax(np.where(np.isin(np.arange(7), ids), LOGITS / temperature, -np.inf))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, only(0, 1, 2, 4, 5, 6)),
        ({"temperature": 0.5}, only(0, 1, 2, 4, 5, 6, temperature=0.5)),
        ({"top_k": 3}, only(0, 2, 4)),
        ({"top_k": 4}, only(0, 2, 4, 5)),  # the lower id of a tie
        ({"top_p": 1e-6}, only(0)),
        ({"top_p": 0.31}, only(0, 2)),
        ({"top_p": 0.7}, only(0, 2, 4)),
        ({"top_p": 1.0}, only(0, 1, 2, 4, 5, 6)),
        ({"top_p": 0.6, "top_k": 3}, only(0, 2)),  # of 0.75, not of 1
        ({"top_p": 0.5, "temperature": 9.0}, only(0, 2, 4, temperature=9.0)),
    ],
    ids=str,
)
def test_draws_have_their_frequencies(options, expected):
    options = {
        name: value if name == "top_k" else np.float32(value) for name, value in options.items()
    }
    logits, steps = np.broadcast_to(LOGITS, (ROWS, 7)), np.full(ROWS, 3, np.int32)
    drawn = jax.jit(sample, static_argnames="top_k")(logits, steps, jax.random.key(0), **options)
    frequencies = np.bincount(drawn, minlength=7) / ROWS
    assert (frequencies[expected == 0] == 0).all()
    deviation = np.sqrt(expected * (1 - expected) / ROWS)
    assert (np.abs(frequencies - expected) <= 4 * deviation + 1e-9).all()


def test_rows_and_steps_draw_apart():
    draw = functools.partial(jax.jit(sample), key=jax.random.key(0))
    logits, steps = np.broadcast_to(LOGITS, (ROWS, 7)), np.zeros(ROWS, np.int32)
    first, second = draw(logits, steps), draw(logits, steps + 1)
    likely = np.square(softmax(LOGITS)).sum()  # that two draws agree
    assert np.mean(first == second) == pytest.approx(likely, abs=0.02)
    assert np.mean(first[1:] == first[:-1]) == pytest.approx(likely, abs=0.02)
    np.testing.assert_array_equal(draw(logits[:5], steps[:5]), first[:5])


def test_the_key_decides_and_the_model_scores(reversal_model):
    config, params = reversal_model
    src = sources(config, 6, seed=9)
    draw = functools.partial(quick_generate, params, config, max_new_tokens=MAX_NEW_TOKENS)
    first = draw(src, key=jax.random.key(0), temperature=2.0)
    again = draw(src, key=jax.random.key(0), temperature=2.0)
    other = draw(src, key=jax.random.key(1), temperature=2.0)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()
    expected = jax.jit(score, static_argnames="config")(params, config, src, first.tokens[:, 0])
    np.testing.assert_allclose(first.scores[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_a_key_for_each_row_is_all_that_its_draws_depend_on(reversal_model):
    config, params = reversal_model
    src = sources(config, 6, seed=9)
    keys = jax.random.split(jax.random.key(4), 6)
    draw = functools.partial(quick_generate, params, config, max_new_tokens=MAX_NEW_TOKENS)
    drawn = draw(src, key=keys, temperature=2.0)
    order = np.array([3, 0, 5, 1, 4, 2])
    moved = draw(src[order], key=keys[order], temperature=2.0)
    np.testing.assert_array_equal(moved.tokens, drawn.tokens[order])
    same = draw(np.repeat(src[:1], 6, axis=0), key=keys, temperature=9.0)
    assert len({tuple(row) for row in same.tokens[:, 0].tolist()}) > 1
    with pytest.raises(InputError, match="must be one random key"):
        draw(src, key=keys[:5])
