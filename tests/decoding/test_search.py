"""Greedy and beam search: what ends them, and what they do not depend on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import decode, encode, generate
from jax_transformer.decoding import search
from jax_transformer.decoding.beam import _is_done
from jax_transformer.decoding.greedy import likeliest
from jax_transformer.decoding.hypotheses import start_state
from jax_transformer.decoding.rules import length_divisor
from tests.decoding.plain import (
    assert_equal,
    biased,
    quick_generate,
    random_model,
)
from tests.decoding.reversing import MAX_NEW_TOKENS, sources
from tests.models import unchecked
from tests.tiers import tiered

run_decode = jax.jit(decode, static_argnames="config")


@pytest.mark.parametrize("vocabulary", [1, 5, 255, 256, 257, 511, 512, 513, 3000])
def test_the_likeliest_id_is_the_lowest_of_the_best(vocabulary):
    scores = np.random.default_rng(vocabulary).integers(0, 1000, (40, vocabulary))
    scores = np.where(scores % 3, scores, -np.inf).astype(np.float32)
    scores[0] = -np.inf
    scores[1, -1] = 1000
    assert np.array_equal(jax.jit(likeliest)(scores), scores.argmax(1))
    # XLA may compute a score twice and round it differently: no choice may need two equal ones.
    assert " eq " not in str(jax.make_jaxpr(likeliest)(scores))


@pytest.mark.parametrize("early_stopping", tiered([True, False, "never"], [False]))
def test_fewer_hypotheses_are_the_best_ones(reversal_model, early_stopping):
    """And the loop, which may stop earlier for them, finds them all the same."""
    config, params = reversal_model
    options = {"max_new_tokens": MAX_NEW_TOKENS, "beam_size": 4, "length_penalty": 0.6}
    options["early_stopping"] = early_stopping
    different = 0
    for seed in range(5):
        src = sources(config, 6, seed)
        every = quick_generate(params, config, src, num_hypotheses=4, **options)
        assert (np.diff(every.scores, axis=1) <= 0).all()
        best = quick_generate(params, config, src, **options)
        assert_equal(best, jax.tree.map(lambda leaf: leaf[:, :1], every))
        greedy = quick_generate(params, config, src, max_new_tokens=MAX_NEW_TOKENS)
        different += np.any(best.tokens != greedy.tokens, axis=(1, 2)).sum()
    assert different > 3


@pytest.mark.usefixtures("fresh_caches")
@pytest.mark.parametrize("beam_size", [1, 4])
def test_the_loop_ends_with_the_last_row(reversal_model, monkeypatch, beam_size):
    """Counts the steps of the compiled program: it stops as soon as nothing can change."""
    config, params = reversal_model
    src = sources(config, 4, seed=3, longest=4)
    steps = []

    def counted(*args, **options):
        jax.debug.callback(lambda: steps.append(1))
        return next_step(*args, **options)

    next_step = search.next_step
    monkeypatch.setattr(search, "next_step", counted)
    found = jax.block_until_ready(
        generate(params, config, src, max_new_tokens=20, beam_size=beam_size)
    )
    jax.effects_barrier()
    assert found.lengths.max() <= len(steps) < 15
    if beam_size == 1:
        assert len(steps) == found.lengths.max()


@pytest.mark.parametrize("beam_size", tiered([1, 3], [3]))
def test_rows_that_never_end_are_full_and_have_no_end(beam_size):
    never = np.zeros(8)
    never[2] = -np.inf
    config, params, src = biased(never)
    found = quick_generate(params, config, src, max_new_tokens=5, beam_size=beam_size)
    assert (found.lengths == 5).all()
    assert not np.isin(found.tokens, (config.eos_id, config.pad_id)).any()
    np.testing.assert_allclose(found.scores, -5 * np.log(7), rtol=1e-6)


@pytest.mark.parametrize("beam_size", tiered([1, 3], [3]))
def test_an_end_at_once_is_all(beam_size):
    at_once = np.zeros(8)
    at_once[2] = 10
    config, params, src = biased(at_once)
    found = quick_generate(params, config, src, max_new_tokens=5, beam_size=beam_size)
    assert (found.tokens[..., 0] == config.eos_id).all()
    assert (found.tokens[..., 1:] == config.pad_id).all()
    assert (found.lengths == 1).all()
    # One token of probability e^10 / (e^10 + 7), and nothing for the padding after it.
    np.testing.assert_allclose(found.scores, -np.log1p(7 * np.exp(-10)), rtol=0, atol=1e-6)


def test_ties_take_the_lowest_id_and_then_the_lowest_beam():
    config, params, src = biased([0, 0, 0, 0, 9, 9, 9, 9])
    found = quick_generate(params, config, src, max_new_tokens=5)
    assert (found.tokens == 4).all()
    found = quick_generate(params, config, src, max_new_tokens=2, beam_size=4, num_hypotheses=4)
    assert found.tokens.tolist() == [[[4, 4], [4, 5], [4, 6], [4, 7]]] * len(src)
    everything = np.zeros(8)  # the end too: a finished target stays before a later one
    config, params, src = biased(everything)
    found = quick_generate(params, config, src, max_new_tokens=5, beam_size=3)
    assert (found.tokens[:, 0] == np.array([2, 0, 0, 0, 0])).all()


def test_padding_is_never_generated():
    likeliest = np.zeros(8)
    likeliest[0] = 9
    config, params, src = biased(likeliest)
    for options in ({}, {"beam_size": 3}, {"key": jax.random.key(0)}):
        found = quick_generate(params, config, src, max_new_tokens=5, **options)
        filled = np.arange(5) < np.asarray(found.lengths)[..., None]
        np.testing.assert_array_equal(np.asarray(found.tokens) != config.pad_id, filled)


@pytest.mark.parametrize("beam_size", tiered([1, 4], [4]))
def test_the_rest_of_the_batch_does_not_matter(reversal_model, beam_size):
    """In another order, or alone with more padding: the same targets and scores."""
    config, params = reversal_model
    src = sources(config, 6, seed=4)
    options = {"max_new_tokens": MAX_NEW_TOKENS, "beam_size": beam_size, "length_penalty": 0.6}
    together = quick_generate(params, config, src, **options)
    assert len(np.unique(together.lengths)) > 2
    order = np.random.default_rng(0).permutation(len(src))
    rows = [(order, src[order])]
    rows += [([row], np.pad(src[[row]], ((0, 0), (0, 6)))) for row in range(len(src))]
    worst = 0.0
    for chosen, batch in rows:
        other = quick_generate(params, config, batch, **options)
        np.testing.assert_array_equal(other.tokens, together.tokens[np.array(chosen)])
        np.testing.assert_array_equal(other.lengths, together.lengths[np.array(chosen)])
        worst = max(worst, np.abs(other.scores - together.scores[np.array(chosen)]).max())
    print(f"\nbeam {beam_size}: scores differ by {worst:.0e} at most", end="")
    assert worst <= 1e-5


@pytest.mark.parametrize("preset", tiered(["vaswani2017", "t5"], ["vaswani2017"]))
def test_a_memory_is_searched_as_a_plain_loop_over_decode_does(preset):
    """The encoder has a window and positions of its own; the cross-attention has another mask."""
    ids = {"pad_id": 0, "bos_id": 0, "eos_id": 1} if preset == "t5" else {}
    config, params, src = random_model(preset, **ids)
    place, visible = np.arange(src.shape[1]), (src != config.pad_id)[:, None, None]
    window, cross = visible & (abs(place - place[:, None]) < 3), visible & (place % 4 > 0)
    positions = np.broadcast_to(place // 2, src.shape)
    memory = encode(params, config, src, window, src_positions=positions)
    tgt = np.full((len(src), 7), config.pad_id)
    tgt[:, 0], ended = config.bos_id, np.zeros(len(src), bool)
    for step in range(6):
        logits = run_decode(params, config, tgt, memory, src_mask=cross)[:, step]
        best = np.argmax(logits.at[:, config.pad_id].set(-np.inf), axis=1)
        tgt[:, step + 1] = np.where(ended, config.pad_id, best)
        ended |= best == config.eos_id
    options = {"src_mask": cross, "max_new_tokens": 6}
    found = quick_generate(params, config, src, memory=memory, **options)
    np.testing.assert_array_equal(found.tokens[:, 0], tgt[:, 1:])
    assert (found.scores != quick_generate(params, config, src, **options).scores).any()


def test_a_target_may_be_shorter_than_the_source_it_is_as_long_as():
    config, params, src = random_model("shared_heads")
    cut, whole = (quick_generate(params, config, src, max_new_tokens=most) for most in (3, 15))
    np.testing.assert_array_equal(cut.tokens, whole.tokens[..., :3])


def test_a_search_waits_for_the_most_favourable_length_that_is_still_open():
    """-1 multiplies a sum by its length, so the shortest text may be the best; 1 divides it."""
    counted, longest = jnp.array([1]), jnp.array([4])
    rules = SimpleNamespace(early_stopping="never", length_normalization="power")
    rules.length_penalty = np.float32(-1)
    kept, opened = jnp.log(jnp.array([0.36])), jnp.log(jnp.array([0.63]))
    with unchecked():
        # As the next token ends it.
        assert (opened - 0.01) / length_divisor(counted + 1, rules) > kept
        assert not _is_done(opened, kept, counted, longest, rules)
        assert _is_done(2.3 * opened, kept, counted, longest, rules)
        assert _is_done(opened, kept, longest - 1, longest, rules)  # 4 tokens: -1.85
        rules.length_penalty = np.float32(1)
        kept, opened = jnp.array([-0.3]), jnp.array([-0.9])  # of 2 tokens -.45, of 4 -.225
        assert not _is_done(opened, kept, counted, longest, rules)
        assert _is_done(opened, kept + 0.1, counted, longest, rules)
        rules.early_stopping = False  # at the present length: -.45 of 2 tokens
        assert _is_done(opened, jnp.array([-0.44]), counted + 1, longest, rules)
        assert not _is_done(opened, jnp.array([-0.46]), counted + 1, longest, rules)


@pytest.mark.parametrize(("early_stopping", "kept"), [(True, 4), (False, 4), ("never", 2)])
def test_a_source_is_done_by_as_many_finished_targets_as_its_beam_has(early_stopping, kept):
    """As in transformers; a search that looks for the best ones needs no more than those."""
    layers = [(jnp.zeros(()),)]
    cache = SimpleNamespace(ancestors=jnp.zeros((3, 4, 5)), layers=layers)
    start = np.ones(3, np.int32)
    rules = SimpleNamespace(start=start, num_hypotheses=2, early_stopping=early_stopping)
    with unchecked():
        finished = start_state((cache,), 0, rules).finished
    assert finished.tokens.shape == (3, kept, 5)
    assert finished.scores.shape == finished.lengths.shape == (3, kept)


# The two ends are the likeliest tokens, and the penalty makes the longest target the best.
TWO_ENDS = [0, 0, 9, 9, 7, 6, 0, 0]
LONGEST = {"max_new_tokens": 5, "beam_size": 2, "eos_ids": (2, 3)}
LONGEST |= {"length_penalty": 6.0, "length_normalization": "power"}


def test_several_ids_of_eos_leave_as_many_hypotheses_open_as_the_beam_has():
    config, params, src = biased(TWO_ENDS)
    found = quick_generate(params, config, src, **LONGEST)
    assert (found.lengths == 5).all()


def test_a_source_that_is_done_keeps_its_targets_while_others_go_on():
    config, params, src = biased(TWO_ENDS)
    prefix = np.full((len(src), 3), config.pad_id)
    prefix[-1] = 4
    found = quick_generate(params, config, src, prefix=prefix, early_stopping=True, **LONGEST)
    assert found.lengths[:, 0].tolist() == [1] * (len(src) - 1) + [4]
