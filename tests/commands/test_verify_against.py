"""`verify --against`: a model beside its own program, by files alone."""

import json

import numpy as np
import pytest
import torch

from jax_transformer.porting.explain import Explanation
from jax_transformer.porting.record import read_record, snippet
from jax_transformer.storage import weights as files
from tests.porting.wrong_variants import LAYOUT, WRONG, mistaken, program, right_config


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The right model's state_dict, and the file that the printed code leaves in its program."""
    folder = tmp_path_factory.mktemp("program")
    model, config = program(), right_config()
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sizes = config.src_vocab_size, config.tgt_vocab_size
        try:
            exec(snippet(config.pad_id, *sizes), {"model": model})
        finally:
            torch.set_default_dtype(torch.float32)
    return state_dict, folder / "recorded.safetensors"


@pytest.fixture
def verify(recorded, run, tmp_path, monkeypatch):
    """Run the command on weights and a config; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def verify(tensors, config, *options):
        files.write("weights.safetensors", tensors, overwrite=True)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        names = (f"--layout={LAYOUT}", "--config=config.json")
        against = f"--against={recorded[1]}"
        return run("verify", "weights.safetensors", *names, against, *options)

    return verify


def unexplained(*_):
    return Explanation((), np.inf, ())


def marked(printed):
    return [line.split()[0] for line in printed.splitlines() if "first to differ" in line]


def test_the_right_model_agrees(recorded, verify, monkeypatch):
    """Without torch, and with a prefix before the names in both files."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, printed = verify(recorded[0], right_config())
    assert (code, marked(printed)) == (0, [])
    assert "decoder.layers.0.memory_norm  " in printed
    assert printed.splitlines()[-1] == "agrees with your program: the bound is 5e-07"
    assert len(read_record(recorded[1]).batches) == 3


def test_prefixes_are_stripped_from_both_files(recorded, verify, tmp_path):
    tensors = {f"module.{name}": tensor for name, tensor in recorded[0].items()}
    named = {
        name.replace(".block.", ".block.module."): tensor
        for name, tensor in files.read(recorded[1]).items()
    }
    files.write(tmp_path / "wrapped.safetensors", named)
    wrapped = ("--strip-prefixes", "module.", "--against=wrapped.safetensors")
    code, printed = verify(tensors, right_config(), *wrapped)
    assert code == 0
    assert "encoder.layers.1.self_attention  " in printed


def test_a_wrong_variant_is_caught(recorded, verify, monkeypatch):
    monkeypatch.setattr("jax_transformer.porting.explain.explain", unexplained)
    code, printed = verify(*mistaken("epsilon", recorded[0]))
    assert (code, marked(printed)) == (1, [WRONG["epsilon"].block])
    assert printed.splitlines()[-1] == "differs from your program: the bound is 5e-07"


@pytest.mark.exhaustive
def test_the_difference_is_explained(recorded, verify):
    code, printed = verify(*mistaken("heads", recorded[0]))
    assert code == 1
    (line,) = (line for line in printed.splitlines() if line.startswith("explanation: "))
    assert WRONG["heads"].cause in line


def test_a_wrong_variant_agrees_with_itself(recorded, verify, run, monkeypatch):
    """Both sides of `verify` alone have the same fault."""
    monkeypatch.setattr("jax_transformer.porting.explain.explain", unexplained)
    verify(*mistaken("query and value", recorded[0]))
    names = (f"--layout={LAYOUT}", "--config=config.json")
    code, printed = run("verify", "weights.safetensors", *names)
    assert code == 0
    assert "note: this tests the conversion" in printed


def test_a_report_is_written_and_not_replaced_unasked(recorded, verify, tmp_path):
    path = tmp_path / "report.html"
    code, printed = verify(recorded[0], right_config(), "--report=report.html")
    assert code == 0
    assert printed.splitlines()[-1] == "report.html written"
    assert "The converted model agrees with yours" in path.read_text()
    wrong = mistaken(next(iter(WRONG)), recorded[0])
    code, printed = verify(*wrong, "--report=report.html")
    remedy = "name another report or overwrite it (--overwrite)"
    assert code == f"error: report.html: exists already; {remedy}"
    assert printed == ""
    assert "The converted model agrees with yours" in path.read_text()
    assert verify(*wrong, "--report=report.html", "--overwrite")[0] == 1
    assert "The models differ, first in" in path.read_text()
    code, _ = verify(recorded[0], right_config(), "--report=report.txt")
    assert code == "error: report.txt: the name of a report must end in .html"


def test_refusals(recorded, verify, run):
    code, _ = run("verify", "weights.safetensors", "--report=report.html")
    assert code == "error: --report report.html needs --against, a record of your program"
    code, _ = verify(recorded[0], right_config(), "--against=missing.safetensors")
    assert code.startswith("error: missing.safetensors cannot be read")
