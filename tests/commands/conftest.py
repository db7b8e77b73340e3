"""A tiny text in the working directory, a run on it that several modules go on from, commands."""

import contextlib
import io
import shutil
from pathlib import Path
from unittest import mock

import pytest

from jax_transformer.commands import main as cli
from jax_transformer.runs import evaluation
from tests.commands.training import FILES, arguments, program, write_corpus


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """The four files in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    return {name: name for name in FILES}


@pytest.fixture(scope="session")
def first_run(tmp_path_factory):
    """A run of 12 steps at model, beside its four files, and what it has printed."""
    directory, shown = tmp_path_factory.mktemp("first"), io.StringIO()
    write_corpus(directory)
    options = arguments({name: directory / name for name in FILES}, "--evaluation-interval=5")
    with contextlib.chdir(directory), contextlib.redirect_stdout(shown):
        program(*options, "--output=model")
    return directory, shown.getvalue()


@pytest.fixture
def finished(first_run, corpus):
    """A copy of that run in the working directory."""
    return Path(shutil.copytree(first_run[0] / "model", "model"))


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave out the pictures, which take most of the time of a tiny run."""
    monkeypatch.setattr(evaluation, "draw_curves", mock.Mock())
    monkeypatch.setattr(evaluation.alignment_plot, "draw", mock.Mock())


@pytest.fixture
def run(capsys):
    """Run a command; return its exit code or refusal, and what it printed."""

    def run(*arguments):
        code = 0
        try:
            cli.main(arguments)
        except SystemExit as left:
            code = left.code
        return code, capsys.readouterr().out

    return run
