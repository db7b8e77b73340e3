"""The layout of the torch reference, for every preset."""

import pytest

import torch_reference
from jax_transformer import TransformerConfig, convert
from tests.convert.foreign import randomized
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.models import random_params, small_config


@pytest.mark.parametrize("preset", TransformerConfig.presets())
def test_there_and_back_is_bit_equal_and_loads_strictly(preset):
    config = small_config(preset)
    params = random_params(config)
    module = torch_reference.Transformer(config)
    assert module.load_state_dict(convert.to_torch(params, config), strict=True)
    assert_same_params(convert.from_torch(module.state_dict(), config), params)
    state_dict = randomized(module).state_dict()
    back = convert.to_torch(convert.from_torch(state_dict, config), config)
    assert_same_tensors(back, state_dict)
