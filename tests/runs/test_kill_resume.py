"""Runs that are killed and resumed are the runs that were not, bit for bit; seeds decide them."""

import shutil
import time

import pytest

from benchmarks.kill_resume import (
    KEEP,
    Task,
    epochs_are_exact,
    losses,
    pairs_seen,
    start,
    state_digest,
    survive,
    train_or_resume,
)
from jax_transformer.runs import loop
from jax_transformer.runs.checkpoints import read_step, steps_in
from tests.runs.conftest import STEPS


@pytest.fixture(scope="module")
def killed(unbroken, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    shutil.copytree(unbroken, directory / "unbroken")
    return survive(directory, kills=4, task=Task(STEPS))


@pytest.mark.exhaustive
def test_killed_runs_end_as_if_they_had_not_been(killed):
    survey = killed
    print(
        f"{survey.kills} kills, {survey.in_save} inside a save: {survey.same_after_kill} equal "
        f"checkpoints after them; {survey.runs} runs, {survey.same_at_end} equal at the end, "
        f"{survey.epochs_exact} with exact epochs; at most {max(survey.steps_lost)} steps lost, "
        f"{survey.most_steps_left} checkpoints and {survey.most_temporary_left} temporary ones left"
    )
    assert survey.kills == survey.same_after_kill == 4
    assert survey.runs == survey.same_at_end == survey.epochs_exact > 0
    assert survey.most_steps_left == KEEP
    assert survey.most_temporary_left == 0


@pytest.mark.exhaustive
def test_another_process_with_the_same_seed_ends_the_same_and_with_another_does_not(
    killed, unbroken, tmp_path
):
    assert killed.same_at_end == killed.runs  # runs of other processes than the unbroken one's
    train_or_resume(tmp_path, Task(STEPS, seed=1))
    hashes = [state_digest(path, STEPS) for path in (unbroken, tmp_path)]
    assert hashes[0] != hashes[1]
    assert losses(unbroken) != losses(tmp_path)
    print(f"one seed: {hashes[0][:12]}, in {1 + killed.runs} runs; another seed: {hashes[1][:12]}")


@pytest.mark.exhaustive
def test_a_killed_packed_run_ends_as_if_it_had_not_been(tmp_path):
    task = Task(STEPS, batching="packed")
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    process = start(killed, task)
    while not any(steps_in(killed / loop.CHECKPOINTS)):  # the first one within an epoch is of 4
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    newest = max(steps_in(killed / loop.CHECKPOINTS))
    print(f"packed: killed with a checkpoint of step {newest}")
    assert newest < STEPS
    for run in (killed, unbroken):
        train_or_resume(run, task)
    assert read_step(killed / loop.CHECKPOINTS, STEPS).settings.training_config.batching == "packed"
    assert state_digest(killed, STEPS) == state_digest(unbroken, STEPS)
    assert losses(killed) == losses(unbroken)
    assert pairs_seen(killed) == pairs_seen(unbroken)
    assert epochs_are_exact(pairs_seen(killed), STEPS)


@pytest.mark.exhaustive
def test_an_epoch_that_misses_a_pair_or_sees_one_twice_is_found(unbroken):
    seen = pairs_seen(unbroken)
    assert epochs_are_exact(seen, STEPS)
    lost = seen | {3: seen[3][:-1]}
    twice = seen | {3: [*seen[3][:-1], seen[3][0]]}
    gone = {step: pairs for step, pairs in seen.items() if step != 3}
    assert not any(epochs_are_exact(wrong, STEPS) for wrong in (lost, twice, gone))
