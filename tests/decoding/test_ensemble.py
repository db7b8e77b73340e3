"""Ensembles: the search by hand over the mean of log-probabilities, and what is no ensemble."""

import dataclasses

import jax
import numpy as np
import pytest

from jax_transformer import InputError, apply, generate
from tests.models import random_params, small_config

SRC = np.array([[5, 6, 7, 8, 2, 0, 0], [9, 10, 2, 0, 0, 0, 0], [11, 12, 13, 14, 15, 16, 2]])
STEPS = 6


@pytest.fixture(scope="module")
def models():
    """Two models of one vocabulary and of different sizes, whose targets vary."""
    fields = {"token_embeddings": "separate", "output_projection": "linear"}
    configs = [small_config("vaswani2017", num_decoder_layers=n, **fields) for n in (3, 1)]
    params = [random_params(config, seed) for seed, config in enumerate(configs)]
    return jax.tree.map(lambda leaf: 2 * leaf, params), configs


run_apply = jax.jit(apply, static_argnames="config")


def mean_log_probabilities(params, configs, tgt):
    """Return the models' mean for the token after each of whole targets, without a cache."""
    models = zip(params, configs, strict=True)
    of_models = [jax.nn.log_softmax(run_apply(*model, SRC, tgt)) for model in models]
    return np.array(sum(of_models) / len(of_models))


def greedy_by_hand(params, configs):
    tokens = np.full((len(SRC), 1 + STEPS), configs[0].pad_id)
    tokens[:, 0] = configs[0].bos_id
    total, ended = np.zeros(len(SRC)), np.zeros(len(SRC), bool)
    for step in range(STEPS):
        mean = mean_log_probabilities(params, configs, tokens)[:, step]
        choice = np.where(np.arange(mean.shape[1]) == configs[0].pad_id, -np.inf, mean).argmax(1)
        total += np.where(ended, 0, mean[np.arange(len(SRC)), choice])
        tokens[:, step + 1] = np.where(ended, configs[0].pad_id, choice)
        ended |= choice == configs[0].eos_id
    return tokens[:, 1:], total


@pytest.mark.exhaustive
def test_greedy_search_is_that_of_the_mean_log_probabilities(models):
    tokens, total = greedy_by_hand(*models)
    found = generate(*models, SRC, max_new_tokens=STEPS)
    assert np.array_equal(found.tokens[:, 0], tokens)
    assert np.allclose(found.scores[:, 0], total, atol=1e-5)
    alone = [generate(*model, SRC, max_new_tokens=STEPS).tokens for model in zip(*models)]  # noqa: B905
    assert not np.array_equal(alone[0], found.tokens)
    assert not np.array_equal(alone[1], found.tokens)


@pytest.mark.exhaustive
def test_beam_search_finds_no_worse_hypotheses_and_scores_them_by_the_mean(models):
    params, configs = models
    options = {"max_new_tokens": STEPS, "length_penalty": 0.0}
    found = generate(params, configs, SRC, beam_size=4, num_hypotheses=3, **options)
    greedy = generate(params, configs, SRC, **options)
    assert (found.scores[:, 0] >= greedy.scores[:, 0] - 1e-5).all()
    for k in range(3):
        targets = np.asarray(found.tokens[:, k])
        inputs = np.concatenate(
            [np.full((len(SRC), 1), configs[0].bos_id), targets[:, :-1]], axis=1
        )
        mean = mean_log_probabilities(params, configs, inputs)
        chosen = np.take_along_axis(mean, targets[..., None], axis=-1)[..., 0]
        visible = np.arange(STEPS) < np.asarray(found.lengths)[:, k, None]
        assert np.allclose(found.scores[:, k], (chosen * visible).sum(1), atol=1e-5)


def test_what_is_no_ensemble_is_refused(models):
    params, configs = models
    other = dataclasses.replace(configs[1], eos_id=3)
    with pytest.raises(
        InputError, match=r"eos_id of the models .* must be equal; they have 2 and 3"
    ):
        generate(params, [configs[0], other], SRC, max_new_tokens=3)
    with pytest.raises(InputError, match="2 configs and 1 parameters"):
        generate(params[:1], configs, SRC, max_new_tokens=3)
    memory = np.zeros((*SRC.shape, configs[0].d_model), np.float32)
    with pytest.raises(InputError, match="memory is that of one model"):
        generate(params, configs, SRC, max_new_tokens=3, memory=memory)
    broken = [params[0], jax.tree.map(lambda leaf: leaf * np.nan, params[1])]
    with pytest.raises(InputError, match=r"the logits of src\[0\] are NaN or infinite at step 0"):
        generate(broken, configs, SRC, max_new_tokens=3)
