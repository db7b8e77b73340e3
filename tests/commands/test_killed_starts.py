"""A run killed before any change of its output is started again by the line of a supervisor."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_a_run_may_be_killed_at_every_change_of_its_output_and_started_again(tmp_path):
    command = [sys.executable, "-m", "tests.commands.killed_starts", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    ways = Counter(done.stdout.splitlines())
    counts = {way: ways[way] for way in ("started", "resumed", "overwritten")}
    print(counts)
    assert min(counts.values()) >= 10
