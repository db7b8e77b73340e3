"""Probabilities of given targets, and cross-attention weights, against both models."""

import jax
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import InputError, apply, convert, cross_attention_weights, score
from tests.decoding.plain import quick_generate, random_model
from tests.decoding.reversing import MAX_NEW_TOKENS, sources
from tests.models import SOURCE_LENGTH
from tests.parity.ladder import error
from tests.tiers import tiered

quick_score = jax.jit(score, static_argnames="config")
quick_weights = jax.jit(cross_attention_weights, static_argnames="config")


def targets(config, count, length, seed=0):
    """Return ragged targets without a begin; the last one is whole, without an end."""
    random = np.random.default_rng(seed)
    words = np.setdiff1d(np.arange(config.tgt_vocab_size), [config.pad_id, config.eos_id])
    tgt = random.choice(words, (count, length)).astype(np.int32)
    for row in range(count - 1):
        end = random.integers(0, length)
        tgt[row, end:] = config.pad_id
        tgt[row, end] = config.eos_id
    return tgt


def read(config, tgt):
    """Return what the model reads to predict a target: the begin, all tokens but the last."""
    given = np.full_like(tgt, config.pad_id)
    for row, tokens in enumerate(tgt):
        before = tokens[tokens != config.pad_id][:-1]
        given[row, : len(before) + 1] = [config.bos_id, *before]
    return given


@pytest.mark.parametrize("preset", tiered(["vaswani2017", "marian", "shared_heads"], ["marian"]))
def test_a_score_sums_the_log_probabilities_of_the_tokens(preset):
    config, params, src = random_model(preset)
    tgt = targets(config, len(src), SOURCE_LENGTH)
    given = read(config, tgt)
    logits = jax.jit(apply, static_argnames="config")(params, config, src, given)
    seen = np.take_along_axis(jax.nn.log_softmax(logits), tgt[..., None], axis=-1)[..., 0]
    expected = np.sum(seen, axis=1, where=tgt != config.pad_id)
    found = quick_score(params, config, src, tgt)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    mask = (src != config.pad_id)[:, None, None]
    np.testing.assert_array_equal(quick_score(params, config, src, tgt, src_mask=mask), found)
    if preset != "shared_heads":  # where the source is padded with the target
        padded = np.pad(tgt, ((0, 0), (0, 3)), constant_values=config.pad_id)
        np.testing.assert_allclose(quick_score(params, config, src, padded), expected, rtol=1e-5)


@pytest.mark.parametrize("length", tiered([3, SOURCE_LENGTH + 2], [SOURCE_LENGTH + 2]))
def test_targets_of_any_length_are_scored_where_they_must_be_as_long_as_sources(length):
    config, params, src = random_model("shared_heads")
    tgt = targets(config, len(src), length)
    whole = max(length, SOURCE_LENGTH)
    pad = lambda ids: np.pad(ids, ((0, 0), (0, whole - ids.shape[1])))  # noqa: E731
    expected = quick_score(params, config, pad(src), pad(tgt))
    np.testing.assert_allclose(quick_score(params, config, src, tgt), expected, rtol=1e-6)
    weights = quick_weights(params, config, src, tgt)
    assert weights.shape == (len(src), 1, config.num_heads, length, SOURCE_LENGTH)


def test_generated_targets_get_the_scores_they_were_found_with(reversal_model):
    config, params = reversal_model
    src = sources(config, 6, seed=11)
    options = {"max_new_tokens": MAX_NEW_TOKENS, "beam_size": 4, "num_hypotheses": 4}
    found = quick_generate(params, config, src, **options)
    for rank in range(4):
        expected = quick_score(params, config, src, found.tokens[:, rank])
        np.testing.assert_allclose(found.scores[:, rank], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "preset",
    tiered(["pre_norm_memory_norm", "shared_heads", "merged", "ssru"], ["pre_norm_memory_norm"]),
)
def test_cross_attention_weights_are_the_references(preset):
    config, params, src = random_model(preset, num_decoder_layers=3)
    tgt = targets(config, len(src), SOURCE_LENGTH)
    found = np.asarray(quick_weights(params, config, src, tgt))

    model = torch_reference.Transformer(config).eval()
    model.load_state_dict(convert.to_torch(params, config))
    expected = []
    for layer in model.decoder.layers:  # the weights pass through a dropout of their own
        merged = config.decoder_attention == "merged"
        attention = layer.self_attention if merged else layer.cross_attention
        attention.dropout.register_forward_hook(
            lambda _, inputs, output: expected.append(output[..., :SOURCE_LENGTH])
        )
    with torch.no_grad():
        model(torch.from_numpy(src), torch.from_numpy(read(config, tgt)))
    expected = torch.stack(expected, dim=1).numpy()
    assert found.shape == (len(src), 3, config.num_heads, SOURCE_LENGTH, SOURCE_LENGTH)
    assert error(found, expected) <= 2e-6
    if merged:
        assert (found[:-1, :, :, 0].sum(axis=-1) < 0.99).all()  # BOS has the rest
    else:
        np.testing.assert_allclose(found[:-1].sum(axis=-1), 1, atol=1e-5)
    assert (found[-1] == 0).all()  # a source of nothing but padding
    hidden = np.broadcast_to((src == config.pad_id)[:, None, None, None], found.shape)
    assert (found[hidden] == 0).all()


def test_bad_input_is_refused():
    config, params, src = random_model("vaswani2017")
    tgt = targets(config, len(src), 4)
    for function in (score, cross_attention_weights):
        with pytest.raises(InputError, match=r"tgt\[0, 0\]=8"):
            function(params, config, src, np.where(np.arange(4) == 0, 8, tgt))
        with pytest.raises(InputError, match=r"src\[0, 0\]=-1"):
            function(params, config, np.where(np.arange(SOURCE_LENGTH) == 0, -1, src), tgt)
        with pytest.raises(InputError, match=r"tgt is 30 .*max_length=29"):
            function(params, config, src, np.ones((len(src), 30), np.int32))
        with pytest.raises(InputError, match=r"= \[5, 3, 1, 13\]"):
            function(params, config, src, tgt, src_mask=np.ones((1, 1, 2, SOURCE_LENGTH), bool))
