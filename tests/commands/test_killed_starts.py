"""A run killed before any change of its output is started again by the line of a supervisor."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import tiered

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("every", tiered([1, 5], [], [5]))
def test_a_run_may_be_killed_at_every_change_of_its_output_and_started_again(tmp_path, every):
    command = [sys.executable, "-m", "tests.commands.killed_starts", str(tmp_path), str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    ways = Counter(done.stdout.splitlines())
    counts = {way: ways[way] for way in ("started", "resumed", "overwritten")}
    print(counts)
    assert min(counts.values()) >= 10 // every
