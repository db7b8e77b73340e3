"""The cached, compiled search beside the plain one of the torch reference."""

import copy
import functools

import jax
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import convert
from tests.decoding.plain import quick_generate
from tests.decoding.reversing import (
    MAX_NEW_TOKENS,
    PRESETS,
    VOCABULARY,
    constant_model,
    learners,
    sources,
)
from tests.models import random_params, random_tokens, small_config, unchecked
from tests.tiers import tiered

# Taken in turns. The strong ones tempt a search to stop before a longer or shorter target wins.
ALPHAS = (0.0, 0.6, 3.0, -0.5)


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def in_float64(preset):
    return [copy.deepcopy(model).double() for model in learners(preset)]


@functools.cache
def params_of(model):
    return convert.from_torch(model.state_dict(), model.config)


def assert_same(found, tokens, scores, atol):
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_allclose(found.scores, scores, rtol=0, atol=atol)


@pytest.mark.parametrize("beams", [(1, 1), (5, 3)])
# The quick tier compares the compiled search with transformers.
@pytest.mark.parametrize("preset", tiered(PRESETS, [], ["shared_heads", "bart", "umt5"]))
@pytest.mark.usefixtures("x64")
def test_ids_and_scores_are_the_references(preset, beams):
    """Four stages of each preset's training, in float64: no near-tie of float32 decides."""
    for stage, model in enumerate(in_float64(preset)):
        src = sources(model.config, 3, seed=stage)
        options = {
            "max_new_tokens": MAX_NEW_TOKENS + 2,  # more than a source has
            "beam_size": beams[0],
            "num_hypotheses": beams[1],
            "length_penalty": ALPHAS[stage % len(ALPHAS)],
        }
        # The mask of another row: what it hides is not what None would hide.
        mask = np.roll(src != model.config.pad_id, 1, axis=0)[:, None, None]
        mask = mask if beams == (5, 3) else None
        theirs = None if mask is None else torch.from_numpy(mask)
        with unchecked():
            source = torch.from_numpy(src)
            expected = torch_reference.generate(model, source, src_mask=theirs, **options)
        found = quick_generate(params_of(model), model.config, src, src_mask=mask, **options)
        assert_same(found, expected.tokens, expected.scores, atol=1e-5)
        np.testing.assert_array_equal(found.lengths, expected.lengths)


@pytest.mark.exhaustive
@pytest.mark.parametrize("beams", [(1, 1), (4, 3)])
@pytest.mark.parametrize("model", ["windows", "merged", "modern", "ssru"])
@pytest.mark.usefixtures("x64")
def test_other_decoders_and_windows_shorter_than_the_text_are_searched_alike(model, beams):
    config = small_config(model, num_encoder_layers=2, num_decoder_layers=2)
    drawn = random_params(config, seed=5, dtype=np.float64)
    params = jax.tree.map(lambda leaf: 1.5 * leaf, drawn)
    module = torch_reference.Transformer(config).double().eval()
    module.load_state_dict(convert.to_torch(params, config))
    src, _ = random_tokens(config)
    options = {"max_new_tokens": 11, "beam_size": beams[0], "num_hypotheses": beams[1]}
    with unchecked():
        expected = torch_reference.generate(module, torch.from_numpy(src), **options)
    found = quick_generate(params, config, src, **options)
    assert config.sliding_window is None or np.max(found.lengths) > config.sliding_window + 1
    assert_same(found, expected.tokens, expected.scores, atol=1e-5)


def test_a_target_that_wins_late_is_waited_for():
    """Two short ones come first until, all steps later, the penalty has grown enough."""
    odds = [1e-9] * VOCABULARY
    odds[2], odds[7] = 0.9, 0.1  # the end, and another
    model = constant_model(odds)
    src = sources(model.config, 3, seed=0)
    options = {"beam_size": 2, "num_hypotheses": 2, "length_penalty": 4.0}
    options |= {"max_new_tokens": MAX_NEW_TOKENS}
    expected = torch_reference.generate(model, torch.from_numpy(src), **options)
    found = quick_generate(params_of(model), model.config, src, **options)
    assert_same(found, expected.tokens, expected.scores, atol=1e-5)
    assert found.lengths.tolist() == [[1, MAX_NEW_TOKENS]] * 3
