"""A family that only this file knows: converted both ways, verified and translated by commands.

Its model is the paper's Transformer under names of its own; its tokenizer is this library's.
"""

import dataclasses
import io
import json
import os
import sys
from functools import partial

import pytest

from jax_transformer import convert
from jax_transformer.commands import main as cli
from jax_transformer.config.presets import PRESETS
from jax_transformer.convert import Layout, Operation, Row, transpose
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import (
    ACTIVATIONS,
    Family,
    config_from_json,
    config_to_json,
)
from jax_transformer.convert.huggingface import load_folder, to_huggingface
from jax_transformer.errors import InputError
from jax_transformer.storage import weights as weight_files
from jax_transformer.tokenizers import read_byte_pair, read_files
from jax_transformer.tokenizers.readers.classes import CLASSES, Format, TokenizerClass
from jax_transformer.translation.model_folder import save
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.models import tiny_model


def toy_rows():
    yield Row("words", "token_embedding/embedding")
    yield Row("head", "token_embedding/embedding")
    attentions = {"encoder": ("self_attention",), "decoder": ("self_attention", "cross_attention")}
    for stack, names in attentions.items():
        for name in names:
            foreign, path = f"{stack}.{{i}}.{name}", f"{stack}/layers_{{i}}/{name}"
            heads = Operation(transposed=True, shape=("num_heads", "head_dim", "d_model"))
            yield Row(f"{foreign}.q", f"{path}/query/kernel", heads)
            yield Row(f"{foreign}.kv", (f"{path}/key/kernel", f"{path}/value/kernel"), transpose)
            yield Row(f"{foreign}.out", f"{path}/output/kernel")
        for name in (*names, "feed_forward"):
            for own, leaf in (("g", "scale"), ("b", "bias")):
                path = f"{stack}/layers_{{i}}/{name}_residual/norm/{leaf}"
                yield Row(f"{stack}.{{i}}.{name}.norm.{own}", path)
        for own, part in (("up", "inner"), ("down", "outer")):
            path = f"{stack}/layers_{{i}}/feed_forward/{part}"
            yield Row(f"{stack}.{{i}}.{own}.w", f"{path}/kernel")
            yield Row(f"{stack}.{{i}}.{own}.b", f"{path}/bias")


TOY = Family(
    model_type="toy",
    architecture="ToyForTranslation",
    preset="vaswani2017",
    layout=Layout("toy", tuple(toy_rows())),
    generation=lambda config: {
        "num_beams": 3,
        "length_penalty": 0.0,
        "early_stopping": "never",
        "max_length": 13,
        "bad_words_ids": [[config.pad_id]],
        "decoder_start_token_id": config.bos_id,
    },
    fields={
        "vocabulary": ("src_vocab_size", "tgt_vocab_size"),
        "width": "d_model",
        "heads": "num_heads",
        "inner_width": "d_ff",
        "layers": "num_encoder_layers",
        "decoder_layers": "num_decoder_layers",
        "positions": "max_length",
        "dropout_rate": "dropout",
    },
    words={
        "activation": ACTIVATIONS,
        "scaled": {True: {"embedding_scale": "sqrt_d_model"}, False: {"embedding_scale": "none"}},
    },
    fixed={"version": (2, 1), "tied": (True,)},
    defaults={"scaled": True, "positions": 512},
    computed={"decoder_layers": lambda values: values["layers"]},
    tokenizer="ToyTokenizer",
)
TOY_TOKENIZER = TokenizerClass(
    formats=(Format("byte_pair", ("tokenizer.json",)),),
    reader=lambda folder, config, files, described: read_byte_pair(
        read_files(folder, files.names), {}, str(folder)
    ),
    settings=None,
)
LINES = ["abc cab", "", "üß abc", "b"]
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


def add_toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    monkeypatch.setitem(CLASSES, "ToyTokenizer", TOY_TOKENIZER)


@pytest.fixture
def toy(monkeypatch):
    add_toy(monkeypatch)
    return TOY


@pytest.fixture(scope="module")
def trained():
    fields = PRESETS["vaswani2017"] | {"max_length": 23, "num_encoder_layers": 1}
    return tiny_model(["abc cab üß"], vocab_size=12, seed=3, num_decoder_layers=2, **fields)


@pytest.fixture
def own(trained, tmp_path):
    save(tmp_path / "own", trained)
    return tmp_path / "own"


@pytest.fixture
def run(monkeypatch, capsysbinary):
    """Run a command in this process; return what it printed."""

    def run(*arguments, text=""):
        stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(text.encode())))
        monkeypatch.setattr(sys, "stdin", stdin)
        cli.command_call(*map(str, arguments))()
        return capsysbinary.readouterr().out.decode()

    return run


@pytest.mark.exhaustive
def test_the_command_line_converts_verifies_and_translates(toy, trained, own, run, tmp_path):
    folder = tmp_path / "toy"
    run("convert", own, folder, "--output-layout", "toy")
    assert sorted(os.listdir(folder)) == FILES
    written = weight_files.read(folder / "model.safetensors")
    assert "decoder.1.cross_attention.kv" in written
    assert "head" not in written  # a tied copy

    # Back, with and without the name of the layout: the same bits.
    expected = convert.to_torch(trained.params, trained.config)
    for number, layout in enumerate((["--layout", "toy"], [])):
        back = tmp_path / f"back{number}.safetensors"
        run("convert", folder, back, *layout)
        assert_same_tensors(weight_files.read(back), expected)

    # A type asked for is the type written, whatever the source and the output.
    half = tmp_path / "half"
    run("convert", own, half, "--output-layout", "toy", "--dtype", "bfloat16")
    run("convert", own, tmp_path / "half.pt", "--dtype", "bfloat16")
    for path in (half / "model.safetensors", tmp_path / "half.pt"):
        assert {str(array.dtype) for array in weight_files.read(path).values()} == {"bfloat16"}

    printed = run("verify", folder)
    assert "decoder.layers.1.cross_attention " in printed
    assert "\na agrees with b\n" in printed

    text = "\n".join(LINES)
    translations = run("translate", folder, "--scores", text=text)  # by the folder's defaults
    options = ["--scores", "--beam", 3, "--length-penalty", 0, "--max-new-tokens", 12]
    assert run("translate", own, *options, text=text) == translations
    assert len(translations.splitlines()) == len(LINES)


def test_the_folder_has_what_translation_needs(toy, trained, tmp_path):
    write = partial(to_huggingface, trained.params, trained.config, tokenizer=trained.tokenizer)
    write(tmp_path / "toy")  # the only family that has models of this config
    _, params, tokenizer, generation = load_folder(tmp_path / "toy")
    assert_same_params(params, trained.params)
    assert tokenizer.digest() == trained.tokenizer.digest()
    power = {"length_normalization": "power"}
    assert generation == {"beam_size": 3, "length_penalty": 0.0, "max_new_tokens": 12} | power
    assert load_folder(tmp_path / "toy", ignore_generation_config=True)[3] == {}

    # A tokenizer's file is not overwritten either.
    for name in FILES[:-1]:
        (tmp_path / "toy" / name).unlink()
    with pytest.raises(InputError, match=r"already holds tokenizer\.json"):
        write(tmp_path / "toy")


def test_absent_keys_have_the_meaning_that_the_family_gives_them(trained):
    whole = config_to_json(TOY, trained.config)
    names = {"architectures": ["ToyForTranslation"], "model_type": "toy"}
    names |= {"version": 2, "tied": True}
    sizes = {"vocabulary": 12, "width": 8, "heads": 2, "inner_width": 9, "positions": 23}
    words = {"dropout_rate": 0.1, "activation": "relu", "scaled": True}
    assert whole == names | sizes | words | {"layers": 1, "decoder_layers": 2}

    def read(**changes):
        values = {key: value for key, value in (whole | changes).items() if value != "absent"}
        return config_from_json(TOY, values)

    assert read(version=1) == read(version="absent", tied="absent", scaled="absent") == read()
    assert read(positions="absent").max_length == 512
    assert read(scaled=False).embedding_scale == "none"
    refused = {
        r"version=3 must be one of 2, 1": {"version": 3},
        r"tied=False must be true": {"tied": False},
        r"scaled=1 must be one of true, false": {"scaled": 1},
        r"has no 'layers'": {"layers": "absent"},
    }
    for message, changes in refused.items():
        with pytest.raises(InputError, match=message):
            read(**changes)
    for decoder_layers in ("absent", None):  # as many as the encoder has
        assert read(decoder_layers=decoder_layers, layers=5).num_decoder_layers == 5


def test_the_registry_is_asked_everywhere(toy, trained, own, run, tmp_path, monkeypatch):
    assert convert.layouts()[-1] == "toy"
    assert convert.get_layout("toy") is TOY.layout
    folder = tmp_path / "toy"
    to_huggingface(trained.params, trained.config, folder, tokenizer=trained.tokenizer)
    monkeypatch.setitem(FAMILIES, "toy2", dataclasses.replace(TOY, model_type="toy2"))
    with pytest.raises(InputError, match=r"toy: model_type='toy' contradicts --layout toy2$"):
        run("convert", folder, tmp_path / "x.pt", "--layout", "toy2")
    with pytest.raises(InputError, match=r"contradicts --layout toy$"):
        run("convert", own, tmp_path / "x", "--layout", "toy")
    with pytest.raises(InputError, match="choose one by family= from toy, toy2"):
        to_huggingface(trained.params, trained.config, tmp_path / "two")
    to_huggingface(trained.params, trained.config, tmp_path / "two", family="toy2")
    assert json.loads((tmp_path / "two" / "config.json").read_text())["model_type"] == "toy2"

    monkeypatch.setitem(FAMILIES, "toy", dataclasses.replace(TOY, tokenizer=None))
    message = "toy: this library cannot read the tokenizer of a ToyForTranslation"
    with pytest.raises(InputError, match=message):
        run("translate", folder)
    monkeypatch.delitem(FAMILIES, "toy2")
    monkeypatch.delitem(FAMILIES, "toy")
    known = ", ".join(FAMILIES)
    message = f"^config.json: model_type='toy' is unknown; this library knows {known}$"
    for command in (["verify", folder], ["translate", folder], ["convert", folder, "x.pt"]):
        with pytest.raises(InputError, match=message):
            run(*command)
    assert "toy" not in convert.layouts()
