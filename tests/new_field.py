"""What a model with the made-up field of docs/how_to/new_field.md must do.

`tests/test_new_field.py` runs this file in a changed copy of the project. No line is about the
field but the config: everything reads the tree.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import torch

import jax_transformer as jt
import torch_reference
from jax_transformer.convert.table import flatten
from jax_transformer.model.tree import decayed
from jax_transformer.training.freeze import trained_names
from jax_transformer.translation.model_folder import save
from tests.models import random_params, random_tokens, small_config, tiny_model


def check_model(params, config, src, tgt):
    """Check it against torch, and the step with a cache against the whole."""
    logits = jt.apply(params, config, src, tgt)
    reference = torch_reference.Transformer(config).eval()
    reference.load_state_dict(jt.convert.to_torch(params, config))
    expected = reference(torch.from_numpy(src).long(), torch.from_numpy(tgt).long())
    assert np.abs(logits - expected.detach().numpy()).max() < 1e-5
    memory = jt.encode(params, config, src)
    whole, cache = jt.decode(params, config, tgt, memory), None
    cache = jt.init_cache(params, config, memory, tgt.shape[1])
    for tokens in tgt.T:
        logits, cache = jt.decode_step(params, config, cache, tokens)
    assert np.abs(logits[0] - whole[0, -1]).max() < 1e-5  # the row without padding


def check_params(params, config, added):
    """Check new values, conversion there and back, and the refusal of another config."""
    fresh = flatten(jt.init_params(jax.random.key(0), config))
    assert all((fresh[path] == 1).all() for path in added)
    for layout in ("reference", "pre_norm"):
        back = jt.convert.from_torch(jt.convert.to_torch(params, config, layout), config, layout)
        assert all(np.array_equal(flatten(back)[path], leaf) for path, leaf in params_of(params))
    with pytest.raises(jt.InputError, match="feed_forward_norm=True has it"):
        jt.encode(params, dataclasses.replace(config, feed_forward_norm=False), np.ones((1, 2), int))


def params_of(params):
    return flatten(params).items()


def check_training(params, config, batch, added):
    """Check that a step moves it, that it can be frozen, and that a mesh places all."""
    optimizer = optax.adam(0.1)
    step = jt.make_train_step(config, optimizer)
    moved = flatten(step(params, optimizer.init(params), batch, None)[0])
    assert all((moved[path] != leaf).any() for path, leaf in params_of(params) if path in added)
    trained = trained_names([*flatten(params)], ("*/feed_forward/norm/*",))
    assert not {*trained} & {*added}
    assert not any(flatten(decayed(params))[path] for path in added)
    places = jt.parameter_shardings(jt.make_mesh(), params, config)
    assert jax.tree.structure(places) == jax.tree.structure(params)


def main():
    """Check all, and a folder of it."""
    config = small_config("pre_norm", feed_forward_norm=True)
    params, (src, tgt) = random_params(config), random_tokens(config)
    added = [path for path in flatten(params) if path.endswith("feed_forward/norm/scale")]
    assert len(added) == config.num_encoder_layers + config.num_decoder_layers
    check_model(params, config, src, tgt)
    check_params(params, config, added)
    check_training(params, config, jt.Batch(src, tgt, np.roll(tgt, -1, 1)), added)
    save("model", tiny_model(["a b c", "c b a"], 12, feed_forward_norm=True))
    assert jt.load("model").config.feed_forward_norm
    jt.Translator("model")(["a b", "c"], max_new_tokens=3)


if __name__ == "__main__":
    main()
