"""The config refuses what no model can be built from, and says what would be right."""

import dataclasses
import itertools
import json
from operator import attrgetter

import numpy as np
import pytest

from jax_transformer import InputError, TransformerConfig

WRONG = [
    ({"num_heads": 7}, ["num_heads=7", "divide", "d_model=512"]),
    ({"d_model": -512}, ["d_model=-512", "at least 1"]),
    ({"d_model": 0}, ["d_model=0", "at least 1"]),
    ({"d_model": 513, "num_heads": 3}, ["d_model=513", "even", "sinusoidal"]),
    ({"d_model": 512.0}, ["d_model=512.0", "whole number"]),
    ({"d_model": True}, ["d_model=True", "whole number"]),
    ({"num_encoder_layers": 0}, ["num_encoder_layers=0", "at least 1"]),
    ({"num_decoder_layers": -1}, ["num_decoder_layers=-1", "at least 0"]),
    ({"d_ff": -1}, ["d_ff=-1", "at least 1"]),
    ({"max_length": 0}, ["max_length=0", "at least 1"]),
    ({"src_vocab_size": 0}, ["src_vocab_size=0", "at least 1"]),
    ({"tgt_vocab_size": "8k"}, ["tgt_vocab_size='8k'", "whole number"]),
    ({"positions": "alibi"}, ["positions='alibi'", "sinusoidal_halves"]),
    ({"activation": "tanh"}, ["activation='tanh'", "gelu_tanh"]),
    ({"norm": ["layer_norm"]}, ["norm=['layer_norm']", "std_norm"]),
    ({"qkv_bias": 1}, ["qkv_bias=1", "True or False"]),
    ({"dropout": 1.5}, ["dropout=1.5", "at least 0 and at most 1"]),
    ({"dropout": None}, ["dropout=None", "finite number"]),
    ({"attention_dropout": -0.1}, ["attention_dropout=-0.1", "at least 0 and at most 1"]),
    ({"norm_epsilon": 0.0}, ["norm_epsilon=0.0", "at least 1.17549"]),
    ({"norm_epsilon": float("nan")}, ["norm_epsilon=nan", "finite number"]),
    ({"pad_id": -1}, ["pad_id=-1", "at least 0"]),
    ({"eos_id": 37_000}, ["eos_id=37000", "from 0 to 36999"]),
    ({"eos_id": 0}, ["eos_id=0", "differ from pad_id=0"]),
    ({"token_embeddings": "shared", "src_vocab_size": 9}, ["equal", "src_vocab_size=9"]),
    ({"token_embeddings": "none", "output_projection": "tied"}, ["tied", "token_embeddings"]),
    ({"output_projection": "none"}, ["output_bias=True", "output_projection='none'"]),
    ({"norm": "std_norm", "d_model": 1, "num_heads": 1, "positions": "none"}, ["d_model=1"]),
    (
        {"norm": "unbiased_layer_norm", "d_model": 1, "num_heads": 1, "positions": "none"},
        ["d_model=1", "norm='unbiased_layer_norm'"],
    ),
    ({"norm_placement": "pre", "dropout_placement": "norm"}, ["dropout_placement='norm'"]),
    (
        {"decoder_attention": "self_over_memory", "norm_placement": "pre"},
        ["norm_placement='pre' must be 'post'", "self_over_memory"],
    ),
    (
        {"decoder_attention": "self_over_memory", "decoder_norm_placement": "pre"},
        ["decoder_norm_placement='pre' must be 'post'", "decoder_attention='self_over_memory'"],
    ),
    (
        {"decoder_norm_placement": "pre", "dropout_placement": "norm"},
        ["dropout_placement='norm' must be 'sublayer' where decoder_norm_placement='pre'"],
    ),
    (
        {"decoder_norm_placement": "both"},
        ["decoder_norm_placement='both'", "'sandwich' or None"],
    ),
    (
        {"decoder_attention": "self_over_memory", "memory_norm": True},
        ["memory_norm=True must be False", "self_over_memory"],
    ),
    ({"decoder_attention": "merged", "memory_norm": True}, ["memory_norm=True", "'merged'"]),
    ({"decoder_attention": "self_over_memory", "sliding_window": 3}, ["sliding_window=3 must be"]),
    ({"decoder_attention": "ssru_then_cross", "sliding_window": 3}, ["sliding_window=3 must be"]),
    (
        {"positions": "relative", "decoder_attention": "ssru_then_cross"},
        ["ssru_then_cross", "positions='relative'", "'self_then_cross'"],
    ),
    ({"num_kv_heads": 3}, ["num_kv_heads=3 must divide num_heads=8"]),
    ({"head_projection": "shared", "num_kv_heads": 2}, ["num_kv_heads=2 must be None"]),
    ({"encoder_num_heads": 7}, ["of the encoder's sizes", "num_heads=7 must divide d_model=512"]),
    (
        {"encoder_d_model": 8, "token_embeddings": "shared"},
        ["encoder_d_model=8 must be d_model=512 where token_embeddings='shared'"],
    ),
    ({"encoder_d_model": 8, "decoder_attention": "merged"}, ["encoder_d_model=8", "'merged'"]),
    ({"rotary_theta": 500.0}, ["rotary_theta=500.0 needs positions='rotary', not 'sinusoidal'"]),
    ({"positions": "rotary", "rotary_theta": 0}, ["rotary_theta=0", "finite number"]),
    (
        {"positions": "rotary", "d_kv": 7},
        ["rotary_fraction=1.0 of heads of 7 columns is 7", "even"],
    ),
    ({"sliding_window_pattern": 2}, ["sliding_window_pattern=2", "sliding_window=None"]),
    ({"sliding_window": 4, "sliding_window_theta": 5.0}, ["needs positions='rotary'"]),
    ({"encoder_window": "split"}, ["encoder_window='split'", "sliding_window=None"]),
    ({"attention_scale": 0.0}, ["attention_scale=0.0", "'head_dim'", "finite number"]),
    ({"attention_softcap": 0}, ["attention_softcap=0", "finite number"]),
    ({"norm": "zero_centered_rms_norm"}, ["norm_bias=True must be False"]),
    ({"norm": "std_norm", "query_key_norm": True, "d_kv": 1}, ["query_key_norm=True"]),
    (
        {"positions": "relative", "decoder_attention": "merged"},
        ["merged", "positions='relative'", "'self_then_cross'"],
    ),
    ({"d_kv": 0}, ["d_kv=0", "at least 1"]),
    # What no device can count, or no Python number can be shown as.
    ({"d_ff": 2**31}, ["d_ff=2147483648", "at most 2147483647"]),
    ({"max_length": -(10**23)}, ["max_length=-1000", "at least 1"]),
    ({"d_kv": 10**12}, ["d_kv=1000000000000", "at most 2147483647 or None"]),
    ({"dropout": 10**400}, ["dropout=10000", "finite number"]),
    ({"norm_epsilon": float("inf")}, ["norm_epsilon=inf", "finite number"]),
    ({"norm_epsilon": 1e-320}, ["norm_epsilon=1e-320", "at least 1.17549"]),
    ({"norm_epsilon": 1e39}, ["norm_epsilon=1e+39", "below 3.4028"]),
    ({"norm_epsilon": True}, ["norm_epsilon=True", "finite number"]),
    ({"activation": [["relu"] * 10**5]}, ["activation=[['relu'", "...", "gelu_tanh"]),
    ({"x" * 10**6: 1}, ["xxx", "is not a setting; the settings are src_vocab_size"]),
    ({"num_encoder_layers": 10_001}, ["num_encoder_layers=10001", "at most 10000"]),
    ({"num_decoder_layers": 2**31 - 1}, ["num_decoder_layers=2147483647", "at most 10000"]),
    ({"num_heads": 2**16, "d_kv": 2**15}, ["num_heads=65536", "d_kv=32768", "at most 2147483647"]),
    (
        {"max_length": 2**31 - 1, "position_offset": 1, "positions": "learned"},
        ["max_length=2147483647", "position_offset=1", "at most 2147483647"],
    ),
    ({"d_kv": 64.0}, ["d_kv=64.0", "a whole number, at least 1", "or None"]),
    ({"d_kv": 64, "head_projection": "shared"}, ["d_kv=64", "head_projection='shared'"]),
    ({"norm": "rms_norm"}, ["norm_bias=True", "norm='rms_norm'"]),
    ({"final_dropout": True}, ["final_dropout=True", "final_norm=True"]),
    (
        {"final_dropout": True, "final_norm": True, "decoder_final_norm": False},
        ["final_dropout=True", "decoder_final_norm=None, not False"],
    ),
    (
        {"final_dropout": True, "decoder_final_norm": True},
        ["final_dropout=True", "final_norm=True, not False"],
    ),
    ({"decoder_final_norm": 0}, ["decoder_final_norm=0", "True or False or None"]),
    (
        {"output_projection": "none", "output_bias": False, "output_scale": "inverse_sqrt_d_model"},
        ["output_scale='inverse_sqrt_d_model'", "output_projection='none'"],
    ),
    ({"position_offset": -1, "positions": "learned"}, ["position_offset=-1", "at least 0"]),
    ({"position_offset": 2}, ["position_offset=2", "'learned'", "'sinusoidal_tensor2tensor'"]),
    (
        {"position_rounding": "float16", "positions": "learned"},
        ["position_rounding='float16'", "must be 'none'", "positions='learned'"],
    ),
    (
        {"positions": "sinusoidal_tensor2tensor", "d_model": 3, "num_heads": 1},
        ["d_model=3", "at least 4", "two frequencies"],
    ),
    ({"relative_attention_bias": "per_layer"}, ["'per_layer'", "positions='relative'"]),
    ({"relative_attention_num_buckets": 8}, ["num_buckets=8", "positions='relative'"]),
    ({"relative_attention_max_distance": 64}, ["max_distance=64", "positions='relative'"]),
    (
        {"positions": "relative", "relative_attention_num_buckets": 3},
        ["relative_attention_num_buckets=3", "at least 4"],
    ),
    (
        {"positions": "relative", "relative_attention_max_distance": 16},
        ["relative_attention_max_distance=16", "relative_attention_num_buckets=32"],
    ),
    (
        {"positions": "relative", "decoder_attention": "self_over_memory"},
        ["self_over_memory", "positions='relative'", "'self_then_cross'"],
    ),
    (
        {"norm": np.array(["std_norm", "x"])},
        ["norm=array(['std_norm', 'x']"],
    ),
    ({"dropout": -(10**400)}, ["dropout=-1000", "finite number"]),
    ({"num_layers": 6}, ["num_layers=6 is not a setting; did you mean num_"]),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=lambda value: str(value)[:50])
def test_wrong_value_is_named_with_the_remedy(fields, words):
    with pytest.raises(InputError) as caught:
        TransformerConfig.from_dict(fields)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2000
    for word in words:
        assert word in message


def test_numbers_of_numpy_are_those_of_python():
    config = TransformerConfig(
        d_model=np.int64(16),
        dropout=np.float64(0.3),
        qkv_bias=np.bool_(False),
        norm=np.str_("std_norm"),
    )
    assert config == TransformerConfig(d_model=16, dropout=0.3, qkv_bias=False, norm="std_norm")
    assert [type(value) for value in (config.d_model, config.dropout)] == [int, float]
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_learned_and_relative_positions_and_odd_sinusoids_need_no_even_width():
    for kind in ("learned", "relative", "none", "sinusoidal_tensor2tensor"):
        config = TransformerConfig(positions=kind, d_model=513, num_heads=3)
        assert config.has_position_table == (kind in ("learned", "sinusoidal_tensor2tensor"))
    assert TransformerConfig(d_model=512, num_heads=7, d_kv=5).head_dim == 5


def test_a_number_that_python_does_not_write_is_refused():
    with pytest.raises(InputError, match="src_vocab_size=a large int must be"):
        TransformerConfig(src_vocab_size=10**5000)


@pytest.mark.parametrize("name", ["post_norm", [], {}, None, 3, "x" * 10**6])
def test_what_is_no_name_of_a_preset_is_refused_in_a_short_line(name):
    known = "choose one of.*vaswani2017.*torch_nn"
    with pytest.raises(InputError, match=rf"^preset=.{{1,80}} is unknown; {known}"):
        TransformerConfig.preset(name)


@pytest.mark.parametrize("field", ["width", "name", "cls", "self"])
def test_a_field_that_is_none_or_has_the_name_of_an_argument_is_refused(field):
    with pytest.raises(InputError, match=f"{field}=3 is not a setting"):
        TransformerConfig.preset("pre_norm", **{field: 3})


@pytest.mark.parametrize("name", TransformerConfig.presets())
def test_preset_is_frozen_hashable_and_survives_json(name):
    config = TransformerConfig.preset(name)
    assert TransformerConfig.from_dict(config.to_dict()) == config
    assert hash(dataclasses.replace(config, dropout=0.3)) != hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 3


def test_presets_are_all_different():
    configs = {TransformerConfig.preset(name) for name in TransformerConfig.presets()}
    assert len(configs) == len(TransformerConfig.presets())


def test_one_dropout_override_reaches_every_rate_that_follows_it():
    config = TransformerConfig.preset("pre_norm", dropout=0.3)
    assert config.attention_dropout_rate == config.activation_dropout_rate == 0.3
    config = TransformerConfig.preset("vaswani2017", dropout=0.3)
    assert config.attention_dropout_rate == config.activation_dropout_rate == 0.0


@pytest.mark.parametrize(
    ("field", "values", "of_stacks"),
    [
        ("final_norm", (True, False), attrgetter("final_norm", "decoder_has_final_norm")),
        (
            "norm_placement",
            ("post", "pre"),
            lambda config: tuple(map(config.norm_placement_of, ("encoder", "decoder"))),
        ),
    ],
)
def test_the_decoder_follows_the_encoder_until_it_is_told_otherwise(field, values, of_stacks):
    for value, own in itertools.product(values, (None, *values)):
        config = TransformerConfig(**{field: value, f"decoder_{field}": own})
        assert of_stacks(config) == (value, value if own is None else own)


@pytest.mark.parametrize(
    ("scale", "divisor"), [("head_dim", 4), ("d_model", 8), ("none", 1), (9, 3)]
)
def test_the_divisor_of_the_scores_is_that_of_the_scale(scale, divisor):
    sizes = {"d_model": 64, "num_heads": 3, "d_kv": 16}
    assert TransformerConfig(**sizes, attention_scale=scale).attention_divisor == divisor


@pytest.mark.parametrize(
    ("size", "kind", "encoder"),
    [
        (3, "each_side", (3, 3)),
        (3, "split", (1, 1)),
        (4, "split", (1, 2)),
        (1, "split", (0, 0)),
    ],
)
def test_the_last_layer_of_a_pattern_has_no_window(size, kind, encoder):
    config = TransformerConfig(sliding_window=size, sliding_window_pattern=3, encoder_window=kind)
    assert [config.window_of("encoder", layer) for layer in range(4)] == [encoder] * 2 + [
        None,
        encoder,
    ]
    assert config.window_of("decoder", 1) == (size - 1, 0)
    everywhere = dataclasses.replace(config, sliding_window_pattern=None)
    assert None not in {everywhere.window_of("decoder", layer) for layer in range(6)}


def test_a_stack_has_the_sizes_of_its_own():
    config = TransformerConfig(encoder_d_model=96, encoder_num_heads=6, num_kv_heads=2)
    encoder = config.stack("encoder")
    assert (encoder.d_model, encoder.num_heads, encoder.key_heads, encoder.d_ff) == (96, 6, 2, 2048)
    assert encoder.stack("encoder") == encoder
    assert config.stack("decoder") is config
    assert config.part("encoder").d_model == 96


def test_a_config_that_was_written_before_a_field_was_added_is_read():
    fields = TransformerConfig(norm_placement="pre").to_dict()
    del fields["decoder_norm_placement"]
    assert TransformerConfig.from_dict(fields).norm_placement_of("decoder") == "pre"


def test_explicit_has_the_value_that_each_none_stands_for():
    config = TransformerConfig(d_model=12, num_heads=3, dropout=0.3, final_norm=True)
    explicit = config.explicit()
    nothing = {name for name, value in explicit.items() if value is None}
    assert nothing == {  # None is no other value of these
        "attention_softcap",
        "encoder_max_length",
        "logit_softcap",
        "problem_type",
        "source_features",
        "sliding_window",
        "sliding_window_pattern",
        "sliding_window_theta",
    }
    assert (explicit["d_kv"], explicit["decoder_final_norm"]) == (4, True)
    assert explicit["decoder_norm_placement"] == "post"
    assert (explicit["attention_dropout"], explicit["activation_dropout"]) == (0.3, 0.3)
    again = TransformerConfig(**explicit)
    assert again.explicit() == explicit
