"""Verification: agreement is shown, and the first block that differs is the right one."""

import dataclasses

import pytest
import torch

from jax_transformer import convert
from jax_transformer.convert.layouts import torch_nn
from jax_transformer.porting import verify
from tests.convert.foreign import MODELS, randomized
from tests.models import random_params, small_config

SMALL = {"num_encoder_layers": 1, "num_decoder_layers": 2}


def test_every_block_of_a_published_model_agrees():
    config = small_config("pre_norm_memory_norm", **SMALL)
    module = randomized(MODELS["pre_norm_memory_norm"](config))
    wrapped = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    result = verify.verify(
        wrapped, config, "pre_norm_memory_norm", strip_prefixes=("module.",), seed=3
    )
    print(result)
    names = [block.name for block in result.blocks]
    assert result.first_differing is None
    assert names[0] == "source_embedding"
    assert names[-1] == "logits"
    assert "decoder.layers.1.memory_norm" in names
    assert len(names) == 2 + 5 + 2 * 8 + 2
    assert str(result).endswith("agrees: the bound is 1e-05")


def test_float64_is_held_to_its_own_bound(x64):
    config = small_config("shared_heads", num_encoder_layers=1, num_decoder_layers=1)
    result = verify.verify(convert.to_torch(random_params(config, dtype="float64"), config), config)
    print(result)
    assert result.bound == 1e-11
    assert result.first_differing is None


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("encoder.layers.0.self_attention.query.weight", "encoder.layers.0.self_attention"),
        ("encoder.layers.0.feed_forward.inner.bias", "encoder.layers.0.feed_forward"),
        ("decoder.layers.1.cross_attention.value.weight", "decoder.layers.1.cross_attention"),
        ("decoder.norm.weight", "decoder.norm"),
        ("output_projection.bias", "logits"),
    ],
)
def test_the_first_differing_block_is_marked(name, block, monkeypatch):
    """A torch side with one changed tensor: as a fault in that block would be."""
    config = small_config("pre_norm", **SMALL)

    def changed(params, config):
        tensors = convert.to_torch(params, config)
        return tensors | {name: tensors[name].flip(0)}

    monkeypatch.setattr(verify, "to_torch", changed)
    result = verify.verify(convert.to_torch(random_params(config), config), config)
    assert result.first_differing.name == block
    (marked,) = (line for line in str(result).splitlines() if "first to differ" in line)
    assert marked.split()[0] == block
    assert str(result).endswith("differs: the bound is 1e-05")


@pytest.mark.exhaustive
def test_torch_nn_itself_unmasks_a_wrong_layout():
    """With query and key exchanged both sides agree with each other, but not with torch's own."""
    config = small_config("torch_nn", num_encoder_layers=1, num_decoder_layers=1)
    module = randomized(convert.torch_nn_module(config))
    assert verify.verify(module.state_dict(), config, "torch_nn").first_differing is None
    right = torch_nn.transformer()

    def exchange(row):
        if len(row.paths) == 1:
            return row
        query, key, value = row.paths
        return dataclasses.replace(row, paths=(key, query, value))

    wrong = dataclasses.replace(right, rows=tuple(map(exchange, right.rows)))
    result = verify.verify(module.state_dict(), config, wrong)
    assert result.first_differing.name == "torch.nn.Transformer"


def test_bfloat16_weights_are_widened():
    config = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
    state_dict = convert.to_torch(random_params(config), config, dtype="bfloat16")
    assert state_dict["token_embedding.weight"].dtype == torch.bfloat16
    result = verify.verify(state_dict, config)
    assert result.first_differing is None
