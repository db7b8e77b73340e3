"""A run's checkpoints on disk, for the tests of reading and of damage."""

import shutil
from pathlib import Path

import pytest

from tests.runs.runs import make_settings, save


@pytest.fixture(scope="module")
def settings():
    return make_settings()


@pytest.fixture(scope="module")
def saved(settings, tmp_path_factory):
    """Steps 0, 4 and 8; not to be changed."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    save(directory, settings, (0, 4, 8))
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))
