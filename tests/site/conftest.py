"""The site, built once for all tests of a run: with one tutorial executed, and with all."""

import fcntl
import os
import subprocess
import sys

import pytest

from docs.build import ROOT, SITE, TUTORIALS
from tests.tiers import tiered

ONE = "write_the_loop_yourself"  # it prints, and draws a picture


@pytest.fixture(
    scope="package",
    params=tiered([f"--tutorials {ONE}", "--tutorials"], [], [f"--tutorials {ONE}"]),
    ids=["one tutorial", "all tutorials"],
)
def built(request, testrun_uid):
    """The folder of the site, built without activating the environment, and what was executed."""
    options = request.param.split()
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker builds, the others wait for it
        mark, expected = build / "built_by", f"{testrun_uid} {request.param}"
        if not mark.exists() or mark.read_text() != expected:
            mark.unlink(missing_ok=True)
            command = [sys.executable, "-m", "docs.build", *options]
            env = {**os.environ, "PATH": os.defpath}
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            mark.write_text(expected)
        fcntl.flock(lock, fcntl.LOCK_SH)  # nobody builds another one meanwhile
        yield SITE, options[1:] or [script.stem for script in TUTORIALS]


@pytest.fixture
def site(built):
    return built[0]
