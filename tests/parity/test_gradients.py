"""Beyond the forward pass: the gradient of every leaf, and 20 optimizer steps."""

import jax
import numpy as np
import pytest

from tests.parity.ladder import bound, check_float32
from tests.parity.measure import (
    SETTINGS,
    STEPS,
    gradient_errors,
    gradient_functions,
    random_batches,
    step_functions,
    train,
    training_errors,
    worst,
)
from tests.tiers import DISTINCT_MODELS, MODELS, tiered


@pytest.mark.parametrize(
    "trainable_pair",
    tiered(MODELS, ["shared_heads", "umt5", "pre_norm_decoder"], DISTINCT_MODELS),
    indirect=True,
)
def test_gradient_of_every_leaf(trainable_pair):
    preset, dtype, pair = trainable_pair
    (batch,) = random_batches(pair.config, 1)
    for objective, (ours, theirs) in gradient_functions(pair, batch).items():
        what = f"{preset} {dtype} gradient of the {objective}"
        if dtype == "float32":
            check_float32(what, pair, ours, theirs, kind="gradient")
            continue
        leaf, measured = worst(gradient_errors(ours(pair.params), theirs(pair.module)))
        print(f"{what}: {measured:.1e} in {leaf}")
        assert measured <= bound("gradient", dtype), (objective, leaf)


@pytest.mark.parametrize(
    "trainable_pair", tiered(MODELS, [], ["pre_norm_memory_norm", "merged"]), indirect=True
)
def test_twenty_steps_of_adam(trainable_pair):
    preset, dtype, pair = trainable_pair
    batches = random_batches(pair.config, STEPS)
    if dtype == "float32":
        functions = step_functions(pair, batches, SETTINGS)
        check_float32(f"{preset} after {STEPS} steps", pair, *functions, kind="adam")
        return
    trained = train(pair, batches, SETTINGS)
    leaf, measured = worst(training_errors(trained))
    print(f"{preset} {dtype} after {STEPS} steps: {measured:.1e} in {leaf}")
    assert measured <= bound("adam", dtype), leaf
    losses = np.abs(trained.our_losses - trained.their_losses) / trained.their_losses
    assert losses.max() <= 1e-13
    change = jax.tree.map(
        lambda after, before: np.abs(after - before).max(), trained.ours, pair.params
    )
    assert max(jax.tree.leaves(change)) > 0.01  # the steps are no trifles
