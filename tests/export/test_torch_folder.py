"""Models exported for PyTorch: two lines load them, and they translate and train alike."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import InputError, TransformerConfig, generate
from jax_transformer.commands.main import command_call
from jax_transformer.storage import weights
from jax_transformer.translation.model_folder import load, save
from tests.convert.families.case import foreign_model, write_tokenizer
from tests.export.models import BLOCKS, OTHER_FUNCTION, refusal, with_preset
from tests.export.readme import WITHOUT
from tests.models import random_params, unchecked
from tests.parity.ladder import bound, check_float32
from tests.parity.measure import (
    SETTINGS,
    Pair,
    gradient_functions,
    random_batches,
    train,
    training_errors,
    worst,
)
from tests.programs import run_python
from tests.tiers import tiered

torch_folder = pytest.importorskip("jax_transformer.export.torch_folder")

REFUSED = "torch_nn"  # it reads and writes vectors
PRESETS = sorted({*TransformerConfig.presets(), *BLOCKS} - {REFUSED, "whisper"})


@pytest.mark.parametrize(
    "name", tiered(PRESETS, [], ["shared_heads", "bart", "umt5", "windows", "merged", "ssru"])
)
def test_every_model_translates_and_trains_alike(base, tmp_path, name):
    model = with_preset(base, name, num_encoder_layers=1, num_decoder_layers=2)
    model = model._replace(params=random_params(model.config))
    with unchecked():
        line = torch_folder.export_torch(model, tmp_path / "out")
    assert line.startswith("16 of 16")
    module = torch_reference.load(tmp_path / "out")
    pair = Pair(model.config, model.params, module.train())
    (batch,) = random_batches(model.config, 1)
    for kind, functions in gradient_functions(pair, batch).items():
        check_float32(f"{name} gradient of the {kind}", pair, *functions, kind="gradient")
    trained = train(pair, [batch], SETTINGS)
    assert trained.our_losses == pytest.approx(trained.their_losses, rel=1e-6)
    leaf, measured = worst(training_errors(trained))
    assert measured <= bound("adam", "float32"), leaf


def test_a_model_of_vectors_is_refused(base, tmp_path):
    model = with_preset(base, REFUSED)
    assert "token_embeddings='none'" in refusal(torch_folder.export_torch, model, tmp_path)


def test_another_function_is_not_written(base, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_reference.functional, "norm", lambda x, *_: x)
    model = with_preset(base, "t5")
    assert OTHER_FUNCTION.search(refusal(torch_folder.export_torch, model, tmp_path))


TWO_LINES = WITHOUT.format(blocked=["jax", "jaxlib", "flax", "optax", "orbax", "grain"])
TWO_LINES += """
import torch_reference

model = torch_reference.load(sys.argv[1])

import torch
src = torch.tensor([[5, 6, 7, 2]])
print(torch_reference.generate(model.eval(), src, max_new_tokens=9).tokens[0, 0].tolist())
"""


@pytest.fixture
def own(base, tmp_path):
    """A folder of the command."""
    save(tmp_path / "model", with_preset(base, "bart", num_encoder_layers=1))
    with unchecked():
        command_call("export", str(tmp_path / "model"), str(tmp_path / "own"), "--to", "torch")()
    return tmp_path / "own"


@pytest.mark.exhaustive
def test_two_lines_load_it_where_jax_is_not_installed(own):
    root = Path(torch_reference.__file__).parents[1]
    done = run_python("-c", TWO_LINES, own, cwd=root)
    config, params, *_ = load(own)
    best = generate(params, config, np.array([[5, 6, 7, 2]], np.int32), max_new_tokens=9)
    assert json.loads(done.stdout) == best.tokens[0, 0].tolist()


def test_a_folder_that_is_no_model_is_refused_in_one_line(own, tmp_path):
    def unreadable(folder):
        with pytest.raises(InputError) as refused:
            torch_reference.load(folder)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert unreadable(tmp_path / "absent") == (
        f"{tmp_path}/absent: is not the folder of a trained model: it has no config.json"
    )
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "marian"}')
    assert "write one by `jax-transformer export" in unreadable(tmp_path / "theirs")
    config = own / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace('"norm_epsilon": 1e-05', '"norm_epsilon": 1e-06'))
    assert "config.json or model.safetensors is not as it was written" in unreadable(own)
    config.write_text(whole)
    tensors = weights.read(own / "model.safetensors")
    name = next(iter(tensors))
    weights.write(own / "model.safetensors", tensors | {name: -tensors[name]}, overwrite=True)
    assert "config.json or model.safetensors is not as it was written" in unreadable(own)


@pytest.mark.exhaustive
def test_a_hugging_face_folder_comes_with_its_origin(tmp_path, capsys):
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    changes = write_tokenizer("pegasus", theirs)
    foreign_model("pegasus", None, torch.bfloat16, **changes).save_pretrained(theirs)
    (theirs / "NOTES.txt").write_text("mine")
    with unchecked():
        command_call("export", str(theirs), str(own), "--to", "torch")()
    assert "converted from bfloat16 to float32" in capsys.readouterr().out
    assert {leaf.dtype for leaf in torch_reference.load(own).state_dict().values()} == {
        torch.float32
    }
    command_call("convert", str(own), str(tmp_path / "home"), "--output-layout", "pegasus")()
    for name in ("NOTES.txt", "generation_config.json", "spiece.model"):
        assert (tmp_path / "home" / name).read_bytes() == (theirs / name).read_bytes(), name
