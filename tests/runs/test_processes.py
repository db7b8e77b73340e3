"""Two processes train one run; killed, it goes on in a single one as if they had never been."""

import json
import os
import time

import numpy as np
import pytest

from jax_transformer.runs import loop
from jax_transformer.runs.checkpoints import steps_in
from tests.programs import TwoPrograms, free_port
from tests.runs.conftest import STEPS
from tests.runs.kill_resume import Task, epochs_are_exact, losses, pairs_seen, train_or_resume

KILLED_AT = 12

WORKER = """
import sys
from pathlib import Path
from tests.runs.kill_resume import Task, train_or_resume
from jax_transformer.runtime import distributed

try:
    distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), start_timeout=60)
    train_or_resume(Path(sys.argv[3]), Task(int(sys.argv[4])), "data=2")
except Exception as error:
    distributed.fail(error)
"""


# Makes batches on meshes of six devices, three of each process, and tells which rows it has made.
MAKER = """
import json, sys
from unittest import mock
import jax, numpy as np
from tests.runs.kill_resume import Task, tiny_task
from jax_transformer.runtime import distributed
from jax_transformer.text import batches
from jax_transformer.text.plan import plan_epoch
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.runs.mesh import (sharded_batches, fill_rows)

try:
    distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), start_timeout=60)
    make_batch, made = batches.make_batch, []

    def noted(encoded, part):
        made.append(part.rows)
        return make_batch(encoded, part)

    for sizes, order in json.loads(sys.argv[3]):
        for batching in ("buckets", "packed"):
            settings, encoded, _ = tiny_task(Task(8, batching=batching))
            mesh = make_mesh(sizes, np.array(jax.devices())[order])
            plan = fill_rows(plan_epoch(encoded, settings.training_config, 0), mesh, 1)
            made.clear()
            with mock.patch.object(batches, "make_batch", noted):
                spread = list(sharded_batches(mesh, encoded, plan))
            for planned, batch in zip(plan, spread, strict=True):
                arrays = map(jax.tree.leaves, (batch, make_batch(encoded, planned)))
                for ours, whole in zip(*arrays, strict=True):
                    assert ours.shape == whole.shape
                    for shard in ours.addressable_shards:
                        assert shard.data.shape[1] == whole.shape[1]
                        assert np.array_equal(shard.data, whole[shard.index])
            print(json.dumps([sizes, made, [planned.rows for planned in plan]]), flush=True)
except Exception as error:
    distributed.fail(error)
"""


def two_workers(code, directory, *arguments, devices=1):
    """Start two processes that meet at a port of this machine."""
    coordinator = f"localhost:{free_port()}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return TwoPrograms(
        directory,
        code,
        arguments=lambda index: (coordinator, index, *arguments),
        environment=lambda index: {"XLA_FLAGS": flags},
    )


def killed_and_resumed(directory):
    """Return the folder of a run of two processes that were killed, resumed in one process."""
    together = directory / "together"
    with two_workers(WORKER, directory, together, STEPS) as workers:
        deadline = time.monotonic() + 200
        while max(steps_in(together / loop.CHECKPOINTS), default=0) < KILLED_AT:
            shown = [workers.text(index) for index in range(2)]
            assert all(process.poll() is None for process in workers.processes), shown
            assert time.monotonic() < deadline, shown
            time.sleep(0.01)
    killed_at = max(steps_in(together / loop.CHECKPOINTS))
    assert killed_at < STEPS
    train_or_resume(together, Task(STEPS))
    return together


@pytest.mark.exhaustive
def test_samples_and_losses_are_those_of_a_run_of_one_process(unbroken, tmp_path):
    runs = killed_and_resumed(tmp_path), unbroken
    together, alone = map(pairs_seen, runs)
    assert together == alone
    assert epochs_are_exact(together, STEPS)
    together, alone = (
        np.array([[report["step"], report["loss"]] for report in losses(path) if "loss" in report])
        for path in runs
    )
    assert np.array_equal(together[:, 0], alone[:, 0])
    worst = np.abs(together[:, 1] / alone[:, 1] - 1).max()
    print(f"losses of {STEPS} steps differ by at most {worst:.1e} of their size")
    assert worst <= 1e-6


@pytest.mark.exhaustive
def test_a_process_makes_the_rows_that_its_devices_hold(tmp_path):
    meshes = [  # with the share of the rows that each process holds
        ("data=6", [0, 1, 2, 3, 4, 5], (3 / 6, 3 / 6)),
        ("data=6", [0, 3, 1, 4, 2, 5], (3 / 6, 3 / 6)),
        ("data=4", [0, 1, 2, 3], (3 / 4, 1 / 4)),
        ("fsdp=3,tensor=2", [0, 1, 2, 3, 4, 5], (2 / 3, 2 / 3)),  # both hold the second third
        ("tensor=6", [0, 1, 2, 3, 4, 5], (1, 1)),
    ]
    asked = json.dumps([mesh[:2] for mesh in meshes])
    with two_workers(MAKER, tmp_path, asked, devices=3) as workers:
        codes = [process.wait(timeout=100) for process in workers.processes]
    logs = [workers.text(index) for index in range(2)]
    assert codes == [0, 0], logs
    for index, log in enumerate(logs):
        told = [json.loads(line) for line in log.splitlines()]
        wanted = [mesh for mesh in meshes for _ in ("buckets", "packed")]
        for (sizes, made, rows), (asked_for, _, shares) in zip(told, wanted, strict=True):
            assert sizes == asked_for
            assert len(made) > 2
            assert made == [round(shares[index] * count) for count in rows]
