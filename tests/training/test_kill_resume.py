"""Runs that are killed and resumed are the runs that were not, bit for bit; seeds decide them."""

import pytest

from benchmarks.kill_resume import (
    KEEP,
    epochs_are_exact,
    losses,
    pairs_seen,
    state_digest,
    survive,
    train_or_resume,
)

STEPS = 40


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return directory, survive(directory, kills=4, steps=STEPS)


def test_killed_runs_end_as_if_they_had_not_been(killed):
    survey = killed[1]
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


def test_another_process_with_the_same_seed_ends_the_same_and_with_another_does_not(
    killed, tmp_path
):
    unbroken = killed[0] / "unbroken"
    for seed in (0, 1):
        train_or_resume(tmp_path / str(seed), seed, STEPS, KEEP)
    hashes = [state_digest(path, STEPS) for path in (unbroken, tmp_path / "0", tmp_path / "1")]
    assert hashes[0] == hashes[1] != hashes[2]
    assert losses(unbroken) == losses(tmp_path / "0") != losses(tmp_path / "1")
    print(f"2 processes, one seed: {hashes[0][:12]} twice; another seed: {hashes[2][:12]}")


def test_an_epoch_that_misses_a_pair_or_sees_one_twice_is_found(killed):
    seen = pairs_seen(killed[0] / "unbroken")
    assert epochs_are_exact(seen, STEPS)
    lost = seen | {3: seen[3][:-1]}
    twice = seen | {3: [*seen[3][:-1], seen[3][0]]}
    gone = {step: pairs for step, pairs in seen.items() if step != 3}
    assert not any(epochs_are_exact(wrong, STEPS) for wrong in (lost, twice, gone))
