"""Encoders alone: folders of T5EncoderModel and its kind, and the encoders of whole models."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

import jax_transformer
from jax_transformer import TransformerConfig, convert, encode
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.huggingface import from_huggingface, load_folder, to_huggingface
from jax_transformer.convert.table import flatten
from jax_transformer.errors import InputError
from jax_transformer.storage.weights.arrays import as_numpy
from tests.compilation import QUICKLY
from tests.convert.families.case import (
    CASES,
    as_inputs,
    change_values,
    foreign_model,
    goes_home,
    ragged_tokens,
    read_values,
    transformers,
    widened,
    write_tokenizer,
)
from tests.convert.tools import assert_same_params, assert_same_tensors, same_bits
from tests.models import random_params, small_config
from tests.parity.ladder import error, widen
from tests.tiers import tiered

WITH_CLASS = ("t5", "mt5", "umt5")
forward = jax.jit(encode, static_argnames="config")


def encoder_of(model):
    """Return the class's model of an encoder alone, with the weights of a whole model."""
    name = type(model).__name__.replace("ForConditionalGeneration", "EncoderModel")
    config = type(model.config)(**model.config.to_dict())
    encoder = getattr(transformers, name)(config).to(model.dtype).eval()
    encoder.load_state_dict(model.state_dict(), strict=False)
    return encoder


def hidden_states(encoder, config, src):
    with torch.no_grad():
        return encoder(**as_inputs(config, src)).last_hidden_state.numpy()


def without_targets(params):
    """Return the leaves of a whole model that its encoder alone has, by path."""
    targets = ("decoder/", "target_", "output_projection/")
    return {path: leaf for path, leaf in flatten(params).items() if not path.startswith(targets)}


@pytest.mark.parametrize("name", tiered(CASES, ["t5", "m2m_100"]))
def test_the_encoder_of_a_whole_folder_is_a_part_of_the_model(name, tmp_path):
    model = foreign_model(name)
    model.save_pretrained(tmp_path)
    config, params = from_huggingface(tmp_path)
    for source in (tmp_path, model):
        part, alone = from_huggingface(source, part="encoder")
        assert part == config.part("encoder")
        assert_same_tensors(flatten(alone), without_targets(params))


@pytest.mark.parametrize("name", tiered(WITH_CLASS, ["umt5"]))
def test_a_folder_of_an_encoder_alone_comes_in_and_goes_home(name, tmp_path):
    encoder = encoder_of(foreign_model(name))
    encoder.save_pretrained(tmp_path / "model")
    config, params = goes_home(tmp_path / "model", tmp_path / "home")
    assert config.num_decoder_layers == 0
    src, _ = ragged_tokens(config)
    expected = hidden_states(widened(encoder, name), config, src)[src != config.pad_id]
    with jax.enable_x64(True):
        exact = forward(widen(params), config, src)
    assert error(exact[src != config.pad_id], expected) <= 1e-14
    to_huggingface(params, config, tmp_path / "anew", family=name)
    for kind in ("anew", "home"):
        assert read_values(tmp_path / kind)["architectures"] == [type(encoder).__name__]
        again = type(encoder).from_pretrained(tmp_path / kind)
        assert_same_tensors(again.state_dict(), encoder.state_dict())


def test_a_published_folder_says_of_its_encoder_what_is_true_of_the_whole_model(tmp_path):
    encoder = encoder_of(foreign_model("t5"))
    encoder.save_pretrained(tmp_path, max_shard_size="9KB")
    of_whole = {"tie_word_embeddings": False, "output_past": True}
    change_values(tmp_path, is_encoder_decoder=True, **of_whole)
    config, params = from_huggingface(tmp_path, dtype="bfloat16")
    assert config.output_projection == "none"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    change_values(tmp_path, is_encoder_decoder=False, architectures=None)
    with pytest.raises(InputError, match=r"is_encoder_decoder=False must .* part='encoder'"):
        from_huggingface(tmp_path)
    assert from_huggingface(tmp_path, part="encoder")[0] == config


def test_the_weights_of_the_decoder_are_not_read(tmp_path):
    model = foreign_model("t5", "v1_1")
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = {file for name, file in index["weight_map"].items() if name.startswith("encoder.")}
    shards |= {index["weight_map"]["shared.weight"]}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in shards:
            path.unlink()
    with pytest.raises(InputError, match="is missing; fetch it again"):
        from_huggingface(tmp_path)
    config, params = from_huggingface(tmp_path, part="encoder")
    assert_same_params(params, from_huggingface(model, part="encoder")[1])
    with pytest.raises(InputError, match="unexpected"):
        convert.from_torch(model.state_dict(), config, "t5")


def test_a_tensor_that_no_model_of_the_family_has_is_refused(tmp_path):
    model = foreign_model("t5")
    tensors = {name: as_numpy(x) for name, x in model.state_dict().items()}
    model.config.save_pretrained(tmp_path)
    tensors["encoder.block.0.extra"] = np.ones(3, np.float32)
    convert.weight_files.write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(InputError, match=r"encoder\.block\.0\.extra"):
        from_huggingface(tmp_path, part="encoder")


def test_text_to_hidden_states_and_a_model_of_this_library(tmp_path):
    ids = write_tokenizer("umt5", tmp_path / "model")
    whole = foreign_model("umt5", **ids)
    whole.save_pretrained(tmp_path / "model")
    config, params, tokenizer, generation = jax_transformer.load(tmp_path / "model", part="encoder")
    assert generation == {}
    src = jax_transformer.pad(tokenizer.encode_source(["a b", "c"]), config.pad_id)
    expected = forward(params, config, src)
    jax_transformer.save(tmp_path / "alone", (config, params, tokenizer))
    jax_transformer.save(tmp_path / "whole", load_folder(tmp_path / "model"))
    for folder, part in (("alone", "whole"), ("alone", "encoder"), ("whole", "encoder")):
        again = jax_transformer.load(tmp_path / folder, part=part)
        assert again.config == config
        assert_same_params(again.params, params)
        assert np.array_equal(forward(again.params, config, src), expected)
    with pytest.raises(InputError, match="num_decoder_layers=0 is an encoder alone"):
        jax_transformer.Translator(tmp_path / "alone")("a b")


def test_an_encoder_that_no_class_of_transformers_has_keeps_its_tensors(tmp_path):
    model = foreign_model("bart")
    config, params = from_huggingface(model, part="encoder")
    with pytest.raises(InputError, match="no class for the encoder of a BartForConditionalGen"):
        to_huggingface(params, config, tmp_path / "out", family="bart")
    tensors = convert.to_torch(params, config, "bart")
    weights = model.state_dict()
    assert all(same_bits(x, weights[name]) for name, x in tensors.items())
    assert {*tensors} == {
        name for name in weights if name.startswith(("model.encoder.", "model.shared."))
    }


def test_a_part_that_is_none_is_named():
    with pytest.raises(InputError, match="part='decoder' must be 'whole' or 'encoder'"):
        from_huggingface(foreign_model("t5"), part="decoder")


ON_EIGHT_DEVICES = """
import sys, jax, numpy as np
import jax_transformer
from jax_transformer.convert import from_huggingface
from jax_transformer.convert.table import flatten

mesh = jax_transformer.make_mesh("data=2,fsdp=2,tensor=2")
config, params = from_huggingface(sys.argv[1], part="encoder", mesh=mesh)
places = flatten(jax_transformer.parameter_shardings(mesh, params, config))
assert all(leaf.sharding == places[path] for path, leaf in flatten(params).items())
split = [leaf for leaf in jax.tree.leaves(params) if not leaf.sharding.is_fully_replicated]
src = np.arange(3, 23, dtype=np.int32).reshape(4, 5)
src[1, 3:] = config.pad_id
forward = jax.jit(jax_transformer.encode, static_argnames="config")
with jax.set_mesh(mesh):
    ours = forward(params, config, src)
one = forward(from_huggingface(sys.argv[1], part="encoder")[1], config, src)
print(len(split), float(abs(ours - one).max() / max(1, abs(one).max())))
"""


@pytest.mark.exhaustive
def test_an_encoder_is_read_onto_eight_devices(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 52}
    foreign_model("t5", {**sizes, "num_layers": 2}).save_pretrained(tmp_path)
    flags = f"--xla_force_host_platform_device_count=8 {QUICKLY}"
    done = subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES, tmp_path],
        capture_output=True,
        env=os.environ | {"XLA_FLAGS": flags},
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    split, difference = map(float, done.stdout.split())
    assert split == 2 * 6 + 1  # each kernel, and the table of tokens
    assert difference <= 2e-6


@pytest.mark.parametrize("preset", ["vaswani2017", "bart", "t5"])
def test_an_encoder_alone_has_no_target_side(preset):
    whole = small_config(preset)
    config = whole.part("encoder")
    params, alone = random_params(whole), random_params(config)
    assert flatten(alone).keys() == without_targets(params).keys()
    src, _ = ragged_tokens(config)
    kept = {name: part for name, part in params.items() if name in alone}
    assert np.array_equal(forward(kept, config, src), forward(params, whole, src))
    calls = {
        "apply": lambda: jax_transformer.apply(alone, config, src, src),
        "decode": lambda: jax_transformer.decode(alone, config, src, forward(alone, config, src)),
        "generate": lambda: jax_transformer.generate(alone, config, src, max_new_tokens=3),
        "score": lambda: jax_transformer.score(alone, config, src, src),
        "init_cache": lambda: jax_transformer.init_cache(
            alone, config, forward(alone, config, src), 4
        ),
    }
    for call in calls.values():
        with pytest.raises(InputError, match="num_decoder_layers=0 is an encoder alone"):
            call()


def test_a_field_of_the_decoder_is_refused():
    with pytest.raises(InputError, match="output_projection='tied' must be 'none'"):
        TransformerConfig(num_decoder_layers=0, output_projection="tied")
    assert {FAMILIES[name].encoder_architecture for name in WITH_CLASS} == {
        "T5EncoderModel",
        "MT5EncoderModel",
        "UMT5EncoderModel",
    }
