"""The notebooks of the site where their environment is not activated."""

import os

import pytest

from docs import notebooks
from docs.build import PAGES

COMMANDS = [
    path
    for path in sorted((PAGES / "tutorials").glob("*.py"))
    if "jax-transformer train" in path.read_text("utf-8")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", COMMANDS, ids=lambda script: script.stem)
def test_a_cell_of_a_shell_finds_the_command(script, tmp_path, monkeypatch):
    (line,) = [line for line in script.read_text("utf-8").splitlines() if 'environ["PATH"]' in line]
    cells = (
        f"# %%\nimport os, sys\nfrom pathlib import Path\n{line}\n# %%\n!jax-transformer --help\n"
    )
    (tmp_path / "shell.py").write_text(cells, "utf-8")
    monkeypatch.setenv("PATH", os.defpath)
    _, shell = notebooks.executed(tmp_path / "shell.py").cells
    assert shell.outputs[0].text.startswith("usage: jax-transformer COMMAND")
