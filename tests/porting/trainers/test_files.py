"""Checkpoint files: nothing in them runs, settings are plain values, older names are known."""

import argparse
import os
import time
import zipfile

import jax
import pytest
import safetensors.torch
import torch

from jax_transformer import convert, porting
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers import TRAINERS, read_trainer
from jax_transformer.storage import weights as files
from jax_transformer.storage.weights import torch_file
from jax_transformer.storage.weights.checks import WeightFileError
from tests.convert.tools import assert_same_tensors
from tests.porting.trainers.programs import Fairseq, JoeyNMT, OpenNMT


class Settings(dict):
    """A class of a program's own, as OmegaConf's containers."""


class Call:
    """An object whose unpickling calls a function."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


def archive(path, pickled, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
    return path


def refusal(path, trainer=None, seconds=2, lines=1):
    begun = time.process_time()
    with pytest.raises(InputError) as refused:
        porting.from_trainer(path, trainer)
    assert time.process_time() - begun < seconds
    assert str(refused.value).count("\n") < lines
    return str(refused.value)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_code_in_a_checkpoint_runs(tmp_path, trainer):
    canary = tmp_path / "canary"
    calls = (
        Call(os.system, f"touch {canary}"),
        Call(eval, f"open({str(canary)!r}, 'w').close()"),
        Call(getattr, Call(__import__, "os"), "system"),
        Call(argparse.Namespace.__setattr__, argparse.Namespace(), "a", 1),
        Call(argparse.ArgumentParser, "p"),
        Call(argparse.FileType("w"), str(canary)),
    )
    for call in calls:
        for settings in (call, argparse.Namespace(heads=call)):
            content = {"model": {"w": torch.ones(2)}, "args": settings}
            torch.save(content, tmp_path / "c.pt")
            for name in (trainer, None):
                assert "nothing was run: " in refusal(tmp_path / "c.pt", name)
            assert not canary.exists()


def test_a_namespace_is_attributes_and_cannot_be_called(tmp_path):
    allowed = set(torch.serialization.get_safe_globals())
    torch.save({"args": argparse.Namespace(heads=4, more=[1, "x"])}, tmp_path / "c.pt")
    content = files.read_checkpoint(tmp_path / "c.pt", "").content
    assert type(content["args"]) is torch_file.Namespace
    assert vars(content["args"]) == {"heads": 4, "more": [1, "x"]}
    built = b"\x80\x02cargparse\nNamespace\nX\x01\x00\x00\x00a\x85R."
    with pytest.raises(WeightFileError, match=r"is damaged or no file of torch\.save"):
        files.read_checkpoint(archive(tmp_path / "c.pt", built), "")
    assert set(torch.serialization.get_safe_globals()) == allowed


def test_weights_alone_are_read_without_namespaces(tmp_path):
    """What read_checkpoint accepts is not accepted where only tensors are wanted."""
    torch.save({"model": {"w": torch.ones(3)}, "args": argparse.Namespace()}, tmp_path / "c.pt")
    with pytest.raises(WeightFileError, match=r"argparse Namespace.*no part of a state_dict"):
        files.read(tmp_path / "c.pt", key="model")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_class_of_the_program_is_refused_with_the_way_to_save_it_again(tmp_path, trainer):
    content = {"model": {"w": torch.ones(2)}, "cfg": Settings(model=1), "vocab": Settings()}
    torch.save(content, tmp_path / "c.pt")
    message = refusal(tmp_path / "c.pt", trainer)
    assert "Settings" in message
    assert "torch.load(" in message
    assert "torch.save(" in message
    assert "name its program, one of annotated_transformer" in refusal(tmp_path / "c.pt")


@pytest.mark.parametrize(
    ("program", "name", "extra"),
    [
        (Fairseq, "fairseq", {"task_state": {"dictionary": Settings()}}),
        (OpenNMT, "opennmt_py", {"optim": Settings()}),
    ],
)
def test_the_way_to_save_a_checkpoint_again_works(tmp_path, monkeypatch, program, name, extra):
    """The line that the message gives, run as it stands."""
    right = torch.load(program().save(tmp_path), weights_only=False)
    for file in ("checkpoint.pt", "model.pt"):  # as the lines call them
        torch.save(right | extra, tmp_path / file)
    line = refusal(tmp_path / file, name).partition("installed, ")[2]
    monkeypatch.chdir(tmp_path)

    class OmegaConf:
        is_config = staticmethod(lambda cfg: False)

    exec(line, {"torch": torch, "OmegaConf": OmegaConf})
    assert TRAINERS[name].config(read_trainer("plain.pt")[1]).d_model == 20


@pytest.mark.exhaustive
def test_bombs_and_claims_are_refused_quickly(tmp_path):
    path = tmp_path / "c.pt"
    archive(path, b"\x80\x02" + b"}" * 5_000_000 + b".")
    assert "more than 1048576 operations" in refusal(path)
    archive(path, b"\0" * 200_000_000, zipfile.ZIP_DEFLATED)
    assert "the records claim more" in refusal(path)
    archive(path, b"\x80\x02" + b"(" * 17_000_000 + b".")
    assert "is longer than 16777216" in refusal(path)
    model = OpenNMT().state_dict()
    model["encoder.embeddings.make_embedding.emb_luts.0.weight"] = torch.ones(1).expand(10**9, 20)
    saved = torch.load(OpenNMT().save(tmp_path), weights_only=False)
    torch.save(saved | {"model": model}, path)
    assert "brings the tensors to" in refusal(path) or "no longer than the file" in refusal(path)


def test_settings_that_claim_terabytes_are_refused(tmp_path):
    huge = 10**15
    for given in ({"enc_layers": huge}, {"enc_hid_size": huge, "dec_hid_size": huge}):
        message = refusal(OpenNMT().save(tmp_path, **given), seconds=5, lines=99)
        assert str(huge) in message or "hold" in message


@pytest.mark.parametrize(
    "content",
    [
        {"model": None, "args": argparse.Namespace()},
        {"model": {"w": 3}, "cfg": {"model": {"dropout": 0.1}}},
        {"model": {}, "cfg": {"model": {"dropout": 0.1}}},
        {"model": {"w": torch.ones(3)}, "cfg": {}},
        {"model": [torch.ones(3)], "cfg": {"model": {"dropout": 0.1}}},
        {"opt": argparse.Namespace(), "vocab": {}, "model": {}, "generator": {}},
        {"opt": None, "vocab": None, "model": None, "generator": None},
        {"opt": {}, "vocab": {"src": [1], "tgt": ["a"]}, "model": {}, "generator": {}},
        {"model_state": {}},
        [torch.ones(3)],
        torch.ones(3),
        {3: 4},
    ],
)
def test_checkpoints_without_what_they_need_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "c.pt")
    message = refusal(tmp_path / "c.pt")
    assert any(named in message for named in ("c.pt", "the checkpoint has no", "config.yaml"))


@pytest.fixture
def same(tmp_path):
    """Return whether two checkpoints hold the same config and parameters."""

    def same(one, other):
        (config, params, _), (other_config, others, _) = map(porting.from_trainer, (one, other))
        leaves, other_leaves = (convert.to_torch(p, config) for p in (params, others))
        assert_same_tensors(leaves, other_leaves)
        return config == other_config

    return same


def test_older_names_of_fairseq_are_those_of_the_newer(tmp_path, same):
    """Before 0.8, query, key and value were one tensor, and norms were numbered."""
    module = Fairseq()
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    newer = module.save(tmp_path / "new")
    state = module.state_dict()
    for name in list(state):
        if ".q_proj." in name:
            parts = [state.pop(name.replace(".q_proj.", f".{k}_proj.")) for k in "qkv"]
            state[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    norms = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    for stack, numbered in (("encoder", norms[::2]), ("decoder", norms)):
        for index, norm in enumerate(numbered):
            for name in [n for n in state if n.startswith(stack) and f".{norm}." in n]:
                state[name.replace(norm, f"layer_norms.{index}")] = state.pop(name)
    state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
    state["encoder.embed_positions._float_tensor"] = torch.ones(1)
    state["decoder.embed_positions.weights"] = torch.ones(30, 20)
    module.state_dict = lambda: state
    assert same(module.save(tmp_path / "old", newer=False), newer)


def test_version_2_of_opennmt_is_read_after_its_own_conversion(tmp_path, same):
    module = OpenNMT(qkv_bias=True)
    for name in ("new", "old", "separate"):
        (tmp_path / name).mkdir()
    newer = module.save(tmp_path / "new")
    older = module.save(tmp_path / "old", version=2)
    saved = torch.load(older, weights_only=False)
    renamed = {
        name.replace("layer_norm.weight", "layer_norm.a_2").replace(
            "layer_norm.bias", "layer_norm.b_2"
        ): tensor
        for name, tensor in saved["model"].items()
    }
    assert renamed.keys() != saved["model"].keys()
    options = vars(saved["opt"])
    for side in ("enc", "dec"):
        options[f"{side}_rnn_size"] = options.pop(f"{side}_hid_size")
    torch.save(saved | {"model": renamed}, older)
    assert same(older, newer)
    # Version 3 can leave the weights in a file of their own.
    path = module.save(tmp_path / "separate")
    saved = torch.load(path, weights_only=False)
    kept = {name: saved[name] for name in ("vocab", "opt", "optim")}
    torch.save(kept, path)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    safetensors.torch.save_file(state, path.with_suffix(".safetensors"))
    assert same(path, newer)


def test_a_link_to_the_best_checkpoint_is_followed(tmp_path, same):
    path = JoeyNMT().save(tmp_path)
    path.rename(tmp_path / "700.ckpt")
    path.symlink_to("700.ckpt")
    assert same(path, tmp_path / "700.ckpt")


def test_narrow_weights_can_be_widened(tmp_path):
    path = OpenNMT().half().save(tmp_path)
    for options, dtype in (({}, "float16"), ({"dtype": "float32"}, "float32")):
        params = porting.from_trainer(path, **options)[1]
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
