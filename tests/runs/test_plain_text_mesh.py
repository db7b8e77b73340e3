"""Plain text on eight devices is plain text on one: the same batches, the same losses.

A process of its own has eight devices. By hand: `python -m tests.runs.test_plain_text_mesh`.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jax_transformer.runs.mesh import sharded_epoch
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.text.plan import epoch_layout
from jax_transformer.training.step import sharded_init_state, sharded_train_step
from tests.programs import run_python
from tests.runs.kill_resume import Task, tiny_task

STEPS = 3  # of an epoch
MESHES = ("data=8,fsdp=1,tensor=1", "data=2,fsdp=2,tensor=2")


def losses(mesh, optimizer):
    """Return the losses of some steps on a mesh, and the batches."""
    run, corpus, _ = tiny_task(Task(STEPS, batching="packed", objective="ul2"))
    settings = dataclasses.replace(run.training_config, optimizer=optimizer, schedule="constant")
    config = dataclasses.replace(run.config, dropout=0.0)
    state = sharded_init_state(mesh, config, settings)
    step, found, batches = sharded_train_step(mesh, config, settings), [], []
    layout = epoch_layout(corpus, settings)
    for numbered, _ in zip(
        sharded_epoch(mesh, corpus, settings, layout, 0, (0, 0)), range(STEPS), strict=False
    ):
        state, metrics = step(state, numbered.batch)
        found.append(float(metrics.loss))
        rows = numbered.planned.rows  # a mesh adds rows of padding
        batches += [np.asarray(ids)[:rows] for ids in numbered.batch]
    return found, batches


def main():
    """Print how far losses are apart, and whether batches differ, as JSON."""
    report = {}
    for optimizer in ("adam", "adafactor", "muon"):
        one, expected = losses(make_mesh("data=1", jax.devices()[:1]), optimizer)
        for sizes in MESHES:
            found, batches = losses(make_mesh(sizes, jax.devices()), optimizer)
            same = all(
                np.array_equal(mine, its) for mine, its in zip(batches, expected, strict=True)
            )
            apart = float(np.abs(np.array(found) / np.array(one) - 1).max())
            report[f"{optimizer} {sizes}"] = [len(found), same, apart]
    print(json.dumps(report))


@pytest.mark.exhaustive
def test_eight_devices_have_the_batches_and_the_losses_of_one():
    done = run_python("-m", "tests.runs.test_plain_text_mesh", devices=8)
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert len(report) == 6
    for name, (steps, same, apart) in report.items():
        assert (steps, same) == (STEPS, True), name
        assert apart < 1e-5, name


if __name__ == "__main__":
    main()
