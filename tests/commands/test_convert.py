"""The command line's convert and verify: files in, files out, faults in one place."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

from jax_transformer import TransformerConfig
from jax_transformer.convert import get_layout, write_layout
from jax_transformer.storage import weights as files
from tests.commands.training import FIELDS
from tests.convert.foreign import MODELS
from tests.convert.tools import assert_same_tensors
from tests.models import small_config

TORCH_NN = ("--layout=torch_nn", "--config=config.json")
OF_FILE = ("--layout=mine.toml",)


@pytest.fixture
def layout_file(weights):
    """The names of torch.nn.Transformer and the config of `weights`, in mine.toml."""
    config = TransformerConfig.preset("torch_nn", **FIELDS)
    write_layout("mine.toml", dataclasses.replace(get_layout("torch_nn"), name="mine"), config)


@pytest.mark.parametrize("layout", [TORCH_NN, OF_FILE], ids=["name", "file"])
def test_there_and_back_is_bit_equal_and_loads_strictly(weights, layout_file, run, layout):
    code, printed = run("convert", "weights.pt", "own.safetensors", *layout)
    assert code == 0
    assert "encoder.layers.0.self_attn.in_proj_weight  encoder/layers_0/self_attention/" in printed
    assert json.loads(files.read_metadata("own.safetensors")["config"])["num_heads"] == 2
    home = layout[0].replace("--layout", "--output-layout")
    assert run("convert", "own.safetensors", "back.pt", home)[0] == 0
    back = torch.load("back.pt", weights_only=True)
    assert_same_tensors(back, weights)
    nn.Transformer(12, 2, 1, 1, 20, batch_first=True).load_state_dict(back, strict=True)


BOTH = (*OF_FILE, "--config=config.json")


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [TORCH_NN, OF_FILE, BOTH], ids=["name", "file", "both"])
def test_verify_agrees_block_by_block(weights, layout_file, run, layout):
    code, printed = run("verify", "weights.pt", *layout)
    assert code == 0
    assert "decoder.layers.0.cross_attention " in printed
    *_, verdict, note = printed.splitlines()
    assert verdict == "a agrees with b"
    assert "this tests the conversion, not whether the config describes your model" in note
    assert "--against" in note
    code, printed = run("verify", "--help")
    assert code == 0
    said = "This tests the conversion. It does not test whether the config describes your model"
    assert said in " ".join(re.sub("[│\\s]+", " ", printed).split())


def test_verify_refuses_a_weight_that_is_not_finite(weights, run):
    weights["encoder.layers.0.linear1.weight"][0, 0] = float("nan")
    torch.save(weights, "weights.pt")
    code, _ = run("verify", "weights.pt", *TORCH_NN)
    assert "not finite" in code
    assert "encoder.layers.0.linear1.weight" in code


def test_verify_leaves_with_code_1_where_a_block_differs(weights, run, monkeypatch):
    def split_heads(x, num_heads):
        return x.unflatten(-1, (-1, num_heads)).permute(0, 3, 1, 2)

    monkeypatch.setattr("torch_reference.functional.split_heads", split_heads)
    code, printed = run("verify", "weights.pt", *TORCH_NN)
    assert code == 1
    marked = [line for line in printed.splitlines() if "first to differ" in line]
    assert marked
    assert marked[0].startswith("encoder.layers_0.self_attention ")


def test_verify_without_torch_names_the_extra(weights, run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _ = run("verify", "weights.pt", *TORCH_NN)
    assert code == (
        "error: jax-transformer verify needs torch, which is not installed: "
        'pip install "jax-transformer[torch]"'
    )


def test_weights_that_do_not_fit_the_layout_are_refused_with_all_their_faults(weights, run):
    code, _ = run("convert", "weights.pt", "out.pt", "--config=config.json")
    assert code.startswith("error: ")
    assert "does not fit" in code


def test_buffers_come_home_from_the_file_of_the_program(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_config("pre_norm", max_length=5000)
    state_dict = MODELS["pre_norm"](config).state_dict()
    torch.save({"model": state_dict, "step": 7}, "mine.pt")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    options = ("--layout=pre_norm", "--config=config.json")
    assert run("convert", "mine.pt", "own.safetensors", *options)[0] == 0
    home = ("convert", "own.safetensors", "back.pt", "--output-layout=pre_norm")
    code, _ = run(*home, "--buffers=own.safetensors")
    assert "2 missing" in code
    assert run(*home, "--buffers=mine.pt")[0] == 0
    assert_same_tensors(torch.load("back.pt", weights_only=True), state_dict)


def test_configs_that_contradict_each_other_are_refused_with_both_names(layout_file, run, tmp_path):
    fields = {"preset": "torch_nn", **FIELDS, "num_heads": 3}
    (tmp_path / "other.json").write_text(json.dumps(fields))
    for command in (("convert", "weights.pt", "own.safetensors"), ("verify", "weights.pt")):
        code, _ = run(*command, "--layout=mine.toml", "--config=other.json")
        assert "does not match the config in mine.toml: num_heads=3 (saved: 2)" in code
        assert "\n" not in code
    options = ("--layout=torch_nn", "--config=other.json")
    assert run("convert", "weights.pt", "own.safetensors", *options)[0] == 0
    code, _ = run("convert", "own.safetensors", "x.pt", "--output-layout=mine.toml")
    assert "does not match the config in mine.toml: num_heads=3 (saved: 2)" in code
    saved = "does not match the config saved with the weights: num_heads=2 (saved: 3)"
    code, _ = run("convert", "own.safetensors", "x.pt", "--layout=mine.toml")
    assert saved in code
    code, _ = run("verify", "own.safetensors", "--config=config.json")
    assert saved in code
    assert not (tmp_path / "x.pt").exists()
