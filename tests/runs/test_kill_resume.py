"""Runs that are killed and resumed are the runs that were not, bit for bit."""

import shutil

import pytest

from benchmarks.kill_resume import KEEP, Task, survive
from tests.runs.conftest import STEPS

KILLS = 2  # the benchmark makes fifty


@pytest.mark.exhaustive
def test_killed_runs_end_as_if_they_had_not_been(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "unbroken")
    killed = survive(tmp_path, kills=KILLS, task=Task(STEPS))
    print(killed)
    assert killed.kills == killed.same_after_kill == KILLS
    assert killed.runs == killed.same_at_end == killed.epochs_exact > 0
    assert killed.most_steps_left == KEEP
    assert killed.most_temporary_left == 0
