"""Targets that begin with padding, as those of Marian: steps on batches are steps on the pairs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import apply
from jax_transformer.text.batches import make_batch
from jax_transformer.text.plan import plan_epoch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import cross_entropy
from jax_transformer.training.optimizer import adam
from jax_transformer.training.step import evaluation_step, init_state, train_step
from tests.models import random_params, small_config
from tests.parity.ladder import bound
from tests.parity.measure import Trained, training_errors
from tests.text.texts import corpus_of
from tests.tiers import tiered

STEPS = 3
CONFIG = small_config("marian", num_encoder_layers=1, num_decoder_layers=1)
PAD, EOS = CONFIG.pad_id, CONFIG.eos_id
LENGTHS = ((3, 4), (1, 6), (7, 1), (4, 2), (2, 3))  # of source and target, EOS included
SETTINGS = TrainingConfig(
    warmup_steps=4, learning_rate_factor=0.1, clip_norm=0.5, max_tokens=64, bucket_count=1
)
BATCHINGS = {
    "buckets": {},
    "microbatches": {"num_microbatches": 2},  # of five rows: one part gets a row of padding
    "packed": {"batching": "packed", "pack_length": 8},
}


@pytest.fixture(scope="module")
def corpus():
    random = np.random.default_rng(0)

    def sentence(length, start=()):
        ids = random.integers(3, PAD, length - 1)
        return np.array([*start, *ids, EOS], np.int32)

    sources = tuple(sentence(length) for length, _ in LENGTHS)
    targets = tuple(sentence(length, [CONFIG.bos_id]) for _, length in LENGTHS)
    sizes = (CONFIG.src_vocab_size, CONFIG.tgt_vocab_size)
    return corpus_of(sources, targets, *sizes, pad_id=PAD)


@pytest.fixture(scope="module")
def alone(corpus):
    """Return the parameters and losses of steps on pairs without any padding."""
    jax.config.update("jax_enable_x64", True)

    def mean_loss(params):
        sums = [
            cross_entropy(
                apply(params, CONFIG, source[None], target[None, :-1]),
                target[None, 1:],
                pad_id=-1,  # every target counts
                label_smoothing=SETTINGS.label_smoothing,
            )
            for source, target in corpus.read(np.arange(len(corpus))).sides()
        ]
        totals, counts = zip(*sums, strict=True)
        return sum(totals) / sum(counts)

    @jax.jit
    def move(params, state):
        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, state = adam(CONFIG, SETTINGS).update(gradients, state, params)
        return loss, optax.apply_updates(params, updates), state

    params, losses = random_params(CONFIG, dtype=np.float64), []
    state = adam(CONFIG, SETTINGS).init(params)
    for _ in range(STEPS):
        loss, params, state = move(params, state)
        losses.append(float(loss))
    yield params, losses
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("batching", tiered(BATCHINGS, quick=["packed"]))
@pytest.mark.exhaustive
def test_steps_on_a_padded_batch_are_those_on_its_pairs(corpus, alone, batching):
    assert CONFIG.bos_id == PAD != 0
    settings = dataclasses.replace(SETTINGS, **BATCHINGS[batching])
    (planned,) = plan_epoch(corpus, settings, epoch=0)
    batch = make_batch(corpus, planned)
    assert (batch.tgt_in == PAD).sum() > (batch.tgt_out == PAD).sum()
    start = jax.tree.map(jnp.asarray, random_params(CONFIG, dtype=np.float64))
    total, count = evaluation_step(start, batch, CONFIG, settings)
    assert count == sum(length for _, length in LENGTHS)
    assert float(total / count) == pytest.approx(alone[1][0], rel=1e-12)
    state = init_state(CONFIG, settings, start)
    for expected in alone[1]:
        state, metrics = train_step(state, batch, CONFIG, settings)
        assert metrics.target_tokens == count
        assert float(metrics.loss) == pytest.approx(expected, rel=1e-12)
    both = Trained(state.params, alone[0], np.zeros(0), np.zeros(0))
    leaf, worst = max(training_errors(both).items(), key=lambda item: item[1])
    print(f"{batching}: after {STEPS} steps {worst:.1e} in {leaf}")
    assert worst <= bound("adam", "float64")
