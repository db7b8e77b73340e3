"""Two processes train one run; killed, it goes on in a single one as if they had never been."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.kill_resume import (
    KEEP,
    ROOT,
    epochs_are_exact,
    losses,
    pairs_seen,
    train_or_resume,
)
from jax_transformer.training import loop
from jax_transformer.training.run_checkpoints import steps_in
from tests.test_distributed import free_port

STEPS, KILLED_AT = 40, 12

WORKER = """
import sys
from pathlib import Path
from benchmarks.kill_resume import train_or_resume
from jax_transformer import distributed

try:
    distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), start_timeout=60)
    train_or_resume(Path(sys.argv[3]), 0, int(sys.argv[4]), int(sys.argv[5]), "data=2")
except Exception as error:
    distributed.fail(error)
"""


def start(directory, coordinator, index, log):
    arguments = (coordinator, index, directory, STEPS, KEEP)
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=log,
        stderr=log,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of two processes that are killed, gone on with in one; and one that was never."""
    directory = tmp_path_factory.mktemp("runs")
    together, alone = directory / "together", directory / "alone"
    coordinator = f"localhost:{free_port()}"
    with (directory / "log").open("wb") as log:
        workers = [start(together, coordinator, index, log) for index in range(2)]
        try:
            deadline = time.monotonic() + 200
            while max(steps_in(together / loop.CHECKPOINTS), default=0) < KILLED_AT:
                said = (directory / "log").read_text(errors="replace")
                assert all(worker.poll() is None for worker in workers), said
                assert time.monotonic() < deadline, said
                time.sleep(0.01)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    killed_at = max(steps_in(together / loop.CHECKPOINTS))
    assert killed_at < STEPS
    train_or_resume(together, 0, STEPS, KEEP)
    train_or_resume(alone, 0, STEPS, KEEP)
    return together, alone


def test_the_same_samples_are_seen(runs):
    together, alone = map(pairs_seen, runs)
    assert together == alone
    assert epochs_are_exact(together, STEPS)


def test_the_losses_are_those_of_a_run_of_one_process(runs):
    together, alone = (
        np.array([[report["step"], report["loss"]] for report in losses(path) if "loss" in report])
        for path in runs
    )
    assert np.array_equal(together[:, 0], alone[:, 0])
    worst = np.abs(together[:, 1] / alone[:, 1] - 1).max()
    print(f"losses of {STEPS} steps differ by at most {worst:.1e} of their size")
    assert worst <= 1e-6
