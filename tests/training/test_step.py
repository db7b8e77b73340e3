"""One step: its gradient, what cannot change it, and how often it is compiled."""

import dataclasses
import re
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import TransformerConfig, apply, make_train_step
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.freeze import trainable
from jax_transformer.training.objective import cross_entropy
from jax_transformer.training.optimizer import SPIKE_WINDOW, parameter_ema, refusable, with_guard
from jax_transformer.training.step import (
    _split_rows,
    _sum_of_microbatches,
    attention_choice,
    init_state,
    make_run_step,
    training_execution,
)
from tests.tiers import tiered
from tests.training.steps import run_step

CONFIG = TransformerConfig(
    src_vocab_size=13,
    tgt_vocab_size=13,
    d_model=8,
    num_heads=2,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.3,
)
SETTINGS = TrainingConfig(
    steps=10, warmup_steps=4, learning_rate_factor=1.0, label_smoothing=0.1, ema_decay=0.3
)
NO_DROPOUT = dataclasses.replace(CONFIG, dropout=0.0)
PLAIN = TrainingConfig(warmup_steps=20, label_smoothing=0.0)


draw = jax.jit(init_state, static_argnums=(0, 1))


def start(config=CONFIG, settings=SETTINGS):
    """Return a new state before the first step: a step deletes what it is given."""
    return draw(config, settings)


def batch(seed=0, rows=4, length=6):
    random = np.random.default_rng(seed)
    src, tgt = random.integers(3, 13, (2, rows, length)).astype(np.int32)
    src[1, 3:] = tgt[1, 4:] = CONFIG.pad_id
    tgt_in = np.roll(tgt, 1, axis=1)
    tgt_in[:, 0] = CONFIG.bos_id
    return Batch(src, tgt_in, tgt)


def leaves_equal(a, b):
    """Return whether two trees have the same bits."""
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def test_step_is_adam_on_the_gradient_of_the_mean_loss():
    state, example = start(), batch()
    key = jax.random.fold_in(state.key, 0)

    def mean_loss(params):
        logits = apply(params, CONFIG, example.src, example.tgt_in, dropout_key=key)
        total, count = cross_entropy(logits, example.tgt_out, CONFIG.pad_id, 0.1)
        return total / count

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    rate = 8**-0.5 * 4**-1.5
    optimizer = optax.adam(rate, b1=0.9, b2=0.98, eps=1e-9)

    @jax.jit
    def move(params, gradients):
        updates, _ = optimizer.update(gradients, optimizer.init(params))
        return optax.apply_updates(params, updates)

    expected, gradients = jax.device_get((move(state.params, gradients), gradients))

    new_state, metrics = run_step(CONFIG, SETTINGS)(state, example)
    assert metrics.loss == pytest.approx(float(loss), rel=1e-6)
    assert metrics.target_tokens == 22
    assert metrics.learning_rate == pytest.approx(rate)
    assert new_state.step == 1
    # Where a gradient is rounding noise, so is the sign of Adam's first update: the key biases.
    moved = jax.tree.map(lambda g: np.abs(g) > 1e-6, gradients)
    for actual, wanted, clear in zip(
        *map(jax.tree.leaves, (new_state.params, expected, moved)), strict=True
    ):
        np.testing.assert_allclose(actual[clear], wanted[clear], rtol=0, atol=1e-5)


@pytest.mark.exhaustive
def test_padding_rows_and_columns_change_no_step():
    example = batch()
    padded = jax.tree.map(lambda ids: np.pad(ids, ((0, 4), (0, 5))), example)
    moments = []
    for one in (example, padded):
        state, _ = run_step(NO_DROPOUT, PLAIN)(start(NO_DROPOUT, PLAIN), one)
        moments.append(optax.tree.get(state.optimizer_state, "mu"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-7), *moments)


def test_a_batch_of_padding_gives_a_finite_step():
    nothing = Batch(*(np.zeros((4, 6), np.int32) for _ in range(3)))
    state, metrics = run_step(CONFIG, SETTINGS)(start(), nothing)
    assert (metrics.loss, metrics.target_tokens) == (0, 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_every_microbatch_has_a_key_and_added_rows_are_padding():
    """By their sums alone, without a model."""

    def differentiate(trained, part, key):
        return jax.random.uniform(key), {"sum": trained["sum"] + jnp.sum(part.src)}

    example = jax.tree.map(jnp.asarray, batch(rows=4))
    example = example._replace(src_segments=example.src, tgt_segments=example.src)
    split = _split_rows(example, 3, pad_id=7)
    for ids, original, padding in zip(split, example, (7, 7, 7, 0, 0), strict=True):
        rows = ids.swapaxes(0, 1).reshape(6, -1)
        assert (rows[:4] == original).all()
        assert (rows[4:] == padding).all()
    key, trained = jax.random.key(0), {"sum": jnp.zeros((), jnp.int32)}
    loss, total = _sum_of_microbatches(differentiate, trained, split, key)
    assert loss == pytest.approx(sum(map(float, map(jax.random.uniform, jax.random.split(key, 3)))))
    assert total["sum"] == jnp.sum(split.src)


def test_a_run_has_the_microbatches_of_its_settings():
    settings = dataclasses.replace(SETTINGS, num_microbatches=2)
    make = make_run_step(CONFIG, settings)
    sizes = set(re.findall(r"i32\[[\d,]+\]", str(jax.make_jaxpr(make)(start(), batch()))))
    assert {"i32[2,2,6]", "i32[2,6]"} <= sizes


@pytest.mark.exhaustive
def test_microbatches_drop_each_its_own():
    half = jax.tree.map(jnp.asarray, batch(rows=2))
    twice = jax.tree.map(lambda ids: jnp.repeat(ids, 2, axis=0), half)  # parts take turns
    params, key = init_state(CONFIG, PLAIN).params, jax.random.key(0)

    def loss(example, key, parts):
        make = make_train_step(CONFIG, optax.sgd(1.0), num_microbatches=parts)
        return float(jax.jit(make)(params, optax.sgd(1.0).init(params), example, key)[2])

    one, other = (loss(half, part, 1) for part in jax.random.split(key, 2))
    assert one != other
    assert loss(twice, key, 2) == pytest.approx((one + other) / 2, rel=1e-5)


def test_a_step_that_is_not_finite_leaves_the_state_and_the_next_one_is_made():
    """A source with the token 3 has no finite loss: its embedding is NaN."""
    settings = dataclasses.replace(SETTINGS, weight_decay=0.01, num_microbatches=2)
    good = jax.tree.map(lambda ids: np.maximum(ids, 4), batch())
    evil = good._replace(src=np.full_like(good.src, 3))

    def run(batches):
        state, finite = start(CONFIG, settings), []
        table = state.params["source_embedding"]["embedding"].at[3].set(jnp.nan)
        state.params["source_embedding"]["embedding"] = table
        for example in batches:
            before = jax.device_get(state._replace(key=None))
            state, metrics = run_step(CONFIG, settings)(state, example)
            finite.append(bool(metrics.finite))
            if not metrics.finite:
                after = state.params, state.optimizer_state.inner, state.step
                expected = before.params, before.optimizer_state.inner, before.step
                assert leaves_equal(after, expected)
        return state, finite

    clean, _ = run([good])
    state, finite = run([evil, good, *[evil] * 3])
    assert finite == [False, True, False, False, False]
    assert leaves_equal((state.params, state.step), (clean.params, clean.step))


@pytest.mark.exhaustive
def test_a_run_rejects_the_spikes_that_its_settings_name():
    settings = dataclasses.replace(SETTINGS, spike_factor=1.01, learning_rate_factor=3.0)
    state, spikes = start(CONFIG, settings), []
    for seed in [0] * SPIKE_WINDOW + [1]:  # the loss of the batch that it knows has fallen
        made = int(state.step)
        state, metrics = run_step(CONFIG, settings)(state, batch(seed))
        spikes.append(bool(metrics.spike))
        assert state.step == made + (not metrics.spike)
    assert spikes == [False] * SPIKE_WINDOW + [True]


def ragged_step(optimizer, **options):
    """Return a step on rows of these numbers of tokens, and what it is called with.

    Of four parts one is all padding; of three, one is filled up.
    """
    src, tgt = np.random.default_rng(3).integers(3, 13, (2, 8, 11)).astype(np.int32)
    for row, length in enumerate((11, 6, 2, 0, 1, 3, 11, 0)):
        src[row, length:] = tgt[row, length:] = CONFIG.pad_id
    example = Batch(src, np.roll(tgt, 1, axis=1), tgt)
    params = init_state(CONFIG, PLAIN).params
    make = jax.jit(make_train_step(NO_DROPOUT, optimizer, label_smoothing=0.1, **options))
    trained = trainable(params, options.get("freeze", ()))
    return make, params, optimizer.init(trained), example


@pytest.mark.parametrize("parts", tiered([4, 3], [3]))
def test_the_public_step_with_microbatches_is_that_of_one_large_batch_of_ragged_rows(parts):
    results = []
    for count in (1, parts):
        make, params, state, example = ragged_step(optax.sgd(1.0), num_microbatches=count)
        results.append(make(params, state, example)[::2])
    (whole, loss), (summed, parts_loss) = results
    assert parts_loss == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-6), summed, whole)


def test_the_public_step_freezes_averages_and_guards_as_a_run_does():
    freeze = ("encoder/*", "source_embedding/*")
    optimizer = with_guard(optax.chain(refusable(optax.sgd(0.1)), parameter_ema(0.9)))
    make, params, state, example = ragged_step(optimizer, freeze=freeze)
    new, state, loss = make(params, state, example)
    assert np.isfinite(loss)
    assert leaves_equal(new["encoder"], params["encoder"])
    assert leaves_equal(new["source_embedding"], params["source_embedding"])
    ema = optax.tree.get(state, "ema")
    assert [*ema] == ["decoder", "output_projection", "target_embedding"]
    # The decay of the first step is 0.1.
    expected = jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, params["decoder"], new["decoder"])
    near = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(near, ema["decoder"], expected)
    nan = jax.tree.map(lambda leaf: leaf * jnp.nan, params["source_embedding"])
    same, after, _ = make(new | {"source_embedding": nan}, state, example)
    assert not after.finite
    assert leaves_equal((same["decoder"], after.inner), (new["decoder"], state.inner))


def test_the_average_follows_the_parameters():
    state = start()
    expected = jax.tree.map(np.asarray, state.params)
    for step, decay in enumerate((0.1, 2 / 11, 0.25, 0.3, 0.3)):
        state, _ = run_step(CONFIG, SETTINGS)(state, batch(step))
        expected = jax.tree.map(
            lambda average, new, decay=decay: decay * average + (1 - decay) * new,
            expected,
            jax.device_get(state.params),
        )
    ema = optax.tree.get(state.optimizer_state, "ema")
    assert leaves_equal(state.eval_params, ema)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), ema, expected)
    assert not leaves_equal(ema, state.params)
    assert (plain := init_state(CONFIG, PLAIN)).eval_params is plain.params


@pytest.mark.exhaustive
def test_bfloat16_is_what_the_model_computes_in_and_nothing_else():
    settings = dataclasses.replace(SETTINGS, compute_dtype="bfloat16")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(init_state(CONFIG, settings).params)}
    plain, plain_metrics = run_step(CONFIG, SETTINGS)(start(), batch())
    state, metrics = run_step(CONFIG, settings)(start(CONFIG, settings), batch())
    assert (
        {leaf.dtype for leaf in jax.tree.leaves(state.params)} == dtypes == {jnp.dtype("float32")}
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.optimizer_state)} == {
        leaf.dtype for leaf in jax.tree.leaves(plain.optimizer_state)
    }
    assert metrics.loss.dtype == jnp.float32
    difference = abs(float(metrics.loss) - float(plain_metrics.loss))
    assert 0 < difference < 0.01 * float(plain_metrics.loss)
    text = run_step(CONFIG, settings).lower(state, batch()).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(line.split("->")[1].count("bf16") == 1 for line in products)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_a_gpu_whose_kernels_cap_no_scores_computes_plain_attention(softcap):
    config = dataclasses.replace(NO_DROPOUT, d_kv=64, attention_softcap=softcap)
    device = Mock(jax.Device, platform="gpu", compute_capability="9.0")
    settings = dataclasses.replace(SETTINGS, compute_dtype="bfloat16")
    expected = "cudnn" if softcap is None else "plain"
    assert training_execution(device, config, settings).attention == expected
    assert attention_choice(device, config, settings).implementation == expected


def test_every_step_drops_others():
    losses = set()
    for step in range(3):
        state = start()._replace(step=jnp.int32(step))
        _, metrics = run_step(CONFIG, SETTINGS)(state, batch())
        losses.add(float(metrics.loss))
    assert len(losses) == 3


def test_the_state_is_donated():
    state = start()
    run_step(CONFIG, SETTINGS)(state, batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.exhaustive
def test_no_moment_is_copied():
    shapes = jax.eval_shape(lambda: init_state(CONFIG, SETTINGS))
    program = run_step(CONFIG, SETTINGS).lower(shapes, batch()).compile().as_text()
    copied = re.findall(r"copy\(%(state_optimizer_state\w*kernel\w*)", program)
    assert copied == []
    assert "state_optimizer_state" in program
