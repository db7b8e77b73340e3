"""The torch reference beside what torch itself ships, for the preset `torch_nn`."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.models import BATCH, SOURCE_LENGTH, TARGET_LENGTH, small_config
from tests.parity.ladder import ROUNDED, bound, error
from tests.parity.test_blocks import make_mask, to_torch
from torch_reference import functional
from torch_reference.layers import MultiHeadAttention, Norm
from torch_reference.model import Transformer


@pytest.fixture(params=["float64", "float32"])
def torch_dtype(request):
    return getattr(torch, request.param)


def randomize(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module


def tensor(*shape, seed=0):
    return to_torch(np.random.default_rng(seed).normal(size=shape))


def assert_identical(actual, expected, kind="block"):
    actual, expected = actual.detach().numpy(), expected.detach().numpy()
    allowed = ROUNDED if actual.dtype == np.float32 else bound(kind, "float64")
    assert error(actual, expected) <= allowed


def copy_attention(source, target):
    """Copy torch.nn.MultiheadAttention's fused weights into the reference's three."""
    for index, name in enumerate(("query", "key", "value")):
        projection, rows = getattr(target, name), target.config.d_model
        block = slice(index * rows, (index + 1) * rows)
        projection.weight.data = source.in_proj_weight.data[block]
        projection.bias.data = source.in_proj_bias.data[block]
    target.output.load_state_dict(source.out_proj.state_dict())


def copy_layer(source, target):
    """Copy a torch encoder or decoder layer, whose norms are numbered by sublayer."""
    sublayers = ["self_attention", "feed_forward"]
    copy_attention(source.self_attn, target.self_attention)
    if hasattr(target, "cross_attention"):
        sublayers.insert(1, "cross_attention")
        copy_attention(source.multihead_attn, target.cross_attention)
    target.feed_forward.inner.load_state_dict(source.linear1.state_dict())
    target.feed_forward.outer.load_state_dict(source.linear2.state_dict())
    for number, name in enumerate(sublayers, start=1):
        norm = getattr(target, f"{name}_residual").norm
        norm.load_state_dict(getattr(source, f"norm{number}").state_dict())


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "per head", "empty row"])
def test_attention_is_torchs(torch_dtype, kind):
    config = small_config("torch_nn")
    theirs = randomize(nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True))
    ours = MultiHeadAttention(config)
    copy_attention(theirs, ours)
    query = tensor(BATCH, TARGET_LENGTH, config.d_model, seed=1).to(torch_dtype)
    key = tensor(BATCH, SOURCE_LENGTH, config.d_model, seed=2).to(torch_dtype)
    value = tensor(BATCH, SOURCE_LENGTH, config.d_model, seed=3).to(torch_dtype)
    mask = to_torch(make_mask(kind, TARGET_LENGTH, SOURCE_LENGTH, config.num_heads))
    their_mask = None
    if mask is not None:
        shape = (BATCH, config.num_heads, TARGET_LENGTH, SOURCE_LENGTH)
        their_mask = ~mask.expand(shape).flatten(0, 1)  # torch.nn: True = blocked
    theirs, ours = theirs.to(torch_dtype), ours.to(torch_dtype)
    # Without weights asked for, torch gives 0 where a query may attend to nothing, as we do.
    expected, _ = theirs(query, key, value, attn_mask=their_mask, need_weights=False)
    assert_identical(ours(query, key, value, mask), expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norm_is_torchs(torch_dtype, scale):
    config = small_config("torch_nn")
    theirs = randomize(nn.LayerNorm(config.d_model)).to(torch_dtype)
    ours = Norm(config).to(torch_dtype)
    ours.load_state_dict(theirs.state_dict())
    x = scale * tensor(BATCH, SOURCE_LENGTH, config.d_model).to(torch_dtype)
    assert_identical(ours(x), theirs(x))


def test_norms_by_the_unbiased_deviation_are_the_printed_formulas(torch_dtype):
    x = tensor(BATCH, SOURCE_LENGTH, 43).to(torch_dtype)
    scale, bias = tensor(2, 43).to(torch_dtype)
    outside, inside = x.std(-1, keepdim=True) + 1e-6, (x.var(-1, keepdim=True) + 1e-2).sqrt()
    centred = scale * (x - x.mean(-1, True))
    ours = functional.norm(x, scale, bias, 1e-6, "std_norm")
    assert_identical(ours, centred / outside + bias)
    ours = functional.norm(x, scale, bias, 1e-2, "unbiased_layer_norm")
    assert_identical(ours, centred / inside + bias)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_whole_model_is_torchs(torch_dtype, placement):
    config = small_config("torch_nn", norm_placement=placement, activation="gelu")
    theirs = nn.Transformer(
        config.d_model,
        config.num_heads,
        config.num_encoder_layers,
        config.num_decoder_layers,
        config.d_ff,
        dropout=0.0,
        activation=config.activation,
        batch_first=True,
        norm_first=placement == "pre",
    )
    theirs = randomize(theirs).to(torch_dtype)
    ours = Transformer(config).to(torch_dtype)
    for stack in ("encoder", "decoder"):
        for source, target in zip(
            getattr(theirs, stack).layers, getattr(ours, stack).layers, strict=True
        ):
            copy_layer(source, target)
        getattr(ours, stack).norm.load_state_dict(getattr(theirs, stack).norm.state_dict())
    src = tensor(BATCH, SOURCE_LENGTH, config.d_model, seed=1).to(torch_dtype)
    tgt = tensor(BATCH, TARGET_LENGTH, config.d_model, seed=2).to(torch_dtype)
    padding = to_torch(make_mask("padding", SOURCE_LENGTH, SOURCE_LENGTH, config.num_heads))
    blocked = ~padding[:, 0, 0]
    expected = theirs(
        src,
        tgt,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(TARGET_LENGTH).isinf(),
        src_key_padding_mask=blocked,
        memory_key_padding_mask=blocked,
    )
    assert_identical(ours(src, tgt, padding), expected, kind="logits")
