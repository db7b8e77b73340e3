"""Every field of the config that changes a number, planted wrong: the record names it."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import TransformerConfig, convert
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.record import record_module
from tests.models import random_params, small_config
from tests.tiers import tiered_rows

SMALL = {"num_encoder_layers": 1, "num_decoder_layers": 1}
RIGHT = {
    "vaswani2017": small_config("vaswani2017", **SMALL),
    "m2m100": small_config("m2m100", **SMALL),
    "t5": small_config("t5", **SMALL, relative_attention_max_distance=32),
    "pre_norm_decoder": small_config("pre_norm_decoder", **SMALL),
    "tiny": small_config("vaswani2017", **SMALL, norm_epsilon=1e-12),
    "numbers": small_config(
        "vaswani2017",
        **SMALL,
        **{"positions": "rotary", "rotary_theta": 500.0, "sliding_window": 3},
        **{"attention_softcap": 1.5, "logit_softcap": 2.0},
    ),
}
SCALES = {"embedding_scale": "none", "attention_scale": "none"}
SCALES |= {"output_scale": "inverse_sqrt_d_model"}
# Fields that change numbers and no shape, each with a wrong value.
WRONG = {
    "vaswani2017": SCALES
    | {"num_heads": 6, "positions": "sinusoidal_halves", "activation": "gelu"}
    | {"norm": "biased_std_norm", "norm_epsilon": 1e-5, "norm_placement": "pre"}
    | {"decoder_norm_placement": "pre"}
    | {"decoder_attention": "self_over_memory", "pad_id": 5, "position_rounding": "bfloat16"},
    "m2m100": SCALES
    | {"num_heads": 2, "position_offset": 0, "activation": "gelu_tanh", "pad_id": 5}
    | {"norm": "std_norm", "norm_epsilon": 1e-6, "norm_placement": "post"}
    | {"attention_scale": "d_model"},
    "t5": {
        "relative_attention_max_distance": 128,
        "embedding_scale": "sqrt_d_model",
        "output_scale": "none",
        "attention_scale": "head_dim",
        "activation": "silu",
        "norm_epsilon": 1e-12,
        "norm_placement": "post",
        "pad_id": 5,
        "bos_id": 1,
    },
    "pre_norm_decoder": {
        "attention_scale": "head_dim",
        "norm": "std_norm",
        "norm_placement": "pre",
        "decoder_norm_placement": None,
    },
    "tiny": {"norm_epsilon": 1e-9},  # changes less than float32 holds
    "numbers": {"rotary_theta": 10_000.0}
    | dict.fromkeys(("attention_softcap", "logit_softcap", "sliding_window")),
}
# BOS is the padding of a t5.
QUICK = (("vaswani2017", "float32"), ("t5", "float64"))
# Fields that another shape or another parameter shows, and fields without a number in evaluation.
SHOWN = """
    src_vocab_size tgt_vocab_size d_model d_kv d_ff num_encoder_layers num_decoder_layers max_length
    token_embeddings relative_attention_num_buckets relative_attention_bias embedding_norm
    output_projection output_bias head_projection qkv_bias attention_output_bias feed_forward_bias
    gated_feed_forward norm_bias final_norm decoder_final_norm memory_norm num_kv_heads
    query_key_norm encoder_d_model encoder_num_heads encoder_num_kv_heads encoder_d_ff
""".split()
# Fields that a comparison does not try; docs/porting.md says so.
UNTRIED = """
    rotary_scaling rotary_fraction sliding_window_pattern sliding_window_theta encoder_window
""".split()
SILENT = """
    dropout attention_dropout activation_dropout dropout_placement embedding_dropout final_dropout
    initialization eos_id
""".split()


def test_every_field_is_planted_or_shows_itself():
    planted = {field for fields in WRONG.values() for field in fields}
    assert planted | {*SHOWN, *SILENT, *UNTRIED} == {
        f.name for f in dataclasses.fields(TransformerConfig)
    }


@cache
def recorded(model, dtype):
    """Return the right parameters, and what the model in torch computes of ragged ids."""
    config, random = RIGHT[model], np.random.default_rng(0)
    params = random_params(config)
    module = torch_reference.Transformer(config).to(getattr(torch, dtype))
    module.load_state_dict(convert.to_torch(params, config))
    src, tgt = (random.integers(6, 37, (3, 13)) for _ in range(2))
    tgt[:, 0] = config.bos_id
    src[1, 9:] = tgt[2, 10:] = config.pad_id
    return params, record_module(module, src, tgt, pad_id=config.pad_id)


@pytest.mark.parametrize(
    ("model", "field", "dtype"),
    tiered_rows(
        [
            (model, field, dtype)
            for model, fields in WRONG.items()
            for field in fields
            for dtype in ("float64", "float32")
            if dtype == "float64" or field in ("norm_epsilon", "num_heads", "positions")
        ],
        lambda model, field, dtype: (model, dtype) == ("tiny", "float64"),
    ),
)
def test_a_wrong_field_is_named(model, field, dtype):
    params, record = recorded(model, dtype)
    right = RIGHT[model]
    wrong = dataclasses.replace(right, **{field: WRONG[model][field]})
    result = compare_record(params, wrong, convert.get_layout("reference"), record)
    print(result)
    if field in ("pad_id", "bos_id"):
        assert result.masks != "default"
        return
    cause = f"{field}={getattr(right, field)!r}, not {getattr(wrong, field)!r}"
    if dtype == "float64" or (model != "tiny" and result.first_differing):
        assert result.first_differing
        assert result.explanations[0].startswith(cause)
    else:
        assert result.first_differing is None
        assert f"the record cannot tell {cause}" in result.notes


@pytest.mark.parametrize(
    ("model", "dtype"),
    tiered_rows(
        [(model, dtype) for model in RIGHT for dtype in ("float64", "float32")],
        lambda model, dtype: (model, dtype) in QUICK,
    ),
)
def test_the_right_fields_agree(model, dtype):
    params, record = recorded(model, dtype)
    result = compare_record(params, RIGHT[model], convert.get_layout("reference"), record)
    print(result)
    assert result.first_differing is None
    assert (result.masks, result.explanations) == ("default", ())
    assert result.bound == {"float64": 1e-11, "float32": 1e-5}[dtype]
    assert dtype == "float32" or result.notes == ()
    assert not any("decoder_norm_placement" in note for note in result.notes)  # None is a value
