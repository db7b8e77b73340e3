"""A writer killed before any change of the disk leaves the old version whole, or the new one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_every_writer_may_be_killed_at_every_change_of_the_disk(tmp_path):
    command = [sys.executable, "-m", "tests.storage.kills", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert int(done.stdout.splitlines()[-1].split()[0]) >= 200
