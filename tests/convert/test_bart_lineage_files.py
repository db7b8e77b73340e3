"""Old and damaged files of BART's lineage: what is read, what is said, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch

from jax_transformer import TransformerConfig, apply
from jax_transformer.commands.main import command_call
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_from_json, config_to_json, notes
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.origin import read_origin
from jax_transformer.convert.transfer import to_params
from jax_transformer.errors import InputError
from jax_transformer.runs.model_settings import read_initial_model
from tests.convert.families.bart_lineage import CASES, activated, both_sides, ids
from tests.convert.families.case import (
    change_values,
    foreign_model,
    foreign_results,
    logits_error,
    ragged_tokens,
    read_values,
    strictly_loaded,
    transformers,
    write_tokenizer,
)
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.parity.ladder import bound, error
from tests.tiers import tiered_rows


@pytest.fixture
def folder(tmp_path):
    """A function that writes a family's model with its tensors changed, and returns the folder."""

    def write(model_type, change=lambda tensors: None, **values):
        model = foreign_model(model_type)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        change(tensors)
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        model.config.save_pretrained(tmp_path)
        return change_values(tmp_path, **values)

    return write


@pytest.fixture(scope="module")
def bart():
    return from_huggingface(foreign_model("bart"))


def test_an_absent_output_bias_means_zeros_and_versions_are_not_read(bart, folder):
    def old(tensors):
        del tensors["final_logits_bias"]
        for stack in ("encoder", "decoder"):
            tensors[f"model.{stack}.version"] = torch.tensor([3.0])

    config, params = from_huggingface(folder("bart", old))
    bias = params["output_projection"]["bias"]
    assert bias.shape == (config.tgt_vocab_size,)
    assert bias.dtype == np.float32
    assert not bias.any()
    assert_same_params(params | {"output_projection": bart[1]["output_projection"]}, bart[1])

    tensors = foreign_model("bart").half().state_dict()
    old(tensors)
    params, report = to_params(tensors, config, FAMILIES["bart"].layout)
    assert params["output_projection"]["bias"].dtype == np.float16
    assert report.names("zeros") == ["final_logits_bias"]
    assert report.names("not read") == ["model.encoder.version", "model.decoder.version"]


NAMES = [f"model.{stack}.embed_positions.weights" for stack in ("encoder", "decoder")]


def test_the_position_table_of_old_m2m100_files_is_compared(folder):
    def with_table(tensors):
        module = transformers.models.m2m_100.modeling_m2m_100.M2M100SinusoidalPositionalEmbedding
        for name in NAMES:
            tensors[name] = module.get_embedding(39, 42, 1)

    def with_another(tensors):
        with_table(tensors)
        tensors[NAMES[1]][7, 5] += 0.01

    expected = from_huggingface(folder("m2m_100"))
    config, params = from_huggingface(folder("m2m_100", with_table))
    assert config == expected[0]
    assert_same_params(params, expected[1])
    with pytest.raises(InputError, match=rf"not as computed +{NAMES[1]}"):
        from_huggingface(folder("m2m_100", with_another))


def test_m2m100_with_the_table_that_transformers_computes_in_float32():
    model = foreign_model("m2m_100", max_position_embeddings=200)
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_positions.make_weights(202, 42, 1)
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config, 150, 160)
    logits, _ = foreign_results(model, config, src, tgt)
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(apply, static_argnums=1)(params, config, src, tgt)
    assert error(ours, logits) <= 5e-6


def test_layerdrop_is_said_once_and_goes_home(folder, tmp_path, capsys):
    source = folder("m2m_100", encoder_layerdrop=0.05, decoder_layerdrop=0.0)
    command_call("convert", str(source), str(tmp_path / "home"), "--output-layout=m2m_100")()
    lines = capsys.readouterr().out.splitlines()
    said = "config.json: encoder_layerdrop=0.05 is kept, but not applied in training"
    assert [line for line in lines if line.startswith("config.json")] == [said]
    values = read_values(tmp_path / "home")
    assert (values["encoder_layerdrop"], values["decoder_layerdrop"]) == (0.05, 0.0)

    config, params = from_huggingface(source)
    to_huggingface(params, config, tmp_path / "new")  # which skips no layers
    values = read_values(tmp_path / "new")
    assert (values["encoder_layerdrop"], values["decoder_layerdrop"]) == (0.0, 0.0)
    assert read_origin(tmp_path / "new")[0].config == values
    # The class of M2M100 skips layers by default, that of BART does not.
    assert len(notes(FAMILIES["m2m_100"], {})) == 2
    assert notes(FAMILIES["bart"], {}) == []


def test_layerdrop_is_said_where_a_run_starts(tmp_path):
    changes = write_tokenizer("marian", tmp_path / "model")
    model = foreign_model("marian", **changes, decoder_layerdrop=0.1)
    model.save_pretrained(tmp_path / "model")
    said = "config.json: decoder_layerdrop=0.1 is kept, but not applied in training"
    assert read_initial_model(tmp_path / "model")[2] == (f"{tmp_path / 'model'}: {said}",)


@pytest.mark.parametrize("name", ["mbart", "plbart"])
@pytest.mark.parametrize("start", [{}, {"decoder_start_token_id": None}])
def test_without_a_start_id_targets_begin_with_bos(name, start):
    config, _ = from_huggingface(foreign_model(name))
    family = FAMILIES[name]
    values = config_to_json(family, config)
    del values["decoder_start_token_id"]
    assert config_from_json(family, values | start).bos_id == 0
    assert config_from_json(family, values | start | {"bos_token_id": 4}).bos_id == 4
    with pytest.raises(InputError, match="decoder_start_token_id"):
        config_from_json(family, values | start | {"bos_token_id": None})
    assert (
        config_to_json(family, dataclasses.replace(config, bos_id=7))["decoder_start_token_id"] == 7
    )


def test_generation_defaults_of_a_folder_without_an_origin(bart):
    expected = {
        "decoder_start_token_id": 2,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
        "max_length": 37,
        "pad_token_id": 1,
    }
    for name in ("bart", "mbart", "plbart", "mvp"):
        assert FAMILIES[name].generation(bart[0]) == expected
    never_padding = {"bad_words_ids": [[1]]}  # from which the decoder of Marian starts
    assert FAMILIES["marian"].generation(bart[0]) == expected | never_padding
    del expected["forced_eos_token_id"]  # no file of M2M100 or NLLB has it
    assert FAMILIES["m2m_100"].generation(bart[0]) == expected


def test_config_of_an_older_transformers_is_read():
    """The keys that config.json of opus-mt models had in 2020, before some of today's."""
    values = both_sides((58_101, 512, 8, 2048, 6, 6, 512)) | ids(pad=58_100, eos=0)
    values = transformers.MarianConfig(**values | activated("swish")).to_dict()
    for key in ("decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings"):
        del values[key]
    values |= {
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "normalize_before": False,
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "num_beams": 6,
        "max_length": 512,
        "bad_words_ids": [[58_100]],
    }
    assert config_from_json(FAMILIES["marian"], values) == TransformerConfig.preset("marian")


@pytest.mark.parametrize(
    ("name", "shape"),
    tiered_rows(
        [*((name, None) for name in CASES), ("marian", "two_tables")],
        lambda name, shape: name in ("bart", "marian"),
    ),
)
@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_the_base_class_is_read_and_goes_home_whole(name, shape, layout, tmp_path):
    """Its names lack `model.`; the output is the table then, and has no bias."""
    whole = foreign_model(name, shape)
    whole.model.save_pretrained(tmp_path / "base")
    if layout == "bin":  # with the copies of the table, as older versions wrote it
        (tmp_path / "base" / "model.safetensors").unlink()
        torch.save(whole.model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    values = read_values(tmp_path / "base")
    assert values["architectures"] == [type(whole.model).__name__]
    config, params = from_huggingface(tmp_path / "base")
    loaded = type(whole).from_pretrained(tmp_path / "base")
    assert logits_error(params, config, loaded) <= bound("logits", "float32")
    assert_same_params(from_huggingface(whole.model)[1], params)

    origin, _ = read_origin(tmp_path / "base")
    to_huggingface(params, config, tmp_path / "home", origin=origin)
    assert read_values(tmp_path / "home") == values | {"architectures": [type(whole).__name__]}
    again = strictly_loaded(type(whole), tmp_path / "home")
    assert_same_tensors(again.state_dict(), loaded.state_dict())


def test_a_tensor_under_both_names_is_refused(folder):
    def twice(tensors):
        tensors["encoder.layers.0.fc1.bias"] = tensors["model.encoder.layers.0.fc1.bias"] + 1

    with pytest.raises(InputError, match=r"unexpected +encoder\.layers\.0\.fc1\.bias"):
        from_huggingface(folder("bart", twice))


@pytest.mark.parametrize("name", ["BartForQuestionAnswering", "BartForCausalLM"])
def test_a_class_with_other_parts_is_refused_by_its_name(tmp_path, name):
    transformers.BartConfig().save_pretrained(tmp_path)
    change_values(tmp_path, architectures=[name])
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save({"x": np.zeros(1)}))
    with pytest.raises(InputError, match=rf"architectures='{name}' is neither a model"):
        from_huggingface(tmp_path)
