"""Every family beside transformers: the same numbers, and weights that travel both ways.

No model is downloaded: each is built from a configuration with random numbers in every leaf.
"""

import dataclasses
import functools
import os
import shutil
import socket
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_transformer import TransformerConfig, convert
from jax_transformer.convert.families import FAMILIES, REFUSED, get_family
from jax_transformer.convert.families.family import config_from_json, config_to_json
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.errors import InputError
from tests.convert.families.case import (
    CASES,
    as_inputs,
    change_values,
    foreign_model,
    foreign_results,
    memory_and_logits,
    ragged_tokens,
    strictly_loaded,
    transformers,
    weights_of,
    widened,
)
from tests.convert.tools import assert_same_params, same_bits
from tests.parity.ladder import bound, check_errors, error, moved, widen
from tests.tiers import QUICK_FAMILIES, tiered, tiered_rows

SHAPES = [(name, shape) for name, case in CASES.items() for shape in case.shapes]
QUICK_SHAPES = [(name, next(iter(CASES[name].shapes))) for name in QUICK_FAMILIES]
FILES = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.fixture(scope="module", params=tiered(CASES, QUICK_FAMILIES))
def family(request):
    return FAMILIES[request.param]


# For what no family decides.
ONE_FAMILY = pytest.mark.parametrize("family", ["marian"], indirect=True)


class Usual(NamedTuple):
    """The first small model of a family, the same here, and the folder that is written of it."""

    model: torch.nn.Module
    config: TransformerConfig
    params: dict
    folder: Path


@pytest.fixture(scope="module")
def usual(family, tmp_path_factory):
    model = foreign_model(family.model_type)
    config, params = from_huggingface(model)
    folder = tmp_path_factory.mktemp(family.model_type) / "model"
    to_huggingface(params, config, folder, family=family.model_type)
    return Usual(model, config, params, folder)


@pytest.mark.parametrize(("name", "shape"), tiered_rows(SHAPES, lambda *row: row in QUICK_SHAPES))
def test_the_same_numbers(name, shape, dtype):
    model = foreign_model(name, shape, getattr(torch, dtype))
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config)
    valid = src != config.pad_id  # outputs at padding are not defined

    def ours(params):
        memory, logits = memory_and_logits(params, config, src, tgt)
        return {"logits": logits, "memory": np.asarray(memory)[valid]}

    def theirs(model):
        logits, states = foreign_results(model, config, src, tgt)
        return {"logits": logits, "memory": states[-1].numpy()[valid]}

    results = ours(params), theirs(model)
    errors = {part: error(*(one[part] for one in results)) for part in results[0]}
    listed = ", ".join(f"{part} {measured:.1e}" for part, measured in errors.items())
    print(f"\n{name} {shape} {dtype}: {listed}")
    if dtype == "float64":
        assert max(errors.values()) <= bound("logits", dtype), errors
        return
    with jax.enable_x64(True):
        wide = widen(params)
        exact = ours(wide), theirs(widened(model, name))
        check_errors(f"{name} {shape}", results, exact, list(map(ours, moved(wide))), kind="logits")


@pytest.mark.parametrize(
    ("name", "shape", "dtype_name"),
    tiered_rows(
        [
            *((name, shape, "float32") for name, shape in SHAPES),
            *((name, None, half) for name in CASES for half in ("float16", "bfloat16")),
        ],
        lambda name, shape, dtype: (name, shape) in QUICK_SHAPES or name == "marian",
    ),
)
def test_there_and_back_is_bit_equal(tmp_path, name, shape, dtype_name):
    model = foreign_model(name, shape, getattr(torch, dtype_name))
    config, params = from_huggingface(model)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype_name}
    to_huggingface(params, config, tmp_path / "model", family=name)
    assert sorted(os.listdir(tmp_path / "model")) == FILES
    loaded = strictly_loaded(type(model), tmp_path / "model")
    assert str(loaded.dtype) == f"torch.{dtype_name}"
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    wide = CASES[name].float32 if dtype_name == "float16" else ()
    for key in found:
        assert found[key].dtype == (torch.float32 if key.endswith(wide) else loaded.dtype)
        found[key] = found[key].to(loaded.dtype)  # exact: both ends have the bits of float16
    equal = {key for key in expected if same_bits(expected[key], found[key])}
    print(f"\n{name} {shape} {dtype_name}: {len(equal)} of {len(expected)} tensors bit-equal")
    # transformers computes buffers again.
    buffers = {buffer.foreign for buffer in FAMILIES[name].layout.buffers}
    assert expected.keys() - buffers <= equal
    addresses = [{tensor.data_ptr() for tensor in both.values()} for both in (expected, found)]
    assert len(addresses[0]) == len(addresses[1])  # tied tensors are tied again

    folders = ["model"]
    if dtype_name == "float32":  # what transformers saves: the same names, without tied copies
        folders += ["new", "old"]
        model.save_pretrained(tmp_path / "new")
        model.config.save_pretrained(tmp_path / "old")
        torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
        assert weights_of(tmp_path / "model").keys() == weights_of(tmp_path / "new").keys()
    for folder in folders:
        read_config, read_params = from_huggingface(tmp_path / folder)
        assert read_config == config
        assert_same_params(read_params, params)


def test_the_registry_and_the_description_agree(family):
    assert FAMILIES[family.model_type] is family
    assert family.layout.name == family.model_type
    assert family.model_type in convert.layouts()
    assert convert.get_layout(family.model_type) is family.layout
    assert family.preset in TransformerConfig.presets()
    assert hasattr(transformers, family.architecture)


def test_values_that_the_model_cannot_have_are_refused_by_name(family, usual, tmp_path):
    for key, value in CASES[family.model_type].refused.items():
        own = family.fields.get(key, key)  # a message of TransformerConfig has the field's name
        named = "|".join((key, own) if isinstance(own, str) else (key, *own))
        folder = shutil.copytree(usual.folder, tmp_path / key)
        with pytest.raises(InputError, match=rf"config\.json: .*({named})"):
            from_huggingface(change_values(folder, **{key: value}))


@ONE_FAMILY
def test_an_unknown_model_type_is_refused_with_the_known_ones(usual, tmp_path):
    folder = shutil.copytree(usual.folder, tmp_path / "model")
    for value in ("vit", None, ["marian"]):
        with pytest.raises(InputError) as refused:
            from_huggingface(change_values(folder, model_type=value))
        assert str(refused.value) == (
            f"config.json: model_type={value!r} is unknown; this library knows "
            f"{', '.join(FAMILIES)}"
        )


def test_every_encoder_decoder_of_transformers_is_a_family_or_refused_with_a_reason():
    auto = transformers.models.auto.modeling_auto
    theirs = {*auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    theirs |= {"nllb_moe", "xlm-prophetnet", "whisper", "speech_to_text", "speecht5"}
    assert theirs <= FAMILIES.keys() | REFUSED.keys()
    assert not REFUSED.keys() & FAMILIES.keys()
    for model_type, reason in REFUSED.items():
        with pytest.raises(InputError) as refused:
            get_family(model_type)
        remedy = f"{reason}; transformers runs it"
        assert str(refused.value) == f"model_type={model_type!r} cannot be converted: {remedy}"


def test_configs_that_the_family_cannot_have_are_refused_by_name(family, usual, tmp_path):
    for changes in CASES[family.model_type].impossible:
        changed = dataclasses.replace(usual.config, **changes)
        message = f"no {family.architecture} has this config: {next(iter(changes))}"
        with pytest.raises(InputError, match=message) as refusal:
            to_huggingface(usual.params, changed, tmp_path / "model", family=family.model_type)
        assert str(refusal.value).endswith(f"is trained with preset={family.preset!r}")
    assert os.listdir(tmp_path) == []


def test_the_decoder_has_the_final_norm_of_the_encoder(family, usual):
    final_norm = usual.config.final_norm

    def to_json(own):
        return config_to_json(family, dataclasses.replace(usual.config, decoder_final_norm=own))

    assert to_json(final_norm) == config_to_json(family, usual.config)
    with pytest.raises(InputError, match=f"decoder_final_norm=.*{not final_norm}"):
        to_json(not final_norm)


def test_every_word_goes_there_and_back(family, usual):
    """Each value of a key with few values, and a rate that follows from another."""
    changes = [{"attention_dropout": None}]
    changes += [fields for words in family.words.values() for fields in words.values()]
    for fields in changes:
        changed = dataclasses.replace(usual.config, **fields)
        if family.implied is not None:
            changed = dataclasses.replace(changed, **family.implied(changed.explicit()))
        back = config_from_json(family, config_to_json(family, changed))
        assert back.attention_dropout == changed.attention_dropout_rate
        assert dataclasses.replace(back, attention_dropout=changed.attention_dropout) == changed


@ONE_FAMILY
def test_nothing_is_overwritten(usual, tmp_path):
    write = functools.partial(to_huggingface, usual.params, usual.config, family="marian")
    for name in FILES:
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("precious")
        (folder / "source.spm").write_text("a tokenizer")
        with pytest.raises(InputError, match=f"already holds {name}"):
            write(folder)
        assert (folder / name).read_text() == "precious"
        assert sorted(os.listdir(folder)) == sorted([name, "source.spm"])
        write(folder, overwrite=True)
        assert from_huggingface(folder)[0] == usual.config
        assert (folder / "source.spm").read_text() == "a tokenizer"


@ONE_FAMILY
def test_links_in_the_folder_are_replaced_not_followed(usual, tmp_path):
    folder, target = tmp_path / "model", tmp_path / "target"
    folder.mkdir()
    target.write_text("precious")
    for name in FILES:
        (folder / name).symlink_to(target)
    to_huggingface(usual.params, usual.config, folder, family="marian", overwrite=True)
    assert target.read_text() == "precious"
    assert not any((folder / name).is_symlink() for name in os.listdir(folder))


@ONE_FAMILY
def test_unusable_sources_are_refused(usual, tmp_path):
    with pytest.raises(InputError, match="opus-mt-en-de is no folder; nothing is downloaded"):
        from_huggingface("Helsinki-NLP/opus-mt-en-de")
    with pytest.raises(InputError, match=r"config\.json is no readable JSON.*No such file"):
        from_huggingface(tmp_path)
    with pytest.raises(InputError, match=r"cannot be written.*No such file"):
        to_huggingface(usual.params, usual.config, tmp_path / "missing" / "x", family="marian")
    folder = shutil.copytree(usual.folder, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"holds none of model\.safetensors.*pytorch_model\.bin"):
        from_huggingface(folder)


class Model:
    """What `from_huggingface` uses of a model, with any tensors."""

    def __init__(self, config, tensors):
        self.config, self.tensors = config, tensors

    def state_dict(self):
        return self.tensors


@ONE_FAMILY
@pytest.mark.parametrize("source", ["float64", "int32", "complex64"])
def test_no_type_is_changed_unasked(usual, source):
    """float64 would become float32 in jax unasked; numbers of other kinds are no weights."""
    state_dict = usual.model.state_dict()
    tensors = {name: tensor.numpy().astype(source) for name, tensor in state_dict.items()}
    with pytest.raises(InputError, match=r"float64 tensors need|wrong dtype"):
        from_huggingface(Model(usual.model.config, tensors))


@ONE_FAMILY
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float64"])
def test_types_are_changed_on_request(usual, source):
    state_dict = usual.model.state_dict()
    tensors = {name: tensor.to(getattr(torch, source)) for name, tensor in state_dict.items()}
    names = list(tensors)
    _, params = from_huggingface(Model(usual.model.config, tensors), dtype="float32")
    assert list(tensors) == names  # the conversion empties a dict of its own
    expected = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(jnp.dtype(source)).astype(np.float32), usual.params
    )
    assert_same_params(params, expected)


@ONE_FAMILY
def test_all_works_offline(family, usual, tmp_path, monkeypatch):
    refuse = mock.Mock(side_effect=OSError("the network is off"))
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    config, params = from_huggingface(usual.model)
    to_huggingface(params, config, tmp_path / "model", family="marian")
    from_huggingface(tmp_path / "model")
    type(usual.model).from_pretrained(tmp_path / "model")
    refuse.assert_not_called()


def test_translation_goes_on_in_transformers(family, usual):
    """An exported model generates as the model it came from, by its own generation_config.json."""
    loaded = type(usual.model).from_pretrained(usual.folder)
    settings = family.generation(usual.config)
    assert settings.items() <= loaded.generation_config.to_dict().items()
    source = as_inputs(usual.config, ragged_tokens(usual.config)[0])
    options = transformers.GenerationConfig(**settings | {"max_length": 17})
    expected = usual.model.generate(**source, generation_config=options)
    assert torch.equal(loaded.generate(**source, max_length=17), expected)
