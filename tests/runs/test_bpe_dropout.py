"""A run with BPE-dropout that is resumed within an epoch ends as if it had not been stopped."""

import dataclasses

import pytest

from jax_transformer.runs import loop
from jax_transformer.runs.checkpoints import restore
from jax_transformer.text.bpe_dropout import ResampledCorpus
from tests.runs.kill_resume import Task, losses, state_digest, tiny_task
from tests.runs.runs import quiet

STOPPED, STEPS = 8, 12  # batches in an epoch: 5 or 6


def train(directory, steps, resumed=False):
    settings, training, held_out = tiny_task(Task(steps, keep=STEPS))
    config = dataclasses.replace(settings.training_config, bpe_dropout=0.3)
    checkpoint = restore(directory / loop.CHECKPOINTS, quiet()) if resumed else None
    run = loop.Run(directory, settings._replace(training_config=config), checkpoint)
    loop.train(run, training, held_out, quiet())


@pytest.mark.exhaustive
def test_a_resumed_run_with_bpe_dropout_is_bitwise_the_unbroken_one(tmp_path, monkeypatch):
    epochs = []

    def noted(*arguments):
        epochs.append(arguments[-1])
        return ResampledCorpus(*arguments)

    monkeypatch.setattr(loop, "ResampledCorpus", noted)
    unbroken, stopped = (tmp_path / name for name in ("unbroken", "stopped"))
    train(unbroken, STEPS)
    train(stopped, STOPPED)
    place = restore(stopped / loop.CHECKPOINTS, quiet()).progress
    assert place.step == STOPPED
    assert place.next.epoch > 0
    assert place.next.batch > 0
    train(stopped, STEPS, resumed=True)
    assert state_digest(stopped, STEPS) == state_digest(unbroken, STEPS)
    assert losses(stopped) == losses(unbroken)
    assert sorted(set(epochs)) == list(range(max(epochs) + 1))
    assert epochs.count(place.next.epoch) == 3  # of two whole runs, and of the resumed one
