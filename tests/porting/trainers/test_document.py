"""docs/trainers.md keeps its word: its commands and its Python run on the programs' files."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from jax_transformer.commands import main as cli
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers import TRAINERS
from jax_transformer.storage import weights as files
from tests.convert.tools import assert_same_tensors
from tests.porting.trainers.programs import PROGRAMS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for trainer, build in PROGRAMS.items():
        folder = tmp_path / trainer.partition("_")[0]
        folder.mkdir()
        build().save(folder)


def test_its_commands_run_and_what_they_write_goes_home():
    commands = re.findall(r"^jax-transformer (convert .*)$", DOCUMENT, re.MULTILINE)
    assert len(commands) == len(TRAINERS)
    for command in commands:
        cli.command_call(*shlex.split(command))()
        written, layout = re.search(r"(\S+\.safetensors) --layout (\S+)", command).groups()
        recorded = files.read_metadata(written)["config"]
        assert json.loads(recorded)["num_heads"] == 4
        Path("config.json").write_text(recorded)
        cli.command_call("convert", written, f"{layout}.pt", f"--output-layout={layout}")()
        options = (f"--layout={layout}", "--config=config.json", "--overwrite")
        cli.command_call("convert", f"{layout}.pt", "again.safetensors", *options)()
        assert_same_tensors(files.read("again.safetensors"), files.read(written))


def test_verify_takes_a_checkpoint(capsys):
    cli.command_call("verify", "joeynmt/best.ckpt", "--layout=joeynmt")()
    assert "\na agrees with b\n" in capsys.readouterr().out


def test_heads_are_for_checkpoints_alone():
    with pytest.raises(InputError, match="--num-heads 4 is for the checkpoints of"):
        cli.command_call("convert", "x.safetensors", "y.safetensors", "--num-heads=4")()


def test_its_python_runs_and_prints_what_it_says(capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    Path("snippet.py").write_text(snippet, "utf-8")
    checkpoint = torch.load("joeynmt/best.ckpt", weights_only=False)
    weights = checkpoint["model_state"]
    weights["encoder.pe.pe"] *= 1 + 1e-6  # its own table has another rounding than ours
    torch.save(checkpoint, "joeynmt/best.ckpt")
    names = runpy.run_path("snippet.py")
    assert capsys.readouterr().out.strip() in snippet
    assert_same_tensors(names["home"], weights)
    cli.command_call("convert", "joeynmt/best.ckpt", "joeynmt.safetensors", "--layout=joeynmt")()
    options = ("--output-layout=joeynmt", "--buffers=joeynmt/best.ckpt")
    cli.command_call("convert", "joeynmt.safetensors", "home.pt", *options)()
    assert_same_tensors(files.read("home.pt"), weights)


def test_its_tables_name_every_program():
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("|")]
    for trainer in TRAINERS:
        assert any(f"`{trainer}`" in row for row in rows)
