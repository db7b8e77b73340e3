"""The published models: their names, their bits and their logits."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from jax_transformer import apply, convert
from jax_transformer.convert import ConversionError
from jax_transformer.errors import InputError
from tests.convert.foreign import MODELS
from tests.convert.tools import LOGIT_BOUNDS, assert_same_tensors, refused, target_masks
from tests.models import random_params, random_tokens, small_config, unchecked
from tests.parity.ladder import error

# Fewer layers compile faster; two of a kind still show whether they are told apart.
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 2}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def tokens_and_masks(config):
    """Return ids of which every row has some, and the masks that the foreign model is called with.

    The model with shared heads takes no padding mask: it sees every source, and all of the past.
    """
    src, tgt = random_tokens(config)
    src[-1, :4] = 7
    if config.head_projection == "shared":
        everything = np.ones((1, 1, 1, src.shape[1]), bool)
        causal = np.tril(np.ones((1, 1, tgt.shape[1], tgt.shape[1]), bool))
        return src, tgt, torch.from_numpy(everything), torch.from_numpy(causal)
    return src, tgt, *target_masks(src, tgt, config.pad_id)


def logits_of_both(module, params, config):
    src, tgt, src_mask, tgt_mask = tokens_and_masks(config)
    with torch.no_grad():
        theirs = module(
            torch.from_numpy(src).long(), torch.from_numpy(tgt).long(), src_mask, tgt_mask
        )
    run = jax.jit(apply, static_argnums=1)
    return run(params, config, src, tgt, src_mask.numpy(), tgt_mask.numpy()), theirs


def test_their_model_loaded_with_our_weights_gives_our_logits(name, dtype):
    config = small_config(name, **LAYERS)
    params = random_params(config, dtype=dtype)
    module = MODELS[name](config).to(getattr(torch, dtype))
    module.load_state_dict(convert.to_torch(params, config, name), strict=True)
    ours, theirs = logits_of_both(module, params, config)
    assert error(ours, theirs) <= LOGIT_BOUNDS[dtype]


def test_a_position_table_of_another_kind_is_refused(name):
    config = small_config(name)
    state_dict = MODELS[name](config).state_dict()
    (buffer, *_) = convert.get_layout(name).buffers
    other_kinds = {"sinusoidal", "sinusoidal_halves", "sinusoidal_per_column"} - {config.positions}
    for kind in other_kinds:
        other = dataclasses.replace(config, positions=kind)
        tensors = state_dict | {buffer.foreign: torch.from_numpy(buffer.value(other))}
        with pytest.raises(ConversionError, match=f"not as computed +{buffer.foreign} +is"):
            convert.from_torch(tensors, config, name)
    shorter = state_dict | {buffer.foreign: state_dict[buffer.foreign][..., :-1, :]}
    with pytest.raises(ConversionError, match=f"wrong shape +{buffer.foreign} .*expected"):
        convert.from_torch(shorter, config, name)


def test_buffers_come_home_as_they_are_computed_or_as_they_were(name):
    """Most tables are sines of float32 products, which are rounded unlike ours."""
    config = small_config(name, max_length=5000)
    state_dict = MODELS[name](config).state_dict()
    params, report = convert.to_params(state_dict, config, convert.get_layout(name))
    tables = [buffer.foreign for buffer in convert.get_layout(name).buffers]
    assert report.names("computed") == tables
    assert_same_tensors(convert.to_torch(params, config, name, buffers=state_dict), state_dict)
    computed = convert.to_torch(params, config, name)
    equal = {torch.equal(computed[table], state_dict[table]) for table in tables}
    assert equal == {name == "shared_heads"}
    without = convert.to_torch(params, config, name, buffers=False)
    assert without.keys() == state_dict.keys() - set(tables)
    assert refused(without, config, name).names("missing") == tables


def test_buffers_of_another_model_do_not_come_home():
    config = small_config("pre_norm")
    state_dict = MODELS["pre_norm"](config).state_dict()
    params = convert.from_torch(state_dict, config, "pre_norm")
    first, second = (buffer.foreign for buffer in convert.get_layout("pre_norm").buffers)
    given = {first: state_dict[first][:, :-1], "other": torch.zeros(2)}
    with pytest.raises(ConversionError) as caught:
        convert.to_torch(params, config, "pre_norm", buffers=given)
    assert [(fault.kind, fault.name) for fault in caught.value.report.faults] == [
        ("missing", second),
        ("wrong shape", first),
    ]
    given = state_dict | {first: 1 + state_dict[first]}
    with pytest.raises(ConversionError, match=f"not as computed +{first} +is "):
        convert.to_torch(params, config, "pre_norm", buffers=given)
    with unchecked(), pytest.raises(InputError, match=r"'mine\.pt' is a path, not a state_dict"):
        convert.to_torch(params, config, "pre_norm", buffers="mine.pt")
