"""No config claims more than the weights hold, and none costs more time than they do."""

import dataclasses
import time

import pytest

from jax_transformer import InputError, convert
from jax_transformer.config import LARGEST
from jax_transformer.convert.layouts.reference import LAYOUT
from tests.models import random_params, small_config

PRESETS = {"reference": "vaswani2017", "torch_nn": "torch_nn", "pre_norm": "pre_norm"}


@pytest.mark.parametrize("layout", ["reference", "torch_nn", "pre_norm"])
def test_a_config_that_claims_more_than_the_tensors_hold_is_refused_at_once(layout):
    config = small_config(PRESETS[layout], num_encoder_layers=1, num_decoder_layers=2)
    tensors, _ = convert.to_tensors(random_params(config), config, convert.get_layout(layout))
    claims = {
        "num_encoder_layers": (10_000, r"num_encoder_layers=10000 .* 1 layers of the encoder"),
        "num_decoder_layers": (3, r"missing +num_decoder_layers=3  the tensors hold 2 layers"),
        "d_model": (3 * 10**8, r"wrong shape .* expected \[300000000, 300000000\]"),
        "d_ff": (LARGEST, r"wrong shape .*, 2147483647\]"),
    }
    if layout == "pre_norm":
        claims["max_length"] = (
            LARGEST,
            r"postitons  \[1, 29, 42\], expected \[1, 2147483647, 42\]",
        )
    for field, (claim, message) in claims.items():
        claimed = dataclasses.replace(config, **{field: claim})
        start = time.process_time()
        with pytest.raises(InputError, match=message):
            convert.from_torch(tensors, claimed, layout)
        assert time.process_time() - start < 2
    # A prefix does not hide the layers.
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(convert.ConversionError) as raised:
        convert.from_torch(wrapped, config, layout)
    report = raised.value.report
    assert not any("layers=" in name for name in report.names("missing"))
    assert report.hint.startswith("every name begins with 'module.'")


@pytest.mark.parametrize("layout", ["reference", "torch_nn", "pre_norm"])
def test_a_config_that_claims_more_than_the_parameters_is_not_written(layout):
    config = small_config(PRESETS[layout], num_encoder_layers=1, num_decoder_layers=2)
    params = random_params(config)
    claims = {
        "num_encoder_layers": (10_000, r"num_encoder_layers=10000 .* 1 layers of the encoder"),
        "num_decoder_layers": (3, r"missing +num_decoder_layers=3  the parameters hold 2 layers"),
        "d_model": (3 * 10**8, r"wrong shape .* expected \[300000000, 300000000\]"),
        "d_ff": (LARGEST, r"wrong shape .*2147483647\]"),
    }
    if layout == "pre_norm":
        claims["max_length"] = (LARGEST, r"'source_pos.postitons' of max_length=2147483647 would")
    for field, (claim, message) in claims.items():
        claimed = dataclasses.replace(config, **{field: claim})
        start = time.process_time()
        with pytest.raises(InputError, match=message):
            convert.to_tensors(params, claimed, convert.get_layout(layout))
        assert time.process_time() - start < 2


def test_more_zeros_than_there_are_numbers_are_refused():
    """A layout's file may say that whatever is absent means zeros."""
    config = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
    tensors, _ = convert.to_tensors(random_params(config), config, LAYOUT)
    rows = [dataclasses.replace(row, zeros=True) for row in LAYOUT.rows]
    layout = dataclasses.replace(LAYOUT, rows=tuple(rows))
    name = "encoder.layers.0.feed_forward.inner.weight"
    kept = {other: tensor for other, tensor in tensors.items() if other != name}
    params, report = convert.to_params(kept, config, layout)
    assert report.names("zeros") == [name]
    assert not params["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"].any()
    bias = "encoder.layers.0.feed_forward.outer.bias"
    for few in ({}, {bias: tensors[bias]}):
        with pytest.raises(InputError, match="would be zeros, but the tensors hold only"):
            convert.to_params(few, dataclasses.replace(config, d_ff=LARGEST), layout)
