"""What the tests of runs share: one unbroken run, and training steps that are compiled once."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from jax_transformer.runs import loop
from jax_transformer.runs.state import MAY_CHANGE
from tests.runs.kill_resume import Task, train_or_resume
from tests.runs.runs import make_settings, save

STEPS = 40


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """A run of 40 steps that is never killed, with all of its checkpoints; not to be changed."""
    directory = tmp_path_factory.mktemp("runs") / "unbroken"
    train_or_resume(directory, Task(STEPS, keep=STEPS))
    return directory


@pytest.fixture(scope="module")
def compiled_steps():
    return {}


@pytest.fixture(autouse=True)
def compile_once(compiled_steps, monkeypatch):
    """Compile the steps of a module's runs once for all runs whose steps are the same."""
    honest = loop.sharded_train_step

    def reuse(mesh, config, settings):
        deciding = {
            name: value
            for name, value in dataclasses.asdict(settings).items()
            if name not in MAY_CHANGE or name == "remat"
        }
        if settings.cooldown_steps or settings.schedule == "cosine":
            deciding["length"] = (settings.steps, settings.cooldown_steps)

        def compiled(state, batch):
            shape = batch.src.shape, batch.src_segments is None
            key = (config, tuple(deciding.items()), mesh, shape)
            if key not in compiled_steps:
                step = honest(mesh, config, settings)
                compiled_steps[key] = step.lower(state, batch).compile()
            return SimpleNamespace(compile=lambda: compiled_steps[key])

        return SimpleNamespace(lower=compiled)

    monkeypatch.setattr(loop, "sharded_train_step", reuse)


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
