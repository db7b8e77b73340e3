"""The rule that chooses attention, and what is handed to cuDNN: computed by XLA, and lowered."""

import dataclasses
import functools
import re
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import TransformerConfig, apply
from jax_transformer.errors import InputError
from jax_transformer.kernels.attention_backend import AttentionChoice, choose_for, execution_on
from jax_transformer.kernels.execution import Execution
from jax_transformer.kernels.fused_attention import fused_attention
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask
from jax_transformer.model import functional
from tests.models import random_params, random_tokens, small_config
from tests.parity.ladder import check_errors, error, moved, widen
from tests.tiers import tiered

BATCH, HEADS, HEAD_DIM = 3, 2, 8
TPU = {"platform": "tpu", "compute_capability": ""}
CONFIG = TransformerConfig(d_kv=64)


def chosen(
    platform="gpu", compute_capability="9.0", dtype="bfloat16", dropped=False, **fields_of_config
):
    """Return the choice for a Hopper and heads of 64, with a change of these or of the config."""
    device = Mock(jax.Device, platform=platform, compute_capability=compute_capability)
    return choose_for(device, dtype, dataclasses.replace(CONFIG, **fields_of_config), dropped)


@pytest.mark.parametrize("change", [{}, {"dtype": "float16"}, {"d_kv": 256}, {"d_kv": 8}])
def test_cudnn_is_chosen_within_its_limits(change):
    assert chosen(**change) == AttentionChoice("cudnn")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu", "compute_capability": ""}, "cpu; fused kernels need a GPU or a TPU"),
        (TPU | {"dtype": "float16"}, "float16; flash needs bfloat16 or float32"),
        (TPU | {"d_kv": 136}, "head_dim=136; flash needs at most 128"),
        (TPU | {"dropped": True}, "attention weights are dropped; flash drops none"),
        ({"compute_capability": "7.5"}, "a GPU 7.5; cuDNN needs NVIDIA's, from 8.0"),
        ({"compute_capability": "gfx942"}, "a GPU gfx942; cuDNN needs NVIDIA's, from 8.0"),
        ({"dtype": "float32"}, "float32; cuDNN needs bfloat16"),
        ({"dtype": "float64"}, "float64; cuDNN needs bfloat16"),
        ({"d_kv": 20}, "head_dim=20; cuDNN needs a multiple of 8, at most 256"),
        ({"d_kv": 264}, "head_dim=264; cuDNN needs a multiple of 8, at most 256"),
        (
            {"d_kv": 136, "compute_capability": "8.6"},
            "head_dim=136; cuDNN needs a multiple of 8, at most 128",
        ),
        (
            {"d_kv": 136, "compute_capability": "10.0"},
            "head_dim=136; cuDNN needs a multiple of 8, at most 128",
        ),
        ({"d_v": 32}, "d_v=32; fused kernels need values as wide as keys"),
        (TPU | {"d_v": 32}, "d_v=32; fused kernels need values as wide as keys"),
        ({"dropped": True}, "attention weights are dropped; cuDNN through JAX drops none"),
        ({"attention_softcap": 2.0}, "scores are capped; cuDNN caps none"),
    ],
)
def test_beyond_them_attention_is_plain_and_says_why(change, reason):
    choice = chosen(**change)
    assert choice == AttentionChoice("plain", reason)
    assert str(choice) == f"attention: plain ({reason})"


def test_on_a_tpu_long_attention_is_flash():
    choice = chosen(**TPU, dtype="float32")
    assert str(choice) == (
        "attention: flash (from length 512; shorter, with a mask of the caller's or with relative "
        "positions: plain)"
    )
    execution = Execution.for_platform("tpu", attention=choice.implementation)
    assert execution.attention_of(512, 512, by_segments=True) == "flash"
    assert execution.attention_of(511, 512, by_segments=True) == "plain"
    assert execution.attention_of(512, 512, by_segments=False) == "plain"


def test_a_model_drops_no_weights_by_fused_kernels(fused):
    config = small_config("vaswani2017", dropout=0.1, attention_dropout=0.1)
    params, tokens = random_params(config), random_tokens(config)
    cudnn, key = Execution(attention="cudnn"), jax.random.key(0)

    def trace(config, key=None):
        run = functools.partial(apply, config=config, dropout_key=key, execution=cudnn)
        jax.eval_shape(lambda params, src, tgt: run(params, src=src, tgt=tgt), params, *tokens)

    trace(config)
    assert len(fused) == config.num_encoder_layers + 2 * config.num_decoder_layers
    with pytest.raises(InputError, match="attention='cudnn' cannot drop attention weights"):
        trace(config, key)
    trace(dataclasses.replace(config, attention_dropout=0.0), key)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (("cpu", ""), Execution()),
        (("gpu", "9.0"), Execution.for_platform("gpu", attention="cudnn")),
        (("gpu", "7.5"), Execution.for_platform("gpu")),
        (("tpu", ""), Execution.for_platform("tpu", attention="flash")),
    ],
)
def test_a_device_says_how_a_model_is_executed_on_it(device, expected):
    platform, capability = device
    stand_in = Mock(jax.Device, platform=platform, compute_capability=capability)
    assert execution_on(stand_in, "bfloat16", CONFIG) == expected


def test_an_unknown_platform_is_refused():
    with pytest.raises(InputError, match="platform='metal' is unknown; choose one of cpu, gpu"):
        Execution.for_platform("metal")


@pytest.fixture
def fused(monkeypatch):
    """Let XLA compute what cuDNN is called for; return the shapes of the masks."""
    shapes, attention = [], jax.nn.dot_product_attention

    def by_xla(query, key, value, bias, mask, *, scale, is_causal, implementation):
        assert implementation == "cudnn"
        shapes.append(None if mask is None else mask.shape)
        assert bias is None or bias.shape[2] % 2 == bias.shape[3] % 2 == 0
        how = {"scale": scale, "is_causal": is_causal, "implementation": "xla"}
        return attention(query, key, value, bias, mask, **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    return shapes


def draw(queries, keys, dtype="float32", heads=HEADS, key_heads=HEADS):
    """Return queries, keys, values, and what the gradient of the output shall be."""
    random = np.random.default_rng(0)
    shapes = [(heads, queries), (key_heads, keys), (key_heads, keys), (heads, queries)]
    return [jnp.asarray(random.normal(size=(BATCH, *shape, HEAD_DIM)), dtype) for shape in shapes]


def masks(queries, keys):
    random = np.random.default_rng(1)
    padding = np.arange(keys) < np.array([keys, keys - 2, 0])[:, None, None, None]
    some = random.random((BATCH, HEADS, queries, keys)) < 0.6
    some[0, 1, 2] = False
    some[1, :, :, 3] = False
    later = np.tril(np.ones((1, 1, queries, keys), bool))
    drawn = {"padding": padding, "causal": padding & later, "some": some}
    return {"none": None} | {kind: jnp.asarray(mask) for kind, mask in drawn.items()}


def attend(implementation, inputs, mask, bias=None, divisor=HEAD_DIM**0.5, softcap=None):
    """Return an attention's output and the gradients of its inputs.

    The plain one repeats each head of keys and values for the queries that read it.
    """

    @jax.jit
    def run(query, key, value, cotangent, bias):
        def mapped(query, key, value, bias):
            inputs = query, key, value
            if implementation == "plain":
                visible = as_boolean_mask(mask, query.shape[2], key.shape[2])
                repeated = (jnp.repeat(x, query.shape[1] // len(x[0]), 1) for x in (key, value))
                return functional.dot_product_attention(
                    query, *repeated, visible, None, bias, divisor, softcap=softcap
                )
            return fused_attention(implementation, *inputs, mask, bias, divisor, softcap=softcap)

        output, transpose = jax.vjp(mapped, query, key, value, bias)
        return output, *(gradient for gradient in transpose(cotangent) if gradient is not None)

    return run(*inputs, bias)


def check_attention(implementation, inputs, mask, bias=None, **settings):
    """Check a fused attention in float32, and the plain one, by the plain one in float64.

    Returns what the fused one gives, as `attend`.
    """

    def by_name(implementation, inputs, bias):
        results = attend(implementation, inputs, mask, bias, **settings)
        return dict(zip(("output", "query", "key", "value", "bias"), results, strict=False))

    results = [by_name(one, inputs, bias) for one in (implementation, "plain")]
    with jax.enable_x64(True):
        wide = widen((inputs, bias))
        exact = by_name("plain", *wide)
        near = [by_name("plain", *numbers) for numbers in moved(wide)]
    check_errors("attention", results, (exact, exact), near, kind="block")
    return [*results[0].values()]


@pytest.mark.parametrize("dtype", tiered(["float32", "bfloat16"], ["float32"]))
@pytest.mark.parametrize("lengths", tiered([(6, 8), (7, 5)], quick=[(7, 5)]))
@pytest.mark.parametrize("kind", ["none", "padding", "causal", "some"])
@pytest.mark.parametrize("biased", [False, True])
def test_what_cudnn_is_handed_gives_what_the_plain_products_give(
    fused, biased, kind, lengths, dtype
):
    """With a relative bias, whose gradient comes back, and then scores of another scale."""
    inputs, mask = draw(*lengths, dtype), masks(*lengths)[kind]
    relative = {}
    if biased:
        drawn = np.random.default_rng(2).normal(size=(1, HEADS, *lengths))
        relative = {"bias": jnp.asarray(drawn, dtype), "divisor": 5.0}
    if dtype == "float32":
        found = check_attention("cudnn", inputs, mask, **relative)
    else:
        found, expected = (attend(one, inputs, mask, **relative) for one in ("cudnn", "plain"))
        for ours, plain in zip(found, expected, strict=True):
            assert error(*(np.float32(array) for array in (ours, plain))) < 2e-2
    assert [array.dtype for array in found] == [dtype] * (4 + biased)
    (shape,) = fused
    if mask is not None:  # as cuDNN's backward pass wants it
        assert shape[2:] == tuple(length + length % 2 for length in lengths)


def test_there_too_no_attention_is_0_and_what_nobody_attends_to_does_not_count(fused):
    query, key, value, cotangent = draw(6, 8)
    mask = masks(6, 8)["some"]
    nobody = ~mask.any(axis=2)[..., None]
    key, value = jnp.where(nobody, jnp.nan, key), jnp.where(nobody, jnp.inf, value)
    output, *gradients = attend("cudnn", (query, key, value, cotangent), mask)
    assert nobody.any()
    assert np.array_equal(output[0, 1, 2], np.zeros(HEAD_DIM))
    for array in (output, *gradients):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("length", [6, 7])
def test_cudnn_is_told_that_attention_is_causal(fused, length, padded):
    """It then reads a mask of padding alone, or none."""
    keys = masks(length, length)["padding"][:, 0, 0] if padded else None
    check_attention("cudnn", draw(length, length), SegmentMask(keys, causal=True))
    even = length + length % 2
    assert fused == [(BATCH, 1, even, even) if padded else None]


@pytest.mark.parametrize(
    "mask",
    [
        SegmentMask(None, causal=True, window=(2, 0)),
        SegmentMask(None, window=(2, 1)),
        SegmentMask(masks(7, 7)["padding"][:, 0, 0], causal=True, window=(2, 0)),
        masks(7, 7)["some"].at[0, 0, :, 2].set(False).repeat(2, axis=1),
    ],
)
def test_cudnn_is_handed_windows_and_grouped_queries(fused, mask):
    """A mask of each head of queries as well, where the queries of a group attend to other keys."""
    query, key, value, cotangent = draw(7, 7, heads=2 * HEADS)
    if not isinstance(mask, SegmentMask):
        nobody = ~mask.reshape(BATCH, HEADS, -1, 7).any(axis=2)[..., None]
        assert nobody.any()
        key, value = jnp.where(nobody, jnp.nan, key), jnp.where(nobody, jnp.inf, value)
    check_attention("cudnn", (query, key, value, cotangent), mask)
    assert fused[0][2:] == (8, 8)


@pytest.mark.parametrize("lengths", [(12, 10), (13, 11)])
def test_a_model_lowers_to_cudnns_kernels(monkeypatch, lengths):
    config = small_config("vaswani2017", d_model=48, num_encoder_layers=2, num_decoder_layers=1)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), random_params(config))
    src, tgt = (jnp.ones((4, length), jnp.int32) for length in lengths)
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91000)  # the installed one's, where there is one

    cudnn = Execution.for_platform("gpu", attention="cudnn")

    def loss(params):
        return apply(params, config, src, tgt, execution=cudnn).astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    kernels = re.findall(r"custom_call @__cudnn\$(\w+)", program)
    attentions = 2 + 2 * 1  # an encoder layer has one, a decoder layer two
    assert (
        sorted(kernels)
        == ["fmhaScaleBiasSoftmax"] * attentions + ["fmhaScaleBiasSoftmaxBackward"] * attentions
    )
    # The decoder's own attention, forward and backward; the others have no order.
    kinds = re.findall(r"mask_type\\22: \\22(\w+)\\22", program)
    assert sorted(kinds) == ["CAUSAL"] * 2 + ["NO_MASK"] * 2 * (attentions - 1)
