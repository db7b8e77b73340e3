"""One step: its gradient, what cannot change it, and how often it is compiled."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import TransformerConfig, apply
from jax_transformer.kernels.execution import DEFAULT_EXECUTION
from jax_transformer.text.batches import Batch
from jax_transformer.training import step as step_module
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import cross_entropy
from jax_transformer.training.step import init_state, train_step
from tests.tiers import tiered

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
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


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

    new_state, metrics = train_step(state, example, CONFIG, SETTINGS)
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
        state, _ = train_step(start(NO_DROPOUT, PLAIN), one, NO_DROPOUT, PLAIN)
        moments.append(state.optimizer_state[0].mu)
    for a, b in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)


def test_a_batch_of_padding_gives_a_finite_step():
    nothing = Batch(*(np.zeros((4, 6), np.int32) for _ in range(3)))
    state, metrics = train_step(start(), nothing, CONFIG, SETTINGS)
    assert (metrics.loss, metrics.target_tokens) == (0, 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("parts", tiered([4, 3], [4]))
def test_microbatches_make_the_step_of_the_whole_batch(parts):
    """Of 8 rows: one of four parts is all padding, one of three is filled up."""
    one, other = batch(rows=4, length=11), batch(seed=1, rows=2, length=11)
    uneven = jax.tree.map(lambda a, b: np.concatenate([a, b, np.zeros_like(b)]), one, other)
    results = []
    for count in (1, parts):
        some = dataclasses.replace(PLAIN, num_microbatches=count)
        state, metrics = train_step(start(NO_DROPOUT, PLAIN), uneven, NO_DROPOUT, some)
        results.append((metrics.loss, metrics.target_tokens, state.optimizer_state[0].mu))
    (loss, tokens, moments), (parts_loss, parts_tokens, parts_moments) = results
    assert parts_loss == pytest.approx(float(loss), rel=1e-6)
    assert parts_tokens == tokens
    for a, b in zip(*map(jax.tree.leaves, (parts_moments, moments)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)


@pytest.mark.exhaustive
def test_microbatches_drop_each_its_own():
    settings = TrainingConfig(num_microbatches=2)
    half = jax.tree.map(jnp.asarray, batch(rows=2))
    twice = jax.tree.map(lambda ids: jnp.repeat(ids, 2, axis=0), half)  # parts take turns
    params, key = init_state(CONFIG, settings).params, jax.random.key(0)

    def loss(example, key, settings):
        run = jax.jit(step_module._loss_and_gradients, static_argnums=(3, 4, 5))
        return float(run(params, example, key, CONFIG, settings, DEFAULT_EXECUTION)[0])

    one, other = (loss(half, part, TrainingConfig()) for part in jax.random.split(key, 2))
    assert one != other
    assert loss(twice, key, settings) == pytest.approx((one + other) / 2, rel=1e-5)


# Ids of a source.
NOT_FINITE = {"NaN loss": 3, "NaN gradient": 4, "infinite gradient": 5, "infinite square": 2}
SPOILT_BY = NOT_FINITE | {"high loss": 6}


@pytest.fixture(scope="module")
def spoilt_step():
    """Return a compiled step whose loss or gradient an id of the source spoils."""
    honest = step_module._loss_and_gradients

    def spoilt(params, example, *rest):
        loss, gradients = honest(params, example, *rest)
        has = {name: jnp.any(example.src == token) for name, token in SPOILT_BY.items()}
        loss = jnp.where(has["NaN loss"], jnp.nan, loss * jnp.where(has["high loss"], 50, 1))
        added = jnp.where(has["infinite gradient"], jnp.inf, 0)
        added = jnp.where(has["NaN gradient"], jnp.nan, added)
        added = jnp.where(has["infinite square"], 1e30, added)
        inner = gradients["decoder"]["layers_0"]["feed_forward"]["inner"]
        inner["bias"] = inner["bias"].at[1].add(added)
        return loss, gradients

    # These settings are of no other test: no other trace of the step is found for them.
    settings = TrainingConfig(warmup_steps=400, clip_norm=1.0, adam_beta1=0.91, spike_factor=5.0)
    make = jax.jit(lambda state, example: train_step(state, example, CONFIG, settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "_loss_and_gradients", spoilt)
        return settings, make.lower(start(CONFIG, settings), batch()).compile()


@pytest.mark.parametrize("bad", tiered(NOT_FINITE, quick=["NaN loss", "infinite square"]))
def test_a_step_that_is_not_finite_leaves_the_state_and_the_next_one_is_made(bad, spoilt_step):
    settings, make = spoilt_step
    good = [jax.tree.map(lambda ids: np.maximum(ids, 7), batch(seed)) for seed in range(3)]
    evil = good[0]._replace(src=np.full_like(good[0].src, SPOILT_BY[bad]))

    def run(batches):
        state, finite = start(CONFIG, settings), []
        for example in batches:
            before = state
            state, metrics = make(state, example)
            finite.append(bool(metrics.finite))
            assert not metrics.spike
            if not metrics.finite:
                assert leaves_equal(state[:3], before[:3])
                # A loss that is not finite is none of the recent ones; NaN fills up their window.
                np.testing.assert_array_equal(state.recent_losses, before.recent_losses)
        return state, finite

    clean, _ = run(good)
    assert np.isfinite(clean.recent_losses).sum() == len(good)
    state, finite = run([evil, good[0], evil, evil, evil, good[1], *[evil] * 11, good[2]])
    assert finite == [False, True, False, False, False, True, *[False] * 11, True]
    assert leaves_equal(state[:3], clean[:3])
    np.testing.assert_array_equal(state.recent_losses, clean.recent_losses)


def test_a_spike_is_left_out_and_a_shift_accepted(spoilt_step):
    settings, make = spoilt_step
    good = Batch(*(np.maximum(ids, 7) for ids in batch()[:3]))
    high = good._replace(src=np.full_like(good.src, SPOILT_BY["high loss"]))
    window = step_module.SPIKE_WINDOW

    def run(examples):
        state, spikes = start(CONFIG, settings), []
        for example in examples:
            before = state
            state, metrics = make(state, example)
            spikes.append(bool(metrics.spike))
            assert leaves_equal(state[:3], before[:3]) == spikes[-1]
        return np.array(spikes)

    early = run([good, high, good])  # nothing to measure by yet
    assert not early.any()
    once = run([*[good] * window, high, good, good])
    np.testing.assert_array_equal(np.flatnonzero(once), [window])
    shifted = run([*[good] * window, *[high] * window])
    assert shifted.sum() == window // 2  # then the median has moved
    assert not shifted[-window // 2 :].any()


def test_the_average_follows_the_parameters():
    state = start()
    expected = jax.tree.map(np.asarray, state.params)
    for step, decay in enumerate((0.1, 2 / 11, 0.25, 0.3, 0.3)):
        state, _ = train_step(state, batch(step), CONFIG, SETTINGS)
        expected = jax.tree.map(
            lambda average, new, decay=decay: decay * average + (1 - decay) * new,
            expected,
            jax.device_get(state.params),
        )
    assert leaves_equal(state.eval_params, state.ema)
    for found, wanted in zip(*map(jax.tree.leaves, (state.ema, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert not leaves_equal(state.ema, state.params)
    assert (plain := init_state(CONFIG, PLAIN)).eval_params is plain.params


@pytest.mark.exhaustive
def test_bfloat16_is_what_the_model_computes_in_and_nothing_else():
    settings = dataclasses.replace(SETTINGS, compute_dtype="bfloat16")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(init_state(CONFIG, settings).params)}
    plain, plain_metrics = train_step(start(), batch(), CONFIG, SETTINGS)
    state, metrics = train_step(start(CONFIG, settings), batch(), CONFIG, settings)
    assert (
        {leaf.dtype for leaf in jax.tree.leaves(state.params)} == dtypes == {jnp.dtype("float32")}
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.optimizer_state)} == {
        leaf.dtype for leaf in jax.tree.leaves(plain.optimizer_state)
    }
    assert metrics.loss.dtype == jnp.float32
    difference = abs(float(metrics.loss) - float(plain_metrics.loss))
    assert 0 < difference < 0.01 * float(plain_metrics.loss)
    text = train_step.lower(state, batch(), CONFIG, settings).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(line.split("->")[1].count("bf16") == 1 for line in products)


@pytest.mark.exhaustive
def test_every_step_drops_others():
    losses = set()
    for step in range(3):
        state = start()._replace(step=jnp.int32(step))
        _, metrics = train_step(state, batch(), CONFIG, SETTINGS)
        losses.add(float(metrics.loss))
    assert len(losses) == 3


def test_the_state_is_donated():
    state = start()
    train_step(state, batch(), CONFIG, SETTINGS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.exhaustive
def test_no_moment_is_copied():
    shapes = jax.eval_shape(lambda: init_state(CONFIG, SETTINGS))
    program = train_step.lower(shapes, batch(), CONFIG, SETTINGS).compile().as_text()
    copied = re.findall(r"copy\(%(state_optimizer_state\w*kernel\w*)", program)
    assert copied == []
    assert "state_optimizer_state" in program
