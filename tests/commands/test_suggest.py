"""`jax-transformer suggest`: from a file of weights to a layout, and every refusal before work."""

import dataclasses

import pytest
import torch

from jax_transformer import convert
from jax_transformer.porting.record import snippet
from jax_transformer.storage import weights as files
from tests.porting.foreign_models import MODELS, OUTSIDE, vocabularies
from tests.porting.workshop import PAD, WORDS, workshop


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the weights and the record of a model that fits, and of one that does not."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("unnormed_decoder", "linear_bias"):
        model = (MODELS | OUTSIDE)[name]
        module = model.module()
        files.write(folder / f"{name}.safetensors", module.state_dict())
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            torch.manual_seed(0)
            try:
                exec(snippet(model.pad_id, *vocabularies(model)), {"model": module})
            finally:
                torch.set_default_dtype(torch.float32)
        (folder / "recorded.safetensors").rename(folder / f"{name}.recorded.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_record_it_prints_rows_questions_and_the_code(folder, run, tmp_path):
    code, printed = run("suggest", str(folder / "unnormed_decoder.safetensors"))
    assert code == 0
    assert "likely  encode.stages.{i}.mha.in_proj_weight  " in printed
    assert "{query,key,value}/kernel transposed by rows" in printed
    assert "  open: norm_placement: pre\n      or post" in printed
    assert "PAD, SOURCES, TARGETS, S, T = 0, 37, 61, 7, 5" in printed
    assert convert.read_layout(tmp_path / "layout.toml").config.num_decoder_layers == 3


@pytest.mark.exhaustive
def test_with_a_record_the_layout_is_that_of_the_program(folder, run, tmp_path):
    weights, recorded = (
        str(folder / f"unnormed_decoder.{end}") for end in ("safetensors", "recorded.safetensors")
    )
    code, printed = run("suggest", weights, "--against", recorded, "--output", "mine.toml")
    assert code == 0, printed
    assert "100% certain" in printed
    assert "logits in JAX: " in printed
    read = convert.read_layout(tmp_path / "mine.toml")
    assert read.config.decoder_final_norm is False
    assert run("verify", weights, "--layout", "mine.toml", "--against", recorded)[0] == 0
    assert run("convert", weights, "own.safetensors", "--layout", "mine.toml")[0] == 0
    wrong = dataclasses.replace(read.config, activation="gelu_tanh")
    convert.write_layout("wrong.toml", read.layout, wrong)
    code, printed = run("verify", weights, "--layout", "wrong.toml", "--against", recorded)
    assert code == 1
    assert "activation='gelu', not 'gelu_tanh'" in printed


@pytest.mark.exhaustive
def test_a_model_outside_the_configs_writes_nothing(folder, run, tmp_path):
    weights, recorded = (
        folder / "linear_bias.safetensors",
        folder / "linear_bias.recorded.safetensors",
    )
    options = ("--against", str(recorded), "--minutes", "0.05")
    code, printed = run("suggest", str(weights), *options)
    assert code == 1
    assert printed.endswith("layout.toml is not written\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_what_does_not_hold_leaves_the_older_layout(run, tmp_path):
    """Each layer follows the record, and the model does not: padding holds the program's own."""
    module = workshop(source_mask="rows")
    files.write("rows.safetensors", module.state_dict())
    torch.manual_seed(0)
    try:
        exec(snippet(PAD, WORDS, WORDS), {"model": module})
    finally:
        torch.set_default_dtype(torch.float32)
    (tmp_path / "layout.toml").write_text("kept")
    options = ("--against", "recorded.safetensors", "--overwrite")
    code, printed = run("suggest", "rows.safetensors", *options)
    assert code == 1
    assert "nothing fits at logits in batch 2" in printed
    assert (tmp_path / "layout.toml").read_text() == "kept"
    assert printed.splitlines()[-1] == "layout.toml is not written"


def test_known_names_are_recognised(run, tmp_path):
    module = torch.nn.Transformer(12, 2, 2, 2, 20)
    torch.save(module.state_dict(), tmp_path / "nn.pt")
    code, printed = run("suggest", "nn.pt")
    assert code == 0
    assert "note: these are the names of the layout torch_nn\n" in printed


def refusals(folder):
    weights = str(folder / "unnormed_decoder.safetensors")
    recorded = str(folder / "unnormed_decoder.recorded.safetensors")
    yield (weights, "--output", "taken.toml"), "taken.toml already exists"
    yield (weights, "--output", "layout.txt"), "--output layout.txt must be a .toml file"
    yield (weights, "--output", "no/layout.toml"), "in a folder that exists"
    yield (str(folder),), "holds none of model.safetensors"
    yield (weights, "--drop", "heads.*"), "drop='heads.*' is the name of no tensor"
    yield (weights, "--key", "model"), "key='model' is for torch.save files"
    yield ("absent.pt",), "absent.pt cannot be read"
    yield ("taken.toml",), "must end in .safetensors"
    yield (weights, "--against", weights), "is none of src, tgt, logits"
    yield (recorded,), "found 4 stacks of layers"
    yield (weights, "--against", str(folder / "linear_bias.recorded.safetensors")), "logits have 43"


@pytest.mark.parametrize("index", range(11))
def test_bad_input_is_one_line_and_writes_nothing(folder, run, tmp_path, index):
    (tmp_path / "taken.toml").write_text("kept")
    before = sorted(tmp_path.iterdir())
    arguments, message = list(refusals(folder))[index]
    error, printed = run("suggest", *arguments)
    assert message in error
    assert "\n" not in error
    # Weights that cannot be placed can be recorded all the same, for a layout by hand.
    assert ("PAD, SOURCES" in printed) == bool(printed) == ("stacks of layers" in message)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "taken.toml").read_text() == "kept"


def test_an_encoder_alone_is_told_without_code_to_record(run, tmp_path):
    module = torch.nn.Transformer(12, 2, 2, 2, 20).encoder
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    torch.save(module.state_dict(), "encoder.pt")
    code, printed = run("suggest", "encoder.pt")
    assert code.startswith(
        "error: an encoder or a decoder alone: one stack of layers, layers.{0..1}"
    )
    assert (printed, [path.name for path in tmp_path.iterdir()]) == ("", ["encoder.pt"])


def test_a_checkpoint_comes_in_and_goes_home_by_commands(folder, run, tmp_path):
    """With an entry that is named, an extra head and a wrapper's names."""
    weights = files.read(folder / "unnormed_decoder.safetensors")
    tensors = {f"module.{name}": torch.tensor(tensor) for name, tensor in weights.items()}
    extra = {"module.second_head.weight": torch.randn(3, 5)}
    torch.save({"net": tensors | extra, "ema": {"decay": 0.9}, "epoch": 7}, tmp_path / "last.ckpt")
    code, _ = run("suggest", "last.ckpt")
    assert "--key" in code
    code, _ = run("suggest", "last.ckpt", "--key", "net")
    assert "second_head.weight [3, 5]" in code
    assert "--drop" in code
    options = ("--key", "net", "--drop", "second_head.*")
    code, printed = run("suggest", "last.ckpt", *options)
    assert code == 0
    assert "note: left out: second_head.weight\n" in printed
    assert run("verify", "last.ckpt", "--layout", "layout.toml", *options)[0] == 0
    assert (
        run("convert", "last.ckpt", "own.safetensors", "--layout", "layout.toml", *options)[0] == 0
    )
    back = ("convert", "own.safetensors", "back.pt", "--output-layout", "layout.toml")
    assert run(*back)[0] == 0
    assert files.read("back.pt").keys() == weights.keys()
    code, _ = run("convert", "last.ckpt", "more.pt", "--layout", "layout.toml", "--key", "net")
    assert "unexpected      second_head.weight" in code
    assert "left out by --drop NAME" in code
    code, _ = run("convert", "own.safetensors", "more.pt", "--key", "net")
    assert "key='net' is for torch.save files" in code
