"""The site, built once for all tests of a run."""

import fcntl
import os
import subprocess
import sys

import pytest

from docs.build import ROOT, SITE


@pytest.fixture(scope="session")
def site(testrun_uid):
    """Build the site, tutorials executed, without activating the environment; return its folder."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker builds, the others wait for it
        built = build / "built_by"
        if not built.exists() or built.read_text() != testrun_uid:
            built.unlink(missing_ok=True)
            command = [sys.executable, "-m", "docs.build"]
            env = {**os.environ, "PATH": os.defpath}
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            built.write_text(testrun_uid)
    return SITE
