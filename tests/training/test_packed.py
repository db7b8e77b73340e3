"""Packed batches: every pair as if it were alone, and the gradient as in buckets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import apply
from jax_transformer.text.batches import Batch, make_batch
from jax_transformer.text.plan import plan_epoch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import batch_loss, decode_batch
from jax_transformer.training.step import init_state
from tests.convert.tools import gradient_error
from tests.models import random_params, small_config
from tests.parity.ladder import ROUNDED, bound, check_errors, error, moved, widen
from tests.text.texts import corpus_of
from tests.tiers import tiered
from tests.training.steps import run_step

LONGEST = 9
PACKED = TrainingConfig(batching="packed", pack_length=23, max_tokens=3 * 23)
PRESETS = ("vaswani2017", "pre_norm", "marian", "windows", "ssru")

loss_and_gradients = jax.jit(
    jax.value_and_grad(batch_loss, has_aux=True), static_argnames=("config", "label_smoothing")
)


def make_config(preset, **overrides):
    """Return a small model of 0 as padding, whose position table is shorter than a packed row."""
    ids = {"pad_id": 0, "bos_id": 0 if preset == "marian" else 1, "eos_id": 2}
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "max_length": LONGEST}
    return small_config(preset, **(ids | sizes | overrides))


def make_corpus(config):
    random = np.random.default_rng(0)

    def sentence(begin=()):
        ids = random.integers(3, config.tgt_vocab_size, random.integers(0, LONGEST))
        return np.array([*begin, *ids[: LONGEST - 1], config.eos_id], np.int32)

    vocab_size = min(config.src_vocab_size, config.tgt_vocab_size)
    sources = [np.minimum(sentence(), vocab_size - 1) for _ in range(11)]
    targets = [np.minimum(sentence([config.bos_id]), vocab_size - 1) for _ in range(11)]
    return corpus_of(tuple(sources), tuple(targets), vocab_size, vocab_size)


def first_batch(config):
    """Return a packed batch of three rows, of several pairs each."""
    corpus = make_corpus(config)
    return make_batch(corpus, plan_epoch(corpus, PACKED, epoch=0)[0])


@pytest.fixture(params=tiered(["float32", "float64"], quick=["float64"]))
def dtype(request):
    if request.param == "float64":
        request.getfixturevalue("x64")
    return request.param


@pytest.mark.parametrize("preset", tiered(PRESETS, quick=["marian"]))
def test_logits_of_a_pair_are_those_of_the_pair_alone(preset, dtype):
    config = make_config(preset)
    params, corpus = random_params(config, dtype=np.dtype(dtype)), make_corpus(config)
    plan = plan_epoch(corpus, PACKED, epoch=0)
    assert max(np.bincount(planned.member_rows).max() for planned in plan) >= 3
    packed, alone = (
        jax.jit(function, static_argnames="config") for function in (decode_batch, apply)
    )
    worst, compared = 0.0, 0
    for planned in plan:
        batch = make_batch(corpus, planned)
        logits = np.asarray(packed(params, batch, config))
        placed = zip(planned.members, planned.member_rows, strict=True)
        for index, (member, row) in enumerate(placed):
            number = 1 + np.count_nonzero(planned.member_rows[:index] == row)
            own = logits[row, batch.tgt_segments[row] == number]
            ((source, target),) = corpus.read(np.array([member])).sides()
            target = target[:-1]
            src = np.pad(source, (0, LONGEST - len(source)))[None]
            tgt = np.pad(target, (0, LONGEST - len(target)))[None]
            expected = alone(params, config, src, tgt)[0, : len(target)]
            worst, compared = max(worst, error(own, expected)), compared + 1
    print(f"\n{preset} {dtype}: {compared} packed pairs, logits differ by at most {worst:.1e}")
    assert compared == len(corpus)
    assert worst <= (ROUNDED if dtype == "float32" else bound("logits", dtype))


@pytest.mark.parametrize("preset", tiered(PRESETS, quick=["marian"]))
@pytest.mark.exhaustive
def test_gradients_are_those_of_the_same_pairs_in_buckets(preset, dtype):
    config = make_config(preset)
    params, corpus = random_params(config, dtype=np.dtype(dtype)), make_corpus(config)
    in_buckets = dataclasses.replace(PACKED, batching="buckets", bucket_count=1)

    def mean(params, settings=in_buckets):
        sums = [
            jax.device_get(loss_and_gradients(params, make_batch(corpus, planned), config, 0.1))
            for planned in plan_epoch(corpus, settings, epoch=0)
        ]
        (loss, count), gradients = jax.tree.map(lambda *leaves: sum(leaves), *sums)
        assert count == corpus.side_lengths(np.arange(len(corpus)))[:, 1].sum()
        return loss, jax.tree.map(lambda leaf: leaf / leaf.dtype.type(count), gradients)

    (loss, gradients), (wanted_loss, wanted) = results = mean(params, PACKED), mean(params)
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True)
    worst = max(gradient_error(one, other) for one, other in leaves)
    print(f"\n{preset} {dtype}: gradients differ by at most {worst:.1e} of a leaf's largest")
    assert abs(loss - wanted_loss) <= bound("gradient", dtype) * wanted_loss
    if dtype == "float64":
        assert worst <= bound("gradient", dtype)
        return
    with jax.enable_x64(True):
        wide = widen(params)
        exact = mean(wide)[1], mean(wide, PACKED)[1]
        near = [mean(numbers)[1] for numbers in moved(wide)]
    check_errors(preset, [one for _, one in reversed(results)], exact, near, kind="gradient")


def test_the_other_pairs_of_a_row_may_be_anything():
    config = make_config("pre_norm")
    params, batch = random_params(config), first_batch(config)
    second_src, second_tgt = batch.src_segments == 2, batch.tgt_segments == 2
    others = batch._replace(
        src=np.where(second_src, batch.src, 5), tgt_in=np.where(second_tgt, batch.tgt_in, 7)
    )
    packed = jax.jit(decode_batch, static_argnames="config")
    logits, changed = (np.asarray(packed(params, one, config)) for one in (batch, others))
    assert np.array_equal(changed[second_tgt], logits[second_tgt])
    assert not np.isclose(changed[batch.tgt_segments == 1], logits[batch.tgt_segments == 1]).all()


@pytest.mark.exhaustive
def test_microbatches_make_the_step_of_the_whole_batch():
    config = make_config("marian")
    batch = first_batch(config)
    assert len(batch.src) == 3
    start, moments = init_state(config, PACKED), []
    for parts in (1, 2):  # of 3 rows: the second part is filled up with padding
        settings = dataclasses.replace(PACKED, num_microbatches=parts)
        state, metrics = run_step(config, settings)(jax.tree.map(jnp.copy, start), batch)
        assert metrics.target_tokens == np.count_nonzero(batch.tgt_segments)
        moments.append(jax.tree.leaves(optax.tree.get(state.optimizer_state, "mu")))
    for one, other in zip(*moments, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)


def test_dropout_follows_its_key():
    config = make_config("pre_norm", dropout=0.5)
    params, batch = random_params(config), first_batch(config)
    run = jax.jit(batch_loss, static_argnames=("config", "label_smoothing"))
    keys = (None, *map(jax.random.key, (1, 1, 2)))
    without, one, same, other = (float(run(params, batch, config, 0.0, key)[0]) for key in keys)
    assert one == same
    assert len({without, one, other}) == 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", tiered([(0, 6), (4, 0), (4, 6)], quick=[(0, 6)]))
def test_a_batch_of_nothing_is_zero_of_zero_with_no_gradient(packed, shape):
    config = make_config("pre_norm")
    nothing = Batch(*(np.zeros(shape, np.int32) for _ in range(5 if packed else 3)))
    (total, count), gradients = loss_and_gradients(random_params(config), nothing, config, 0.1)
    assert (total, count) == (0, 0)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))
