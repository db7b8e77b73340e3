"""Each block alone, in both frameworks, with the same weights and inputs."""

import functools
import operator

import jax
import numpy as np
import pytest
import torch

import torch_reference.functional
import torch_reference.masks
from jax_transformer.kernels.segments import as_boolean_mask, causal_mask
from jax_transformer.model import functional, layers, masks
from jax_transformer.model import transformer as model
from jax_transformer.model.norms import norm
from tests.compilation import AS_USERS_DO
from tests.models import BATCH, SOURCE_LENGTH, TARGET_LENGTH, small_config
from tests.parity.ladder import bound, error
from tests.tiers import tiered

MASK_KINDS = ("none", "padding", "causal", "causal and padding", "per head", "empty row")


def vectors(pair, *shape, seed=1):
    random = np.random.default_rng(seed)
    return random.normal(size=shape).astype(jax.tree.leaves(pair.params)[0].dtype)


def encoder_config(pair):
    return pair.config.stack("encoder")


def make_mask(kind, queries, keys, num_heads):
    random = np.random.default_rng(2)
    padding = np.arange(keys) < random.integers(1, keys + 1, (BATCH, 1, 1, 1))
    causal = np.tril(np.ones((1, 1, queries, keys), bool))
    if kind == "none":
        return None
    if kind == "padding":
        return padding
    if kind == "causal":
        return causal
    if kind == "causal and padding":
        return causal & padding
    mask = random.random((BATCH, num_heads, queries, keys)) < 0.6
    mask[..., 0] = True
    if kind == "empty row":
        mask[1, 2, 3] = False  # one query of one head attends to nothing
        mask[3] = False  # nor does anything in this sentence
    return mask


def to_torch(array):
    return None if array is None else torch.from_numpy(np.array(array))


def apply_layer(layer, params, *inputs, method=None):
    return layer.apply({"params": params}, *inputs, method=method)


STATIC = ("layer", "method")
run = jax.jit(apply_layer, static_argnames=STATIC, compiler_options=AS_USERS_DO)
# A stack compiles long. As users do, the whole model is compiled: test_logits_as_users_compile.
run_stack = jax.jit(apply_layer, static_argnames=STATIC)
run_bias = jax.jit(apply_layer, static_argnums=(0, 2, 3), compiler_options=AS_USERS_DO)


@functools.partial(jax.jit, static_argnums=(0, 3), compiler_options=AS_USERS_DO)
def run_positions(module, params, x, side):
    return module.apply({"params": params}, x, side, method="add_positions")


@functools.partial(jax.jit, static_argnames="module")
def run_convolutions(module, params, src):
    return module.apply({"params": params}, src, "source", method="embed")


def test_convolutions_of_sound(pair, ladder):
    if pair.config.source_features is None:
        assert "source_convolution_1" not in pair.params
        return
    ladder.check(
        pair,
        "embedding",
        lambda params, src: run_convolutions(model.Transformer(pair.config), params, src),
        lambda module, src: module.embed(src, "source"),
        pair.src,
    )


def test_embedding(pair, ladder):
    if not pair.config.reads_ids:
        assert "source_embedding" not in pair.params
        assert "token_embedding" not in pair.params
        return
    name = "token_embedding" if "token_embedding" in pair.params else "source_embedding"
    layer = layers.Embedding(encoder_config(pair))
    ladder.check(
        pair,
        "embedding",
        lambda params, src: run(layer, params[name], src),
        lambda module, src: getattr(module, name)(src),
        pair.src,
    )


@pytest.mark.parametrize("rounding", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_halves", "sinusoidal_tensor2tensor"])
def test_rounded_sinusoids_have_the_same_bits(kind, rounding):
    ours = functional.sinusoidal_positions(29, 42, kind, 0, rounding)
    theirs = torch_reference.functional.sinusoidal_positions(29, 42, kind, 0, rounding)
    np.testing.assert_array_equal(ours, theirs.numpy())
    exact = functional.sinusoidal_positions(29, 42, kind)
    half = {"float16": 2.0**-12, "bfloat16": 2.0**-9}[rounding]  # of the numbers from 0.5 to 1
    assert half / 2 < np.abs(ours - exact).max() <= half + 1e-7


def test_positions(pair, ladder):
    config = pair.config
    transformer = model.Transformer(config)
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        x = vectors(pair, BATCH, SOURCE_LENGTH, config.stack(stack).d_model)
        if not config.has_position_table:
            assert np.array_equal(run_positions(transformer, pair.params, x, side), x)
            continue
        ladder.check(
            pair,
            "positions",
            lambda params, x, side=side: run_positions(transformer, params, x, side),
            lambda module, x, side=side: module.add_positions(x, side),
            x,
        )


def test_embedding_norm(pair, ladder):
    if not pair.config.embedding_norm:
        assert not any("embedding_norm" in name for name in pair.params)
        return
    x = vectors(pair, BATCH, SOURCE_LENGTH, pair.config.d_model)
    for side in ("source", "target"):
        name = f"{side}_embedding_norm"
        check_norm(pair, ladder, operator.itemgetter(name), operator.attrgetter(name), x)


def check_norm(pair, ladder, of_params, of_module, x):
    ladder.check(
        pair,
        "norm",
        lambda params, x: run(layers.Norm(encoder_config(pair)), of_params(params), x),
        lambda module, x: of_module(module)(x),
        x,
    )


def test_relative_attention_bias(pair, ladder):
    config = pair.config
    if config.positions != "relative":
        assert "relative_attention_bias" not in jax.tree_util.keystr(tuple(pair.params))
        return
    for stack, bidirectional in (("encoder", True), ("decoder", False)):
        bias = layers.RelativeAttentionBias(config, bidirectional)

        def ours(params, lengths, bias=bias, stack=stack):
            params = params[stack]
            params = params["layers_1"] if config.has_relative_bias_per_layer else params
            return run_bias(bias, params["relative_attention_bias"], *lengths)

        def theirs(module, lengths, stack=stack):
            module = getattr(module, stack)
            module = module.layers[1] if config.has_relative_bias_per_layer else module
            return module.relative_attention_bias(*lengths)

        for lengths in ((SOURCE_LENGTH, SOURCE_LENGTH), (TARGET_LENGTH, SOURCE_LENGTH), (1, 40)):
            ladder.check(
                pair,
                "relative bias",
                functools.partial(ours, lengths=lengths),
                functools.partial(theirs, lengths=lengths),
            )


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 128), (10, 9), (7, 50), (4, 3)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_distances(buckets, distance, bidirectional):
    distances = np.arange(-1000, 1001)
    settings = buckets, distance, bidirectional
    actual = functional.relative_position_buckets(distances, *settings)
    expected = torch_reference.functional.relative_position_buckets(to_torch(distances), *settings)
    assert np.array_equal(actual, expected)
    half = buckets // 2
    # Of the upper half of an encoder's buckets, the first is that of a later key at distance 0.
    found = set(range(2 * half)) - {half} if bidirectional else set(range(buckets))
    assert set(actual) == found


@pytest.mark.parametrize(("columns", "theta", "scaling"), [(10, 10_000.0, 1.0), (4, 7.0, 8.0)])
def test_heads_are_rotated_as_complex_numbers(columns, theta, scaling, x64):
    """A column of the first half and its partner in the second are one complex number."""
    x = np.random.default_rng(0).normal(size=(2, 3, 500, 12))
    half = columns // 2
    turns = theta ** (-np.arange(half) * 2 / columns) * np.arange(500)[:, None] / scaling
    turned = (x[..., :half] + 1j * x[..., half:columns]) * np.exp(1j * turns)
    expected = np.concatenate([turned.real, turned.imag, x[..., columns:]], axis=-1)
    angles = functional.rotary_angles(500, columns, theta, scaling)
    rotation = jax.numpy.cos(angles), jax.numpy.sin(angles)
    assert error(functional.rotate(jax.numpy.asarray(x), rotation), expected) <= 1e-14
    angles = torch_reference.functional.rotary_angles(500, columns, theta, scaling)
    theirs = torch_reference.functional.rotate(to_torch(x), (angles.cos(), angles.sin()))
    assert error(theirs, expected) <= 1e-14


def test_masks(pair):
    if pair.config.token_embeddings == "none":
        actual = causal_mask(TARGET_LENGTH)
        assert np.array_equal(actual, torch_reference.masks.causal_mask(TARGET_LENGTH))
        return
    for name, ids in (("source_mask", pair.src), ("target_mask", pair.tgt)):
        mask = getattr(masks, name)(ids, pair.config)
        actual = as_boolean_mask(mask, ids.shape[1], ids.shape[1])
        expected = getattr(torch_reference.masks, name)(torch.from_numpy(ids), pair.config)
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("kind", tiered(MASK_KINDS, ["none", "empty row"]))
def test_attention(pair, ladder, kind):
    config = pair.config
    mask = make_mask(kind, TARGET_LENGTH, SOURCE_LENGTH, config.num_heads)
    query = vectors(pair, BATCH, TARGET_LENGTH, config.d_model, seed=3)
    width = encoder_config(pair).d_model
    key = vectors(pair, BATCH, SOURCE_LENGTH, width, seed=4)
    value = vectors(pair, BATCH, SOURCE_LENGTH, width, seed=5)
    name = "self_attention" if config.decoder_attention == "merged" else "cross_attention"

    def ours(params, *inputs):
        params = params["decoder"]["layers_1"][name]
        return run(layers.MultiHeadAttention(config), params, *inputs)

    def theirs(module, *inputs):
        return getattr(module.decoder.layers[1], name)(*inputs)

    ladder.check(pair, "attention", ours, theirs, query, key, value, mask)
    if kind == "empty row":
        params = pair.params["decoder"]["layers_1"][name]
        nothing = params["output"]["bias"] if config.attention_output_bias else 0
        actual = ours(pair.params, query, key, value, mask)
        assert np.abs(np.asarray(actual)[3] - nothing).max() < 1e-6


def test_feed_forward(pair, ladder):
    layer = layers.FeedForward(encoder_config(pair))
    ladder.check(
        pair,
        "feed-forward",
        lambda params, x: run(layer, params["encoder"]["layers_1"]["feed_forward"], x),
        lambda module, x: module.encoder.layers[1].feed_forward(x),
        vectors(pair, BATCH, SOURCE_LENGTH, encoder_config(pair).d_model),
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activation(dtype, activation):
    x = np.linspace(-6, 6, 1009).astype(dtype)
    actual = functional.activation(jax.numpy.asarray(x), activation)
    expected = torch_reference.functional.activation(to_torch(x), activation)
    assert error(actual, expected) <= bound("block", dtype)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norm(pair, ladder, scale):
    check_norm(
        pair,
        ladder,
        lambda params: params["encoder"]["layers_1"]["feed_forward_residual"]["norm"],
        lambda module: module.encoder.layers[1].feed_forward_residual.norm,
        scale * vectors(pair, BATCH, SOURCE_LENGTH, encoder_config(pair).d_model),
    )


@pytest.mark.parametrize("kind", ["layer_norm", "unbiased_layer_norm", "std_norm"])
def test_norm_far_from_zero_is_exact(x64, kind):
    # At mean 1e3 the fast variance E[x²] - E[x]² is wrong in the tenth digit of float64.
    x = 1e3 + np.random.default_rng(0).normal(size=(BATCH, 43))
    scale, epsilon = np.ones(43), 1e-5
    actual = norm(*map(jax.numpy.asarray, (x, scale)), None, epsilon, kind)
    module = torch_reference.layers.Norm(small_config("torch_nn", norm=kind, norm_bias=False), 43)
    assert error(actual, module.double()(to_torch(x))) <= 1e-12


@pytest.mark.parametrize(
    "kind",
    tiered(["layer_norm", "unbiased_layer_norm", "std_norm", "biased_std_norm"], ["std_norm"]),
)
def test_norm_of_a_constant_row_is_zero_with_finite_gradients(dtype, kind):
    x, ones = jax.numpy.full((1, 7), 3.0, dtype), jax.numpy.ones(7, dtype)
    normed, back = jax.vjp(lambda x: norm(x, ones, None, 1e-5, kind), x)
    (gradient,) = back(ones[None])
    assert not normed.any()
    assert np.isfinite(gradient).all()


def test_encoder_layer(pair, ladder):
    config = encoder_config(pair)

    def ours(params, x, mask):
        context = layers.AttentionContext(mask)
        return run(layers.EncoderLayer(config), params["encoder"]["layers_1"], x, context)

    def theirs(module, x, mask):
        return module.encoder.layers[1](x, torch_reference.layers.AttentionContext(mask))

    ladder.check(
        pair,
        "encoder layer",
        ours,
        theirs,
        vectors(pair, BATCH, SOURCE_LENGTH, config.d_model),
        make_mask("empty row", SOURCE_LENGTH, SOURCE_LENGTH, config.num_heads),
    )


def decoder_inputs(pair):
    config = pair.config
    same_length = config.decoder_attention == "self_over_memory"
    length = SOURCE_LENGTH if same_length else TARGET_LENGTH
    x = vectors(pair, BATCH, length, config.d_model, seed=3)
    memory = vectors(pair, BATCH, SOURCE_LENGTH, encoder_config(pair).d_model, seed=4)
    tgt_mask = make_mask("causal and padding", length, length, config.num_heads)
    src_mask = make_mask("empty row", length, SOURCE_LENGTH, config.num_heads)
    return x, memory, tgt_mask, src_mask


def test_decoder_layer(pair, ladder):
    layer = model.DECODER_LAYERS[pair.config.decoder_attention](pair.config)

    def ours(params, x, memory, tgt_mask, src_mask):
        context = layers.AttentionContext(tgt_mask)
        return run(layer, params["decoder"]["layers_1"], x, memory, context, src_mask)[0]

    def theirs(module, x, memory, tgt_mask, src_mask):
        context = torch_reference.layers.AttentionContext(tgt_mask)
        return module.decoder.layers[1](x, memory, context, src_mask)[0]

    ladder.check(pair, "decoder layer", ours, theirs, *decoder_inputs(pair))


@pytest.mark.exhaustive  # the quick tier compares the whole model
def test_encoder(pair, ladder):
    config = encoder_config(pair)
    ladder.check(
        pair,
        "encoder",
        lambda params, *inputs: run_stack(model.Encoder(config), params["encoder"], *inputs),
        lambda module, *inputs: module.encoder(*inputs),
        vectors(pair, BATCH, SOURCE_LENGTH, config.d_model),
        make_mask("padding", SOURCE_LENGTH, SOURCE_LENGTH, config.num_heads),
    )


@pytest.mark.exhaustive  # the quick tier compares the whole model
def test_decoder(pair, ladder):
    ladder.check(
        pair,
        "decoder",
        lambda params, *inputs: run_stack(model.Decoder(pair.config), params["decoder"], *inputs)[
            0
        ],
        lambda module, *inputs: module.decoder(*inputs)[0],
        *decoder_inputs(pair),
    )


def test_padding_may_hold_anything_in_the_torch_reference():
    """As tests/model/test_mask_properties.py finds of JAX, with other masks."""
    query, key, value = np.random.default_rng(0).normal(size=(3, BATCH, 3, TARGET_LENGTH, 7))
    mask = make_mask("padding", TARGET_LENGTH, TARGET_LENGTH, 3)
    hidden = np.broadcast_to(~mask[:, :, 0, :, None], key.shape)
    assert hidden.any()
    attend = torch_reference.functional.dot_product_attention
    clean = attend(*map(to_torch, (query, key, value, mask)))
    for garbage in (np.nan, np.inf, 1e30):
        dirty = (np.where(hidden, garbage, x) for x in (key, value))
        assert np.array_equal(clean, attend(*map(to_torch, (query, *dirty, mask))))
