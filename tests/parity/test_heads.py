"""Classification heads in both frameworks: scores, losses and the gradient of every leaf."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
import torch

import torch_reference.training
from jax_transformer import InputError, classification_loss, classify, make_train_step
from jax_transformer.convert import to_torch
from tests.models import random_params, random_tokens, small_config
from tests.parity.ladder import BOUNDS, error
from tests.tiers import tiered, tiered_rows
from torch_reference.model import Transformer

PRESETS = ("bart", "mbart", "t5", "umt5", "pre_norm", "windows", "merged", "ssru")
LABELS = ("no", "perhaps", "yes")
HEADS = {
    "sequence": {"labels": LABELS},
    "last token": {"labels": LABELS, "head_start": "last_token"},
    "several": {"labels": LABELS, "problem_type": "multi_label_classification"},
    "number": {"labels": ("stars",)},
    "tokens": {"labels": LABELS},
}


def pair_of(preset, name, dtype=np.float64):
    """Return a config, its parameters, and the model of torch with the same ones."""
    head = "token" if name == "tokens" else "sequence"
    config = small_config(preset).with_head(head, **HEADS[name])
    params = random_params(config, dtype=dtype)
    module = Transformer(config).to(torch.float64 if dtype == np.float64 else torch.float32)
    module.load_state_dict(to_torch(params, config))
    return config, params, module.eval()


scores_of = jax.jit(classify, static_argnames="config")


def sources(config):
    """Return ragged sources: of the second row the EOS is inside of the text too."""
    src, _ = random_tokens(config)
    src = np.where(np.isin(src, (config.eos_id, config.pad_id)), 9, src)
    for row, length in enumerate((src.shape[1], 7, 4, 1, 9)):
        src[row, length - 1] = config.eos_id
        src[row, length:] = config.pad_id
    src[1, 3] = config.eos_id
    return src


def targets_of(scores, config, seed=3):
    random = np.random.default_rng(seed)
    if config.scores_are == "single_label_classification":
        return random.integers(-1, config.num_labels, scores.shape[:-1])
    return random.uniform(0, 1, scores.shape)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("preset", "name"),
    tiered_rows(
        itertools.product(PRESETS, HEADS),
        lambda preset, name: preset == "mbart" and name in ("sequence", "tokens"),
        lambda preset, name: preset == "mbart" or name in ("sequence", "tokens"),
    ),
)
def test_scores_losses_and_gradients_are_those_of_torch(preset, name):
    config, params, module = pair_of(preset, name)
    src = sources(config)
    theirs = module.classify(torch.from_numpy(src))
    targets = targets_of(theirs, config)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        scores = classify(params, config, src)
        total, count = classification_loss(scores, targets, config)
        return total / count, scores

    (ours, scores), gradients = loss(params)
    assert error(scores, theirs) <= BOUNDS["logits"][0]
    total, count = torch_reference.training.classification_loss(
        theirs, torch.from_numpy(targets), config
    )
    (total / count).backward()
    np.testing.assert_allclose(ours, (total / count).item(), rtol=1e-13)
    shared = to_torch(gradients, config)
    assert {*shared} == {name for name, _ in module.named_parameters()}
    for leaf, parameter in module.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        largest = max(1e-3, grad.abs().max().item())
        assert (shared[leaf] - grad).abs().max().item() / largest <= BOUNDS["gradient"][0], leaf


@pytest.mark.parametrize("name", tiered(HEADS, ["sequence"]))
def test_scores_in_float32(name):
    config, params, module = pair_of("bart", name, np.float32)
    src = sources(config)
    assert error(scores_of(params, config, src), module.classify(torch.from_numpy(src))) <= 2e-6


@pytest.mark.usefixtures("x64")
def test_rows_do_not_depend_on_their_neighbours_and_one_without_an_end_is_nan():
    config, params, _ = pair_of("bart", "sequence")
    src = sources(config)
    alone = scores_of(params, config, src[2:3, :4])
    np.testing.assert_allclose(scores_of(params, config, src)[2:3], alone, atol=1e-14)
    src[2] = 9
    assert np.isnan(scores_of(params, config, src)[2]).all()
    assert np.isfinite(np.delete(scores_of(params, config, src), 2, axis=0)).all()


@pytest.mark.exhaustive
def test_dropout_of_the_head_alone_moves_the_scores():
    config, params, _ = pair_of("bart", "sequence")
    dropping = config.from_dict({**config.to_dict(), "head_dropout": 0.5})
    src, key = sources(config), jax.random.key(1)
    still = scores_of(params, config, src, dropout_key=key)
    np.testing.assert_array_equal(still, scores_of(params, config, src))
    assert np.abs(still - scores_of(params, dropping, src, dropout_key=key)).min() > 0
    np.testing.assert_array_equal(still, scores_of(params, dropping, src))
    all_dropped = config.from_dict({**config.to_dict(), "head_dropout": 1.0})
    bias = np.broadcast_to(params["head"]["output"]["bias"], still.shape)
    found = scores_of(params, all_dropped, src, dropout_key=key)
    np.testing.assert_allclose(found, bias, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": "sequence"}, r"labels=\(\) must name what the head scores"),
        ({"head": "sequence", "labels": ["a", "b", "a"]}, "each once"),
        ({"labels": ["a"]}, r"labels=\('a',\) must be \(\) where head='none'"),
        ({"head": "token", "labels": ["a"]}, "num_decoder_layers=3 must be 0"),
        ({"head": "sequence", "labels": ["a"], "output_projection": "tied"}, "must be 'none'"),
        ({"head": "sequence", "labels": [1]}, r"labels=\[1\] must be a list"),
    ],
)
def test_heads_that_no_model_has_are_refused(fields, message):
    config = small_config("bart").to_dict()
    if fields.get("head") == "sequence" and "output_projection" not in fields:
        config |= {"output_projection": "none", "output_bias": False}
    with pytest.raises(InputError, match=message):
        small_config("bart").from_dict({**config, **fields})


def test_what_has_no_head_or_other_targets_is_refused():
    config, params, _ = pair_of("bart", "sequence")
    encoder = small_config("bart").part("encoder")
    with pytest.raises(InputError, match="head='none' scores no labels"):
        classify(random_params(encoder), encoder, sources(config))
    with pytest.raises(InputError, match="head='sequence' reads the decoder's output"):
        encoder.with_head("sequence", labels=LABELS)
    with pytest.raises(InputError, match="trained by classification_loss"):
        make_train_step(config, optax.sgd(0.1))
    with pytest.raises(InputError, match=r"must be \(5,\) for these scores"):
        classification_loss(classify(params, config, sources(config)), np.zeros(4), config)
