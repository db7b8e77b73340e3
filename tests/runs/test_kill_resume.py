"""Runs that are killed and resumed are the runs that were not, bit for bit; seeds decide them."""

import shutil

import pytest

from tests.runs.conftest import STEPS
from tests.runs.kill_resume import (
    KEEP,
    Task,
    epochs_are_exact,
    losses,
    pairs_seen,
    state_digest,
    survive,
    train_or_resume,
)

KILLS = 1  # `python -m tests.runs.kill_resume` makes fifty


@pytest.fixture(scope="module")
def killed(unbroken, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    shutil.copytree(unbroken, directory / "unbroken")
    return survive(directory, kills=KILLS, task=Task(STEPS))


@pytest.mark.exhaustive
def test_killed_runs_end_as_if_they_had_not_been(killed):
    print(killed)
    assert killed["kills"] == killed["same bits after the kill"] == KILLS
    runs = killed["runs"]
    assert killed["same state and log at the end"] == runs > 0
    assert killed["every pair once in each epoch"] == runs
    assert killed["most checkpoints left"] == KEEP
    assert killed["most half-written left"] == 0


@pytest.mark.exhaustive
def test_another_process_with_the_same_seed_ends_the_same_and_with_another_does_not(
    killed, unbroken, tmp_path
):
    # Runs of other processes than the unbroken one's.
    assert killed["same state and log at the end"] == killed["runs"]
    train_or_resume(tmp_path, Task(STEPS, seed=1))
    hashes = [state_digest(path, STEPS) for path in (unbroken, tmp_path)]
    assert hashes[0] != hashes[1]
    assert losses(unbroken) != losses(tmp_path)
    print(
        f"one seed: {hashes[0][:12]}, in {1 + killed['runs']} runs; another seed: {hashes[1][:12]}"
    )


@pytest.mark.exhaustive
def test_an_epoch_that_misses_a_pair_or_sees_one_twice_is_found(unbroken):
    seen = pairs_seen(unbroken)
    assert epochs_are_exact(seen, STEPS)
    lost = seen | {3: seen[3][:-1]}
    twice = seen | {3: [*seen[3][:-1], seen[3][0]]}
    gone = {step: pairs for step, pairs in seen.items() if step != 3}
    assert not any(epochs_are_exact(wrong, STEPS) for wrong in (lost, twice, gone))
