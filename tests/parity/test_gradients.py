"""Beyond the forward pass: the gradient of every leaf, and 20 optimizer steps."""

import dataclasses

import jax
import numpy as np
import pytest

from jax_transformer import TransformerConfig
from jax_transformer.training.config import TrainingConfig
from tests.parity.ladder import bound
from tests.parity.measure import (
    SETTINGS,
    STEPS,
    gradients,
    make_pair,
    random_batches,
    train,
    trainable,
    training_errors,
    worst,
)
from tests.tiers import QUICK_PRESETS, tiered

PLAIN = TrainingConfig(
    warmup_steps=SETTINGS.warmup_steps,
    learning_rate_factor=SETTINGS.learning_rate_factor,
    label_smoothing=0.0,
)


@pytest.mark.parametrize(
    "trainable_pair",
    tiered(TransformerConfig.presets(), ["shared_heads", "umt5"]),
    indirect=True,
)
def test_gradient_of_every_leaf(trainable_pair):
    preset, dtype, pair = trainable_pair
    (batch,) = random_batches(pair.config, 1)
    for objective, errors in gradients(pair, batch).items():
        leaf, measured = worst(errors)
        print(f"{preset} {dtype} gradient of the {objective}: {measured:.1e} in {leaf}")
        assert measured <= bound("gradient", dtype), (objective, leaf)


# The gradients of every preset are compared above; an optimizer sees only the kinds of leaves.
@pytest.mark.parametrize(
    "trainable_pair", tiered(QUICK_PRESETS, ["pre_norm_memory_norm"]), indirect=True
)
def test_twenty_steps_of_adam(trainable_pair):
    preset, dtype, pair = trainable_pair
    trained = train(pair, random_batches(pair.config, STEPS), SETTINGS)
    leaf, measured = worst(training_errors(trained))
    print(f"{preset} {dtype} after {STEPS} steps: {measured:.1e} in {leaf}")
    assert measured <= bound("adam", dtype), leaf
    losses = np.abs(trained.our_losses - trained.their_losses) / trained.their_losses
    assert losses.max() <= {"float64": 1e-13, "float32": 1e-5}[dtype]
    moved = jax.tree.map(
        lambda after, before: np.abs(after - before).max(), trained.ours, pair.params
    )
    assert max(jax.tree.leaves(moved)) > 0.01  # the steps are no trifles


@pytest.fixture(scope="module")
def plain():
    """Return a model, batches, and where plain Adam leads with them."""
    jax.config.update("jax_enable_x64", True)
    pair = make_pair(trainable("vaswani2017", num_decoder_layers=1), "float64")
    batches = random_batches(pair.config, STEPS)
    yield pair, batches, train(pair, batches, PLAIN)
    jax.config.update("jax_enable_x64", False)


@pytest.mark.exhaustive  # the quick tier compares each with torch's in tests/training
@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.1},
        {"clip_norm": 0.1},
        {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "label_smoothing": 0.1},
        {"num_microbatches": 2},  # of 5 rows: two parts, unequal ones in torch
    ],
    ids=", ".join,
)
def test_settings_alone(plain, settings):
    pair, batches, without = plain
    trained = train(pair, batches, dataclasses.replace(PLAIN, **settings))
    for one in (without, trained):
        leaf, measured = worst(training_errors(one))
        assert measured <= bound("adam", "float64"), leaf
    _, moved = worst(training_errors(trained._replace(theirs=without.ours)))
    if "num_microbatches" in settings:
        assert moved <= bound("adam", "float64")
    else:
        assert moved > 1e-4  # the setting does something
