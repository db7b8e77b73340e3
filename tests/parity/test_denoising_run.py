"""Fifty steps of pre-training in both frameworks, on the same denoised texts, in float64."""

import jax
import numpy as np
import pytest

import torch_reference
from jax_transformer import init_params
from jax_transformer.text.batches import Batch, pad
from jax_transformer.text.plan import plan_epoch
from tests.parity.measure import Pair, train
from tests.runs.kill_resume import Task, tiny_task

STEPS = 50


def unpacked_batches(corpus, settings, pad_id):
    """Yield batches of one example a row, of one shape: torch_reference packs no rows."""
    epoch = 0
    while True:
        for planned in plan_epoch(corpus, settings, epoch):
            sources, targets = zip(*corpus.read_pieces(planned.pieces[:8]).sides(), strict=True)
            rows = (sources, [row[:-1] for row in targets], [row[1:] for row in targets])
            rows = ([*map(np.ndarray.tolist, side), *[[]] * (8 - len(side))] for side in rows)
            yield Batch(*(pad(side, pad_id, 64) for side in rows))
        epoch += 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("objective", ["span_corruption", "infilling"])
def test_the_losses_of_fifty_steps_are_those_of_torch(objective, x64):
    task = Task(STEPS, batching="packed", objective=objective)
    run, corpus, _ = tiny_task(task)
    config, settings = run.config, run.training_config
    config = type(config)(**config.to_dict() | {"dropout": 0.0})
    batches = unpacked_batches(corpus, settings, config.pad_id)
    params = init_params(jax.random.key(0), config)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    module = torch_reference.Transformer(config).double()
    batches = [next(batches) for _ in range(STEPS)]
    trained = train(Pair(config, params, module), batches, settings, jax.jit)
    difference = np.abs(trained.our_losses - trained.their_losses).max()
    print(
        f"{objective}: loss {trained.our_losses[0]:.2f} to {trained.our_losses[-1]:.2f}, ", end=""
    )
    print(f"the curves at most {difference:.1e} apart")
    assert difference <= 1e-12
    assert trained.our_losses[-1] < trained.our_losses[0]
