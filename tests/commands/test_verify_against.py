"""`verify --against`: a model beside its own program, by files alone."""

import dataclasses
import json

import pytest
import torch

from jax_transformer import convert
from jax_transformer.porting import read_recording
from jax_transformer.storage import weights as files
from tests.convert.foreign import PreNormMemoryNorm, randomized
from tests.models import small_config
from tests.porting.recorded import write

LAYOUT = "pre_norm_memory_norm"
CONFIG = small_config(LAYOUT, num_encoder_layers=1, num_decoder_layers=1)


class Program(PreNormMemoryNorm):
    """The model of `tests.convert.foreign` with its own masks."""

    def forward(self, src, tgt):
        """Return the logits of ids alone."""
        seen = (src != CONFIG.pad_id)[:, None, None]
        later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        return super().forward(src, tgt, seen, later & (tgt != CONFIG.pad_id)[:, None, None])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The model's state_dict, and the file that the printed program leaves beside it."""
    path = tmp_path_factory.mktemp("program") / "recorded.pt"
    model = randomized(Program(CONFIG))
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sizes = CONFIG.src_vocab_size, CONFIG.tgt_vocab_size
    write(model, path, CONFIG.pad_id, sizes, lengths="[(7, 5), (3, 4)]")
    return state_dict, path


@pytest.fixture
def verify(recorded, run, tmp_path, monkeypatch):
    """Run the command on weights and a config; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def verify(tensors, config, *options):
        files.write("weights.safetensors", tensors, overwrite=True)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        names = (f"--layout={LAYOUT}", "--config=config.json")
        return run("verify", "weights.safetensors", *names, f"--against={recorded[1]}", *options)

    return verify


def test_the_right_model_agrees_and_a_report_says_so(recorded, verify, tmp_path):
    code, printed = verify(recorded[0], CONFIG, "--report=report.html")
    assert code == 0, printed
    assert "decoder.layers_0.memory_norm  " in printed
    assert printed.splitlines()[-2:] == ["a agrees with b", "report.html written"]
    assert "a agrees with b" in (tmp_path / "report.html").read_text()
    assert len(read_recording(recorded[1]).runs) == 2
    wrong = dataclasses.replace(CONFIG, norm_epsilon=1e-3)
    code, printed = verify(recorded[0], wrong, "--report=report.html")
    assert code.startswith("error: report.html: exists already")
    assert printed == ""
    code, printed = verify(recorded[0], wrong, "--report=report.html", "--overwrite")
    assert code == 1
    assert "first in encoder.layers_0.self_attention_residual.norm" in printed
    assert "a differs from b" in (tmp_path / "report.html").read_text()
    assert "must end in .html" in verify(recorded[0], CONFIG, "--report=report.txt")[0]


def test_prefixes_are_stripped(recorded, verify):
    tensors = {f"module.{name}": tensor for name, tensor in recorded[0].items()}
    assert verify(tensors, CONFIG, "--strip-prefixes", "module.")[0] == 0


@pytest.mark.exhaustive
def test_a_fault_of_both_sides_is_seen_only_beside_the_program(
    recorded, run, tmp_path, monkeypatch
):
    def exchanged(path):
        return path.replace("query", "?").replace("value", "query").replace("?", "value")

    monkeypatch.chdir(tmp_path)
    files.write("weights.safetensors", recorded[0])
    layout = convert.get_layout(LAYOUT)
    rows = (dataclasses.replace(row, paths=tuple(map(exchanged, row.paths))) for row in layout.rows)
    convert.write_layout("wrong.toml", dataclasses.replace(layout, rows=tuple(rows)), CONFIG)
    names = ("verify", "weights.safetensors", "--layout=wrong.toml")
    code, printed = run(*names, f"--against={recorded[1]}")
    assert code == 1
    assert "first in encoder.layers_0.self_attention" in printed
    code, printed = run(*names)
    assert code == 0
    assert "note: this tests the conversion" in printed
