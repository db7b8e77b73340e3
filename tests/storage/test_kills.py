"""A writer killed before any change of the disk leaves the old version whole, or the new one."""

import pytest

from tests.programs import run_python


@pytest.mark.exhaustive
def test_every_writer_may_be_killed_at_every_change_of_the_disk(tmp_path):
    done = run_python("-m", "tests.storage.kills", tmp_path, timeout=300)
    print(done.stdout)
    assert int(done.stdout.splitlines()[-1].split()[0]) >= 200
