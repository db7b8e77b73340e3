"""Fresh parameters are distributed as the scheme's author draws them."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer import TransformerConfig, init_params
from tests.tiers import tiered

SIZES = {
    "d_model": 64,
    "num_heads": 4,
    "d_ff": 256,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}


def fresh(preset, **fields):
    vocabularies = {"src_vocab_size": 997, "tgt_vocab_size": 997}
    config = TransformerConfig.preset(preset, **(SIZES | vocabularies | fields))
    return init_params(jax.random.key(0), config)


def assert_uniform(actual, limit):
    """Check limit, mean and deviation of a sample from the interval (-limit, limit)."""
    actual = np.asarray(actual)
    deviations = 5 / np.sqrt(actual.size)  # five standard errors
    assert np.abs(actual).max() <= limit
    assert np.abs(actual).max() > limit * (1 - 10 / actual.size)
    assert abs(actual.mean()) < limit * deviations
    assert abs(actual.std() / (limit / np.sqrt(3)) - 1) < deviations


def assert_normal(actual, deviation):
    """Check mean and deviation of a sample from a normal distribution around 0."""
    actual = np.asarray(actual)
    deviations = 5 / np.sqrt(actual.size)  # five standard errors
    assert abs(actual.mean()) < deviation * deviations
    assert abs(actual.std() / deviation - 1) < deviations


def assert_alike(actual, expected):
    """Check that both samples come from one uniform distribution centred on zero."""
    expected = expected.detach().numpy()
    assert actual.shape in (expected.shape, expected.T.shape)
    limit = max(np.abs(actual).max(), np.abs(expected).max())
    for sample in (actual, expected):
        assert_uniform(sample, limit * (1 + 1e-6))


def test_torch_nn_draws_query_key_and_value_as_one_matrix():
    torch.manual_seed(0)
    theirs = nn.Transformer(
        SIZES["d_model"], SIZES["num_heads"], 1, 1, SIZES["d_ff"], batch_first=True
    ).encoder.layers[0]
    ours = fresh("torch_nn")["encoder"]["layers_0"]
    attention, feed_forward = ours["self_attention"], ours["feed_forward"]
    fused = np.concatenate([attention[name]["kernel"] for name in ("query", "key", "value")], 1)
    assert_alike(fused, theirs.self_attn.in_proj_weight)
    assert_alike(attention["output"]["kernel"], theirs.self_attn.out_proj.weight)
    assert_alike(feed_forward["inner"]["kernel"], theirs.linear1.weight)
    assert_alike(feed_forward["inner"]["bias"], theirs.linear1.bias)
    assert not np.any([attention[name]["bias"] for name in attention])
    assert not theirs.self_attn.in_proj_bias.any()


def test_torch_default_is_what_linear_and_embedding_draw():
    torch.manual_seed(0)
    ours = fresh("pre_norm_log_softmax")
    theirs = nn.Linear(64, 256)
    inner = ours["encoder"]["layers_0"]["feed_forward"]["inner"]
    assert_alike(inner["kernel"], theirs.weight)
    assert_alike(inner["bias"], theirs.bias)
    assert_normal(ours["source_embedding"]["embedding"], 1.0)


@pytest.mark.parametrize("preset", tiered(["pre_norm", "pre_norm_memory_norm"], ["pre_norm"]))
def test_xavier_uniform_reaches_every_matrix_and_the_embeddings(preset):
    matrices = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(fresh(preset)):
        if leaf.ndim == 2:
            assert_uniform(leaf, np.sqrt(6 / sum(leaf.shape)))
            matrices += 1
        elif path[-1].key == "scale":
            assert (leaf == 1).all()
    assert matrices == 2 + 6 + 10 + 1  # embeddings, encoder layer, decoder layer, output


def test_marian_draws_from_a_narrow_normal():
    params = fresh("marian", pad_id=996, bos_id=996)
    assert_normal(params["token_embedding"]["embedding"], 0.02)
    assert_normal(params["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"], 0.02)
    assert not params["output_projection"]["bias"].any()


def test_paper_scales_the_tied_table_to_unit_logits():
    params = fresh("vaswani2017")
    assert_normal(params["token_embedding"]["embedding"], 64**-0.5)
    feed_forward = params["encoder"]["layers_0"]["feed_forward"]
    assert_uniform(feed_forward["inner"]["kernel"], np.sqrt(6 / (64 + 256)))
    assert not feed_forward["inner"]["bias"].any()
    assert not feed_forward["outer"]["bias"].any()
