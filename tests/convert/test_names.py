"""The message of a refusal: layers in one line, prefixes, and the field that a tensor needs."""

import ast
import dataclasses
import re

import pytest

from jax_transformer import convert
from jax_transformer.convert import ConversionError, Layout, Row
from jax_transformer.convert.names import why_unexpected
from jax_transformer.convert.report import Report, group_layers
from jax_transformer.model.tree import PARAMETERS, parameter_shapes
from tests.convert.tools import refused
from tests.models import random_params, small_config


def message_of(tensors, config, layout="reference"):
    """Return the lines of a refusal, without the spaces that align them."""
    with pytest.raises(ConversionError) as caught:
        convert.from_torch(tensors, config, layout)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 20
    return [" ".join(line.split()) for line in lines]


def test_layers_with_one_fault_are_one_line():
    config = small_config("pre_norm", num_encoder_layers=6, num_decoder_layers=3)
    tensors = convert.to_torch(random_params(config), config)
    for index in (0, 1, 2, 3, 4, 5):
        del tensors[f"encoder.layers.{index}.feed_forward.inner.bias"]
    for index in (0, 2):
        name = f"decoder.layers.{index}.feed_forward.inner.weight"
        tensors[name] = tensors[name].T
    name = "decoder.layers.1.feed_forward.inner.weight"
    tensors[name] = tensors[name][:4]
    first, *lines = message_of(tensors, config)
    assert first.endswith("nothing was converted: 6 missing, 3 wrong shape")
    inner = "feed_forward.inner"
    assert lines == [
        f"missing encoder.layers.{{0..5}}.{inner}.bias",
        f"wrong shape decoder.layers.{{0,2}}.{inner}.weight [42, 53], expected [53, 42]",
        f"wrong shape decoder.layers.1.{inner}.weight [4, 42], expected [53, 42]",
    ]
    assert len(refused(tensors, config).faults) == 9


def test_the_number_of_the_layer_may_be_any_number_of_a_name():
    names = [f"model.0.enc.{i}.ff.{j}.w" for i in range(3) for j in (0, 3)]
    groups = group_layers([*names, "other", "model.0.x"])
    assert list(map(len, groups.values())) == [3, 3, 1, 1]
    assert list(groups)[:2] == [("model.0.enc.", ".ff.0.w"), ("model.0.enc.", ".ff.3.w")]


def test_a_tensor_whose_parameter_the_config_lacks_names_the_field():
    """A row that matches nothing is not ignored where its tensor is there."""
    config = small_config("pre_norm")
    tensors = convert.to_torch(random_params(config), config)
    messages = {
        "encoder.layers.1.feed_forward.inner.bias is encoder/layers_1/feed_forward/inner/bias, "
        "which the config lacks, with num_encoder_layers=1": {"num_encoder_layers": 1},
        "encoder.layers.{0..1}.self_attention.key.bias is encoder/layers_{0..1}/self_attention/"
        "key/bias, which the config lacks; qkv_bias=True has it": {"qkv_bias": False},
    }
    for message, fields in messages.items():
        lines = message_of(tensors, dataclasses.replace(config, **fields))
        assert f"unexpected {message}" in lines


ENCODER, DECODER = "encoder/layers_0", "decoder/layers_0"
NO_TABLES = {"token_embeddings": "none", "output_projection": "none", "output_bias": False}
FIELDS = [
    ({"norm_bias": False}, f"{ENCODER}/self_attention_residual/norm/bias"),
    ({"qkv_bias": False}, f"{DECODER}/cross_attention/value/bias"),
    ({"attention_output_bias": False}, f"{DECODER}/cross_attention/output/bias"),
    ({"feed_forward_bias": False}, f"{ENCODER}/feed_forward/inner/bias"),
    ({"final_norm": False}, "encoder/norm/bias"),
    ({"decoder_final_norm": False}, "decoder/norm/scale"),
    ({}, "source_embedding_norm/bias"),
    ({}, f"{DECODER}/memory_norm/scale"),
    ({}, f"{DECODER}/feed_forward/gate/kernel"),
    ({"positions": "relative"}, f"{ENCODER}/relative_attention_bias/embedding"),
    ({}, "decoder/relative_attention_bias/embedding"),
    ({}, "target_positions/embedding"),
    ({"src_vocab_size": 41}, "token_embedding/embedding"),
    (NO_TABLES, "target_embedding/embedding"),
    ({"output_projection": "tied"}, "output_projection/kernel"),
    ({"output_bias": False}, "output_projection/bias"),
    ({}, f"{ENCODER}/self_attention/query_norm/scale"),
    ({}, f"{ENCODER}/feed_forward_residual/output_norm/scale"),
    ({"decoder_norm_placement": "pre"}, f"{DECODER}/feed_forward_residual/output_norm/scale"),
    ({"decoder_attention": "merged"}, f"{DECODER}/cross_attention/query/kernel"),
    ({"decoder_attention": "ssru_then_cross"}, f"{DECODER}/self_attention/query/kernel"),
    ({}, f"{DECODER}/recurrence/forget/bias"),
    ({}, "head/dense/bias"),
    ({"key_bias": False}, f"{ENCODER}/self_attention/key/bias"),
    ({}, "source_convolution_1/kernel"),
]


def named_field(config, path):
    row = Row("x", path)
    why = why_unexpected("x", Layout("x", (row,)), config)
    found = re.fullmatch(rf"is {path}, which the config lacks; (\w+)=(.*) has it", why)
    return found[1], ast.literal_eval(found[2])


@pytest.mark.parametrize(("fields", "path"), FIELDS)
def test_the_named_field_gives_the_parameter(fields, path):
    small = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = small_config("pre_norm", **small, **fields)
    field, value = named_field(config, path)
    assert getattr(config, field) != value
    if field == "head":  # which needs labels
        other = config.with_head(value, labels=["no", "yes"])
    else:
        other = dataclasses.replace(config, **{field: value})
    assert path in parameter_shapes(other)


def test_every_field_that_is_named_has_a_case():
    declared = {field for parameter in PARAMETERS.values() for field in parameter.needs}
    small = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    configs = [small_config("pre_norm", **small, **fields) for fields, _ in FIELDS]
    paths = [path for _, path in FIELDS]
    assert {named_field(*case)[0] for case in zip(configs, paths, strict=True)} == declared


@pytest.mark.parametrize("name", ["a\n" * 100, "a\u2028b\x1b[2J", "x" * 5000])
def test_a_refusal_is_short_and_the_report_is_whole(name):
    report = Report("reference", hint=f"strip\n{name}")
    for number in range(500):
        report.add("unexpected", f"{name}{number}", f"nearest: {name}")
        report.add("missing", f"{chr(97 + number % 26)}{name}", name)
    refusal = ConversionError(report)
    assert len(str(refusal).splitlines()) <= 22
    assert len(str(refusal)) < 22 * 1000
    assert "\x1b" not in str(refusal)
    assert refusal.report.faults[0].name == f"{name}0"
    assert len(refusal.report.faults) == 1000
