"""No config claims more than the weights hold, and none costs more time than they do."""

import dataclasses
import time

import pytest

from jax_transformer import InputError, convert
from jax_transformer.config import LARGEST
from jax_transformer.convert.layouts.reference import LAYOUT
from tests.models import random_params, small_config

PRESETS = {"reference": "vaswani2017", "torch_nn": "torch_nn", "pre_norm": "pre_norm"}


@pytest.mark.parametrize("layout", PRESETS)
def test_a_config_that_claims_more_than_there_is_is_refused_at_once(layout):
    config = small_config(PRESETS[layout], num_encoder_layers=1, num_decoder_layers=2)
    params, rows = random_params(config), convert.get_layout(layout)
    tensors, _ = convert.to_tensors(params, config, rows)
    table = r"postitons  \[1, 29, 42\], expected \[1, 2147483647, 42\]"
    directions = (
        (convert.to_params, tensors, "tensors", table),
        (convert.to_tensors, params, "parameters", r"postitons' of max_length=2147483647 would"),
    )
    for turn, arrays, what, of_table in directions:
        layers = rf"ayers=10000 .*the {what} hold at most [234] layers of"
        claims = {
            "num_encoder_layers": (10_000, layers),
            "num_decoder_layers": (3, r"missing .*decoder.layers.2|at most 2 layers"),
            "d_model": (3 * 10**8, r"wrong shape .* expected \[300000000, 300000000\]"),
            "d_ff": (LARGEST, r"wrong shape .*2147483647\]"),
        }
        if layout == "pre_norm":
            claims["max_length"] = (LARGEST, of_table)
        for field, (claim, message) in claims.items():
            claimed = dataclasses.replace(config, **{field: claim})
            start = time.process_time()
            with pytest.raises(InputError, match=message):
                turn(arrays, claimed, rows)
            assert time.process_time() - start < 2
    # A prefix does not hide the layers.
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(convert.ConversionError) as raised:
        convert.from_torch(wrapped, config, layout)
    report = raised.value.report
    assert not any("layers=" in name for name in report.names("missing"))
    assert report.hint.startswith("every name begins with 'module.'")


@pytest.mark.parametrize(
    ("layout", "stack"), [("torch_nn_encoder", "encoder"), ("torch_nn_decoder", "decoder")]
)
def test_layers_outside_of_the_scope_are_not_counted(layout, stack):
    config = small_config("torch_nn", num_encoder_layers=1, num_decoder_layers=1)
    params = random_params(config)[stack]
    many = {"num_encoder_layers": 9999, "num_decoder_layers": 9999, f"num_{stack}_layers": 1}
    tensors, _ = convert.to_tensors(params, config, convert.get_layout(layout))
    convert.from_torch(tensors, dataclasses.replace(config, **many), layout)


def test_more_zeros_than_there_are_numbers_are_refused():
    """A layout's file may say that whatever is absent means zeros."""
    config = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
    tensors, _ = convert.to_tensors(random_params(config), config, LAYOUT)
    rows = [dataclasses.replace(row, zeros=True) for row in LAYOUT.rows]
    layout = dataclasses.replace(LAYOUT, rows=tuple(rows))
    name = "encoder.layers.0.feed_forward.inner.weight"
    others = {other: tensor for other, tensor in tensors.items() if other != name}
    params, report = convert.to_params(others, config, layout)
    assert report.names("zeros") == [name]
    assert not params["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"].any()
    bias = "encoder.layers.0.feed_forward.outer.bias"
    for few in ({}, {bias: tensors[bias]}):
        with pytest.raises(InputError, match="would be zeros, but the tensors hold only"):
            convert.to_params(few, dataclasses.replace(config, d_ff=LARGEST), layout)
