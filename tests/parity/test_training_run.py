"""Runs in both frameworks: the same loss at every step, and the same translations afterwards."""

import itertools

import numpy as np
import pytest

from jax_transformer.text.batches import Batch, pad
from jax_transformer.text.plan import plan_epoch
from jax_transformer.training.config import TrainingConfig
from tests.models import one_layer
from tests.parity.training_run import run, train_both
from tests.runs.kill_resume import Task, tiny_task

MODERN = {"d_ff": 44, "num_kv_heads": 1}


def check_losses(trained):
    ours, theirs = trained.our_losses, trained.their_losses
    difference = np.abs(ours - theirs).max()
    print(f"loss {ours[0]:.2f} to {ours[-1]:.2f}, the curves at most {difference:.1e} apart")
    assert difference <= 1e-12
    assert ours[-1] < ours[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "fields"), [("vaswani2017", {}), ("modern", MODERN)])
def test_a_run_on_the_embedded_task(preset, fields, x64):
    sizes = {"vocab_size": 60, "d_model": 32, "num_heads": 2, "d_ff": 64, "max_length": 64}
    config = one_layer(preset, **sizes | fields, dropout=0.0)
    settings = TrainingConfig(
        steps=120, warmup_steps=30, learning_rate_factor=0.25, max_tokens=400, bucket_count=1
    )
    result = run(config, settings, held_out=40)
    check_losses(result.trained)
    assert result.trained.our_losses[-1] < result.trained.our_losses[0] / 2
    assert result.our_translations == result.their_translations
    assert len(set(result.our_translations)) > 20


def unpacked_batches(corpus, settings, pad_id):
    """Yield batches of one example a row, of one shape: torch_reference packs no rows."""
    for epoch in itertools.count():
        for planned in plan_epoch(corpus, settings, epoch):
            sources, targets = zip(*corpus.read_pieces(planned.pieces[:8]).sides(), strict=True)
            rows = (sources, [row[:-1] for row in targets], [row[1:] for row in targets])
            rows = ([*map(np.ndarray.tolist, side), *[[]] * (8 - len(side))] for side in rows)
            yield Batch(*(pad(side, pad_id, 64) for side in rows))


@pytest.mark.exhaustive
@pytest.mark.parametrize("objective", ["span_corruption", "infilling"])
def test_fifty_steps_of_denoising(objective, x64):
    task = Task(50, batching="packed", objective=objective)
    settings, corpus, _ = tiny_task(task)
    config = type(settings.config)(**settings.config.to_dict() | {"dropout": 0.0})
    batches = unpacked_batches(corpus, settings.training_config, config.pad_id)
    batches = [next(batches) for _ in range(task.steps)]
    check_losses(train_both(config, batches, settings.training_config)[0])
