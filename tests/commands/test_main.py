"""The command line as a whole: help, extras, unknown commands."""

import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_transformer.commands import main as cli
from jax_transformer.commands.extras import EXTRA_OF

ROOT = Path(__file__).parents[2]


WITHOUT_EXTRAS = """
import json, sys
from jax_transformer.commands import main as cli
from jax_transformer.commands.extras import EXTRA_OF

sys.modules.update(dict.fromkeys(EXTRA_OF))  # their import then fails, as where there are none
cli.main(["--help"])
import jax_transformer.training.config
assert "jax" not in sys.modules, "help and settings need no framework"
said = {}
for command in cli.COMMANDS:
    try:
        cli.main([command])
    except SystemExit as left:
        said[command] = left.code
for name in [name for name in EXTRA_OF if EXTRA_OF[name] == "train"]:
    del sys.modules[name]
try:
    cli.main(["verify", "weights.pt", "--config=config.json"])
except SystemExit as left:
    said["verify of weights"] = left.code
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    """What the help and each command print where no extra is installed."""
    directory = tmp_path_factory.mktemp("empty")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, cwd=directory, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown, _, said = done.stdout.decode().strip().rpartition("\n")
    return shown, json.loads(said)


def test_help_needs_no_library(without_extras):
    shown, _ = without_extras
    for command in cli.COMMANDS:
        assert f"  {command} " in shown


def test_a_command_without_its_extra_says_which(without_extras):
    _, said = without_extras
    for command in cli.COMMANDS:
        expected = (
            rf"error: jax-transformer {command} needs (\w+), which is not installed: "
            rf'pip install "jax-transformer\[(\w+)\]"'
        )
        module, extra = re.fullmatch(expected, said[command]).groups()
        assert EXTRA_OF[module] == extra == "train"
    assert said["verify of weights"].endswith(
        'needs torch, which is not installed: pip install "jax-transformer[torch]"'
    )


def test_train_py_is_the_same_command(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps=3"])
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert seen == [["train", "--steps=3"]]
    assert len((ROOT / "train.py").read_text().splitlines()) <= 12


def test_every_library_of_an_extra_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {"orbax-checkpoint": "orbax", "pyyaml": "yaml", "tomli-w": "tomli_w"}
    for extra in ("train", "tensorboard", "torch", "hf"):
        distributions = [re.match(r"[\w-]+", line)[0] for line in extras[extra]]
        modules = {names.get(name, name) for name in distributions}
        assert modules == {module for module, own in EXTRA_OF.items() if own == extra}
    found = importlib.metadata.packages_distributions()
    assert EXTRA_OF.keys() - found.keys() <= {"tensorboardX", "torch", "transformers"}


def test_a_fault_of_the_library_is_no_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_transformer.commands.budget", None)
    with pytest.raises(ModuleNotFoundError, match="budget"):
        cli.main(["budget"])


def test_an_unknown_command_is_refused():
    with pytest.raises(SystemExit, match="error: command 'trian' is unknown; choose one of train"):
        cli.main(["trian"])
