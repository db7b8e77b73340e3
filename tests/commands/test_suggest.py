"""`jax-transformer suggest`: from a file of weights to a layout, and every refusal before work."""

import dataclasses
import re

import pytest
import torch

from jax_transformer import convert
from jax_transformer.porting import program
from jax_transformer.storage import weights as files


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_recording_it_prints_shapes_and_the_program(recordings, run, tmp_path):
    code, printed = run("suggest", str(recordings / "letters.safetensors"))
    assert code == 0
    assert re.search(r"readers\.{i}\.mixers\.{i}\.ask\.weight +3 x \[42, 42\]", printed)
    assert printed.endswith(f"suggest ... --against recorded.pt\n\n{program()}\n")
    assert not list(tmp_path.iterdir())


def test_known_names_are_recognised(run):
    torch.save(torch.nn.Transformer(12, 2, 2, 2, 20).state_dict(), "nn.pt")
    code, printed = run("suggest", "nn.pt")
    assert code == 0
    assert "the names of the layout torch_nn: --layout torch_nn reads them\n" in printed


@pytest.mark.exhaustive
def test_with_a_recording_the_layout_is_that_of_the_program(recordings, run, tmp_path):
    weights, recorded = str(recordings / "letters.safetensors"), str(recordings / "letters.pt")
    options = ("--against", recorded, "--output", "mine.toml")
    (tmp_path / "mine.toml").write_text("kept")
    assert "already exists" in run("suggest", weights, *options)[0]
    assert (tmp_path / "mine.toml").read_text() == "kept"
    code, printed = run("suggest", weights, *options, "--overwrite")
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


def test_a_model_outside_the_configs_writes_nothing(recordings, run, tmp_path):
    weights, recorded = (str(recordings / f"linear_bias.{end}") for end in ("safetensors", "pt"))
    code, printed = run("suggest", weights, "--against", recorded, "--other-masks")
    assert code == 1
    assert "refused: numbers that no weight has are added to the scores: " in printed
    assert printed.endswith("layout.toml is not written\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_checkpoint_has_an_entry_that_is_named_and_tensors_that_are_dropped(recordings, run):
    weights = files.read(recordings / "letters.safetensors")
    tensors = {f"module.{name}": torch.tensor(tensor) for name, tensor in weights.items()}
    extra = {"module.second_head.weight": torch.randn(90, 50)}
    torch.save({"net": tensors | extra, "ema": {"decay": 0.9}, "epoch": 7}, "last.ckpt")
    against = ("--against", str(recordings / "letters.pt"))
    assert "--key" in run("suggest", "last.ckpt", *against)[0]
    code, printed = run("suggest", "last.ckpt", "--key", "net", *against)
    assert code == 1
    assert "refused: the program does not read second_head.weight: --drop leaves it out" in printed
    options = ("--key", "net", "--drop", "second_head.*")
    assert run("suggest", "last.ckpt", *options, *against)[0] == 0
    assert run("convert", "last.ckpt", "own.pt", "--layout", "layout.toml", *options)[0] == 0
