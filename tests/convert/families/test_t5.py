"""T5, mT5 and UMT5 alone: which output, old files, float16, fresh parameters."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import torch

from jax_transformer import TransformerConfig, generate, init_params
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_from_json, config_to_json
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.origin import read_origin
from jax_transformer.convert.table import flatten
from jax_transformer.errors import InputError
from tests.convert.families.case import (
    change_values,
    foreign_class,
    foreign_model,
    foreign_results,
    forward,
    goes_home,
    ragged_tokens,
    strictly_loaded,
    weights_of,
    widened,
)
from tests.convert.families.t5_lineage import THREE_HEADS
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.models import small_config
from tests.parity.ladder import check_errors, error, moved, widen
from tests.tiers import tiered

OLD_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
OLD = {"scale_decoder_outputs": "absent"}
OUTPUTS = {
    # The family, whether the weights have an output of their own, keys, projection and scale.
    "T5": ("t5", False, OLD | {"tie_word_embeddings": "absent"}, "tied", True),
    "T5 v1.1": ("t5", True, OLD | {"tie_word_embeddings": False}, "linear", False),
    "T5 v1.1, equal tables": ("t5", False, OLD | {"tie_word_embeddings": False}, "tied", False),
    "T5 v1.1 of version 5": ("t5", True, {"scale_decoder_outputs": False}, "linear", False),
    "T5 untied, keys of T5": ("t5", True, OLD | {"tie_word_embeddings": True}, "linear", True),
    "the key wins": (
        "t5",
        False,
        {"tie_word_embeddings": False, "scale_decoder_outputs": True},
        "tied",
        True,
    ),
    "mT5": ("mt5", True, {"tie_word_embeddings": False}, "linear", False),
    "mT5 of version 5": ("mt5", True, {"tie_word_embeddings": True}, "linear", False),
    "mT5 tied": ("mt5", False, {"tie_word_embeddings": False}, "tied", False),
    "UMT5": ("umt5", True, OLD | {"tie_word_embeddings": False}, "linear", False),
    "UMT5 of version 5": ("umt5", True, OLD | {"tie_word_embeddings": True}, "linear", False),
    "UMT5 tied": ("umt5", False, OLD | {"tie_word_embeddings": True}, "tied", True),
    "UMT5, equal tables": ("umt5", False, OLD | {"tie_word_embeddings": False}, "tied", False),
}


@pytest.mark.parametrize("name", tiered(OUTPUTS, ["UMT5 of version 5"]))
def test_the_output_is_that_of_transformers(name, tmp_path):
    """Tied or not, scaled or not: as transformers reads the folder, but for the scale of UMT5."""
    family, own_output, keys, projection, scaled = OUTPUTS[name]
    model = foreign_model(family, None, **THREE_HEADS, tie_word_embeddings=not own_output)
    model.save_pretrained(tmp_path / "model")
    folder = change_values(tmp_path / "model", **keys)
    config, params = goes_home(folder, tmp_path / "home")
    assert (config.output_projection, config.output_scale != "none") == (projection, scaled)

    src, tgt = ragged_tokens(config)
    logits = np.asarray(forward(params, config, src, tgt))
    with jax.enable_x64(True):
        exact, *near = (
            np.asarray(forward(numbers, config, src, tgt))
            for numbers in (widen(params), *moved(widen(params)))
        )
    is_key_read = hasattr(type(model.config)(), "scale_decoder_outputs")  # UMT5: from 5.24 on
    # Home with the config.json that came, and with one that is written anew.
    to_huggingface(params, config, tmp_path / "new", family=family)
    for written in ("model", "home", "new"):
        loaded = strictly_loaded(type(model), tmp_path / written)
        theirs, _ = foreign_results(loaded, config, src, tgt)
        wide, _ = foreign_results(widened(loaded, family), config, src, tgt)
        scale = 1.0
        if (
            family == "umt5"
            and not scaled
            and (not is_key_read or loaded.config.scale_decoder_outputs)
        ):
            scale = config.d_model**-0.5
        ours, *ours_wide = (one * one.dtype.type(scale) for one in (logits, exact, *near))
        check_errors(written, (ours, theirs), (ours_wide[0], wide), ours_wide[1:], kind="logits")
    assert from_huggingface(tmp_path / "new")[0] == config


def test_a_new_output_changes_the_keys_of_the_origin(tmp_path):
    """The factor follows tie_word_embeddings where config.json has no key for it."""
    foreign_model("t5", THREE_HEADS).save_pretrained(tmp_path)
    change_values(tmp_path, **OLD, tie_word_embeddings="absent")
    config, params = from_huggingface(tmp_path)
    origin, _ = read_origin(tmp_path)
    unscaled = dataclasses.replace(config, output_scale="none")
    to_huggingface(params, unscaled, tmp_path / "home", origin=origin)
    assert from_huggingface(tmp_path / "home")[0] == unscaled


def test_the_width_of_a_head_is_written():
    config = TransformerConfig.preset("t5", d_kv=None)
    values = config_to_json(FAMILIES["t5"], config)
    assert (values["d_model"], values["num_heads"], values["d_kv"]) == (512, 8, 64)
    assert config_from_json(FAMILIES["t5"], values).head_dim == 64


def test_names_that_transformers_accepts(tmp_path):
    model = foreign_model("t5")
    _, params = from_huggingface(model)
    model.config.save_pretrained(tmp_path)
    whole = model.state_dict()
    tables = [name for name in whole if "embed_tokens" in name or "shared" in name]
    tables.append("lm_head.weight")
    assert len(tables) == 4
    others = {name: tensor for name, tensor in whole.items() if name not in tables}
    for name in tables:  # one of the four names of the table
        torch.save(others | {name: whole[name]}, tmp_path / "pytorch_model.bin")
        assert_same_params(from_huggingface(tmp_path)[1], params)
    torch.save(whole | {OLD_BIAS: torch.randn(8, 3)}, tmp_path / "pytorch_model.bin")
    assert_same_params(from_huggingface(tmp_path)[1], params)


T5_SMALL = """{"d_ff": 2048, "d_kv": 64, "d_model": 512, "dropout_rate": 0.1, "eos_token_id": 1,
"layer_norm_epsilon": 1e-06, "n_positions": 512, "num_heads": 8, "num_layers": 6,
"output_past": true, "pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 32128,
"task_specific_params": {"summarization": {"num_beams": 4}}}"""
FLAN_T5_BASE = """{"d_ff": 2048, "d_kv": 64, "d_model": 768, "decoder_start_token_id": 0,
"feed_forward_proj": "gated-gelu", "num_decoder_layers": 12, "num_heads": 12, "num_layers": 12,
"tie_word_embeddings": false, "vocab_size": 32128}"""
# transformers computes dense_act_fn and is_gated_act again; here they are not read.
UMT5_SMALL = """{"d_ff": 1024, "d_kv": 64, "d_model": 512, "dense_act_fn": "relu",
"is_gated_act": false, "num_decoder_layers": null, "num_heads": 6, "num_layers": 8,
"scalable_attention": true, "tie_word_embeddings": false, "vocab_size": 256384}"""


@pytest.mark.parametrize(
    ("family", "preset", "text"),
    [("t5", "t5", T5_SMALL), ("t5", "t5_v1_1", FLAN_T5_BASE), ("umt5", "umt5", UMT5_SMALL)],
)
def test_config_of_an_older_transformers_is_read(family, preset, text):
    values = json.loads(text)
    config = config_from_json(FAMILIES[family], values)
    rates = dict.fromkeys(("attention_dropout", "activation_dropout"))
    assert dataclasses.replace(config, **rates) == TransformerConfig.preset(preset)
    if family == "umt5":
        mt5 = config_from_json(FAMILIES["mt5"], values | {"vocab_size": 250_112})
        assert dataclasses.replace(mt5, **rates) == TransformerConfig.preset("mt5")


def test_float16_with_float32_inside_is_read(tmp_path):
    """transformers keeps `wo` in float32 in a float16 model, and saves both types."""
    half = foreign_model("t5", None, torch.float16)
    half.save_pretrained(tmp_path / "half")
    half = type(half).from_pretrained(tmp_path / "half").eval()
    half.save_pretrained(tmp_path / "mixed")
    config, params = from_huggingface(tmp_path / "mixed")
    types = {path: leaf.dtype.name for path, leaf in flatten(params).items()}
    wide = {path for path, name in types.items() if name == "float32"}
    assert wide == {path for path in types if path.endswith("feed_forward/outer/kernel")}
    assert {types[path] for path in types.keys() - wide} == {"float16"}
    src, tgt = ragged_tokens(config)
    theirs, _ = foreign_results(half, config, src, tgt)
    ours = np.float32(forward(params, config, src, tgt))
    exact = forward(from_huggingface(half, dtype="float32")[1], config, src, tgt)
    rounding = [error(logits, exact) for logits in (ours, theirs.float())]
    assert rounding[0] <= rounding[1] < 0.01
    to_huggingface(params, config, tmp_path / "home", family="t5")
    assert_same_tensors(weights_of(tmp_path / "home"), weights_of(tmp_path / "mixed"))
    best = generate(params, config, src, max_new_tokens=3, beam_size=2)
    assert np.isfinite(best.scores).all()


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("t5", {"decoder_start_token_id": 0}),
        ("t5", {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}),
        ("umt5", {}),
    ],
)
@pytest.mark.exhaustive
def test_fresh_parameters_are_drawn_as_in_transformers(family, others):
    """Mean and deviation of each tensor within five standard errors of those of transformers."""
    sizes = {"vocab_size": 997, "d_model": 64, "d_kv": 24, "num_heads": 4, "d_ff": 160}
    model_class = foreign_class(family)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, num_layers=2, **others))
    config, theirs = from_huggingface(model)
    ours = flatten(init_params(jax.random.key(0), config))
    theirs = flatten(theirs)
    assert ours.keys() == theirs.keys()
    for path, expected in theirs.items():
        actual, error_of_one = np.asarray(ours[path]), 5 / math.sqrt(expected.size)
        if path.endswith("scale"):
            assert (actual == 1).all()
            assert (expected == 1).all()
            continue
        deviation = float(expected.std())
        assert abs(actual.mean()) < error_of_one * deviation, path
        assert abs(actual.std() / deviation - 1) < error_of_one * math.sqrt(2), path
        assert np.abs(actual).max() > 2 * deviation, path  # normal, not uniform


def test_a_number_that_is_not_finite_is_refused_by_its_key():
    for value, shown in ((float("nan"), "nan"), (float("inf"), "inf"), (10**400, "1000")):
        values = config_to_json(FAMILIES["t5"], small_config("t5")) | {"layer_norm_epsilon": value}
        with pytest.raises(InputError, match=f"layer_norm_epsilon={shown}.* must be a finite"):
            config_from_json(FAMILIES["t5"], values)
