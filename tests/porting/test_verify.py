"""Verification: agreement is shown, and a planted fault is blamed on the block that has it."""

import dataclasses
import re

import jax
import pytest
import torch
from msgspec.structs import replace

from jax_transformer import convert
from jax_transformer.porting import suggest, verification, verify_recording
from tests.convert.foreign import MODELS, randomized
from tests.models import random_params, small_config
from tests.porting.models import SHAPES
from tests.porting.recorded import check_home, record, tensors_of
from tests.tiers import tiered

SMALL = {"num_encoder_layers": 1, "num_decoder_layers": 2}


def test_every_block_of_a_published_model_agrees():
    config = small_config("pre_norm_memory_norm", **SMALL)
    module = randomized(MODELS["pre_norm_memory_norm"](config))
    wrapped = {f"module.{name}": tensor for name, tensor in module.state_dict().items()}
    result = verification.verify(
        wrapped, config, "pre_norm_memory_norm", strip_prefixes=("module.",), seed=3
    )
    assert result.agrees
    names = {pair.a for pair in result.blocks}
    assert {"source_embedding", "decoder.layers_1.memory_norm", "logits"} <= names
    assert all(pair.roundings < 64 for pair in result.blocks if pair.roundings is not None)


def test_float64_is_held_to_its_own_bound(x64):
    config = small_config("shared_heads", num_encoder_layers=1, num_decoder_layers=1)
    params = random_params(config, dtype="float64")
    result = verification.verify(convert.to_torch(params, config), config)
    assert result.agrees
    assert max(pair.error for pair in result.blocks if pair.error is not None) < 1e-13


def test_bfloat16_weights_are_widened():
    config = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
    state_dict = convert.to_torch(random_params(config), config, dtype="bfloat16")
    assert state_dict["token_embedding.weight"].dtype == torch.bfloat16
    assert verification.verify(state_dict, config).agrees


FAULTS = {
    "encoder.layers.0.self_attention.query.weight": "encoder.layers_0.self_attention",
    "encoder.layers.0.feed_forward.inner.bias": "encoder.layers_0.feed_forward",
    "decoder.layers.1.cross_attention.value.weight": "decoder.layers_1.cross_attention",
    "decoder.norm.weight": "decoder.norm",
    "output_projection.bias": "output_projection",
}


@pytest.mark.parametrize("name", tiered(FAULTS, [next(iter(FAULTS))]))
def test_the_first_differing_block_is_marked(name, monkeypatch):
    """A torch side with one changed tensor: as a fault in that block would be."""
    config = small_config("pre_norm", **SMALL)

    def changed(params, config):
        tensors = convert.to_torch(params, config)
        return tensors | {name: tensors[name].flip(0)}

    monkeypatch.setattr(verification, "to_torch", changed)
    result = verification.verify(convert.to_torch(random_params(config), config), config)
    assert not result.agrees
    assert result.first_differing.a.startswith(FAULTS[name])


@pytest.fixture(scope="module")
def clones():
    """A program by its weights, its recording, and what is found of both."""
    module = SHAPES["clones"].module()
    tensors, recording = tensors_of(module), record(module, lengths="[(7, 5)]")
    suggestion = suggest(tensors, recording)
    return tensors, recording, suggestion, check_home(tensors, suggestion)


@pytest.mark.exhaustive
def test_a_program_agrees_with_what_was_found(clones):
    tensors, recording, found, params = clones
    result = verify_recording(params, found.config, found.layout, recording, tensors)
    assert result.agrees, result
    assert {pair.name for pair in result.blocks} >= {"logits", "logits beside padding"}
    pairs = {pair.b: pair.a for pair in result.blocks}
    assert pairs["writers.1.mixers.1"] == "decoder.layers_1.cross_attention"


def square(params):
    attention = params["decoder"]["layers_1"]["cross_attention"]
    attention["key"]["kernel"] = attention["key"]["kernel"].T


def exchanged(params):
    attention = params["encoder"]["layers_1"]["self_attention"]
    attention["query"], attention["value"] = attention["value"], attention["query"]


def hidden(**masks):
    return lambda layout: dataclasses.replace(layout, masks=replace(layout.masks, **masks))


# Fields of the config, a change of the layout or of the parameters, and the block that is named.
PLANTED = {
    "epsilon": ({"norm_epsilon": 1e-3}, None, None, r"readers\.0\.norms\.0"),
    "activation": ({"activation": "gelu"}, None, None, r"readers\.0\.network\.activation"),
    "norm": ({"norm": "layer_norm"}, None, None, r"readers\.0\.norms\.0"),
    "transposed": ({}, None, square, r"writers\.1\.mixers\.1"),
    "query and value": ({}, None, exchanged, r"readers\.1\.mixers\.0"),
    "source mask": ({}, hidden(encoder=False), None, "logits beside padding"),
    "memory mask": ({}, hidden(memory=False), None, "logits beside padding"),
    "causal mask": ({}, hidden(causal=False), None, r"writers\.0\.mixers\.0"),
}


@pytest.mark.parametrize("fault", tiered(PLANTED, ["transposed", "source mask"]))
def test_a_fault_is_blamed_on_its_block(fault, clones):
    tensors, recording, found, right = clones
    fields, changed_layout, change, block = PLANTED[fault]
    params = jax.tree.map(lambda leaf: leaf, right)
    if change:
        change(params)
    config = dataclasses.replace(found.config, **fields)
    layout = changed_layout(found.layout) if changed_layout else found.layout
    result = verify_recording(params, config, layout, recording, tensors)
    assert not result.agrees
    assert re.match(block, result.first_differing.b or ""), result
