"""`jax-transformer suggest`: from a file of weights to a layout, and every refusal before work."""

import dataclasses
import re

import pytest
import torch

from jax_transformer import convert
from jax_transformer.porting import program
from jax_transformer.storage import weights as files
from tests.porting.models import SHAPES
from tests.porting.recorded import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the weights and recordings of a model that fits and of another one."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("letters", "linear_bias"):
        module = SHAPES[name].module()
        files.write(folder / f"{name}.safetensors", module.state_dict())
        write(module, folder / f"{name}.pt", lengths="[(7, 5)]")
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_recording_it_prints_shapes_and_the_program(folder, run, tmp_path):
    code, printed = run("suggest", str(folder / "letters.safetensors"))
    assert code == 0
    assert re.search(r"readers\.{i}\.mixers\.{i}\.ask\.weight +3 x \[42, 42\]", printed)
    assert printed.endswith(f"suggest ... --against recorded.pt\n\n{program()}\n")
    assert not list(tmp_path.iterdir())


def test_known_names_are_recognised(run):
    torch.save(torch.nn.Transformer(12, 2, 2, 2, 20).state_dict(), "nn.pt")
    code, printed = run("suggest", "nn.pt")
    assert code == 0
    assert "the names of the layout torch_nn: --layout torch_nn reads them\n" in printed


def test_with_a_recording_the_layout_is_that_of_the_program(folder, run, tmp_path):
    weights, recorded = str(folder / "letters.safetensors"), str(folder / "letters.pt")
    code, printed = run("suggest", weights, "--against", recorded, "--output", "mine.toml")
    assert code == 0, printed
    assert "memory_norm = True\n" in printed
    assert "logits in JAX: " in printed
    assert printed.splitlines()[-1].startswith("mine.toml written")
    read = convert.read_layout(tmp_path / "mine.toml")
    assert read.config.d_ff == 50
    assert run("verify", weights, "--layout", "mine.toml", "--against", recorded)[0] == 0
    assert run("convert", weights, "own.safetensors", "--layout", "mine.toml")[0] == 0
    assert run("convert", "own.safetensors", "back.pt", "--output-layout", "mine.toml")[0] == 0
    assert files.read("back.pt").keys() == files.read(weights).keys()
    wrong = dataclasses.replace(read.config, activation="gelu")
    convert.write_layout("wrong.toml", read.layout, wrong)
    code, printed = run("verify", weights, "--layout", "wrong.toml", "--against", recorded)
    assert code == 1
    assert "a differs from b, first in " in printed
    (tmp_path / "taken.toml").write_text("kept")
    options = ("--against", recorded, "--output", "taken.toml")
    assert "already exists" in run("suggest", weights, *options)[0]
    assert (tmp_path / "taken.toml").read_text() == "kept"
    assert run("suggest", weights, *options, "--overwrite")[0] == 0
    assert convert.read_layout(tmp_path / "taken.toml") == read


def test_a_model_outside_the_configs_writes_nothing(folder, run, tmp_path):
    weights, recorded = (str(folder / f"linear_bias.{end}") for end in ("safetensors", "pt"))
    code, printed = run("suggest", weights, "--against", recorded, "--other-masks")
    assert code == 1
    assert "refused: numbers that no weight has are added to the scores: " in printed
    assert printed.endswith("layout.toml is not written\n")
    assert not list(tmp_path.iterdir())


REFUSALS = [
    ("letters.safetensors --against letters.pt --output layout.txt", "must be a .toml file"),
    ("letters.safetensors --against letters.pt --output no/l.toml", "the folder no does not exist"),
    (".", "holds none of model.safetensors"),
    ("letters.safetensors --drop heads.*", "drop='heads.*' is the name of no tensor"),
    ("letters.safetensors --key model", "key='model' is for torch.save files"),
    ("absent.pt", "absent.pt cannot be read"),
    ("letters.safetensors --against letters.safetensors", "is no recording, it has "),
    ("letters.safetensors --against linear_bias.pt", "give the weights with which the recording"),
    ("empty.pt", "the checkpoint holds no tensors"),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS)
def test_bad_input_is_one_line_and_writes_nothing(words, message, folder, run, monkeypatch):
    monkeypatch.chdir(folder)
    if "empty" in words:
        torch.save({}, "empty.pt")
    before = sorted(folder.iterdir())
    error, printed = run("suggest", *words.split())
    assert message in error
    assert ("\n" in error, printed) == (False, "")
    assert sorted(folder.iterdir()) == before


def test_a_checkpoint_has_an_entry_that_is_named_and_tensors_that_are_dropped(folder, run):
    weights = files.read(folder / "letters.safetensors")
    tensors = {f"module.{name}": torch.tensor(tensor) for name, tensor in weights.items()}
    extra = {"module.second_head.weight": torch.randn(90, 50)}
    torch.save({"net": tensors | extra, "ema": {"decay": 0.9}, "epoch": 7}, "last.ckpt")
    against = ("--against", str(folder / "letters.pt"))
    assert "--key" in run("suggest", "last.ckpt", *against)[0]
    code, printed = run("suggest", "last.ckpt", "--key", "net", *against)
    assert code == 1
    assert "refused: the program does not read second_head.weight: --drop leaves it out" in printed
    options = ("--key", "net", "--drop", "second_head.*")
    assert run("suggest", "last.ckpt", *options, *against)[0] == 0
    assert run("convert", "last.ckpt", "own.pt", "--layout", "layout.toml", *options)[0] == 0
