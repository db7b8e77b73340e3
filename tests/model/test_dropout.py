"""Dropout: where it acts and at which rate, and what it leaves."""

import copy
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import TransformerConfig, apply, convert
from jax_transformer.kernels.dropout import dropout
from jax_transformer.model.layers import Dropout
from tests.compilation import AS_USERS_DO
from tests.models import BATCH, random_params, random_tokens, shallow_config
from tests.parity.ladder import bound, error
from tests.tiers import tiered

# Six patterns of sites; the other presets repeat one of them.
PATTERNS = ("vaswani2017", "torch_nn", "shared_heads", "bias_free_qkv", "pre_norm", "t5")
PRESETS = tiered(TransformerConfig.presets(), PATTERNS)
SMALL_SET = ("shared_heads", "t5")  # post-norm with the other decoder, pre-norm
COMPILED = tiered(PATTERNS, SMALL_SET)

# Every place of a model of one layer a side where a described implementation drops.
SOURCE, TARGET = "source_dropout", "target_dropout"
ATTENTION_WEIGHTS = (
    "encoder/layers_0/self_attention/dropout",
    "decoder/layers_0/self_attention/dropout",
    "decoder/layers_0/cross_attention/dropout",
)
ACTIVATIONS = (
    "encoder/layers_0/feed_forward/dropout",
    "decoder/layers_0/feed_forward/dropout",
)
RESIDUALS = (
    "encoder/layers_0/self_attention_residual/dropout",
    "encoder/layers_0/feed_forward_residual/dropout",
    "decoder/layers_0/self_attention_residual/dropout",
    "decoder/layers_0/cross_attention_residual/dropout",
    "decoder/layers_0/feed_forward_residual/dropout",
)
FINAL = ("encoder/dropout", "decoder/dropout")  # after the final norm
SITES = (SOURCE, TARGET, *ATTENTION_WEIGHTS, *ACTIVATIONS, *RESIDUALS, *FINAL)
USUAL = (SOURCE, TARGET, *ATTENTION_WEIGHTS, *ACTIVATIONS, *RESIDUALS)

NO_INNER = {SOURCE, TARGET, *RESIDUALS}
# The rate and the sites of each described implementation.
DESCRIBED = {
    **dict.fromkeys(("vaswani2017", "marian", "marian_npz", "mbart"), (0.1, NO_INNER)),
    **dict.fromkeys(("blenderbot", "modern"), (0.1, NO_INNER)),
    "torch_nn": (0.1, {*ATTENTION_WEIGHTS, *ACTIVATIONS, *RESIDUALS}),
    "shared_heads": (0.2, {TARGET, *RESIDUALS}),
    "bias_free_qkv": (0.1, {*ACTIVATIONS, *RESIDUALS}),
    **dict.fromkeys(("pre_norm", "pre_norm_memory_norm", "pre_norm_log_softmax"), (0.1, {*USUAL})),
    **dict.fromkeys(("pegasus", "bart"), (0.1, {*USUAL})),
    "m2m100": (0.1, {SOURCE, TARGET, *ATTENTION_WEIGHTS, *RESIDUALS}),
    **dict.fromkeys(("t5", "t5_v1_1", "mt5", "umt5"), (0.1, {*SITES})),
    **dict.fromkeys(("t5gemma", "t5gemma2", "whisper"), (0.0, set())),
}


def make_config(preset, *, dropout, attention_dropout=None, activation_dropout=None):
    """Return a small model; the rates given here also hold where the preset has 0."""
    return shallow_config(
        preset,
        dropout=dropout,
        attention_dropout=attention_dropout,
        activation_dropout=activation_dropout,
    )


def possible_sites(preset):
    """Return the sites that drop where no rate is 0.

    The preset still says which embeddings and whether final norms do.
    """
    _, described = DESCRIBED[preset]
    chosen = (SOURCE, TARGET, *FINAL)
    return [site for site in SITES if site in described or site not in chosen]


@functools.cache
def inputs(config):
    """Return float64 parameters and tokens."""
    return random_params(config, dtype=np.float64), *random_tokens(config, dtype=np.float64)


def call(config, key, change):
    """Run a model under dropout, `change(dropout, drop, x)` standing for each call `drop(x)`."""
    params, *tokens = inputs(config)

    def interceptor(method, args, kwargs, context):
        if type(context.module) is Dropout and context.method_name == "__call__":
            return change(context.module, method, *args)
        return method(*args, **kwargs)

    with nn.intercept_methods(interceptor):
        return apply(params, config, *tokens, dropout_key=key)


def site_of(module):
    return "/".join(module.path)


@pytest.mark.parametrize("preset", PRESETS)
def test_sites_and_rates_of_a_preset_are_those_described(preset):
    own = TransformerConfig.preset(preset)
    rates = own.dropout, own.attention_dropout, own.activation_dropout
    names = "dropout", "attention_dropout", "activation_dropout"
    found = {}

    def note(dropout, drop, x):
        assert site_of(dropout) not in found
        found[site_of(dropout)] = dropout.rate
        return x

    config = make_config(preset, **dict(zip(names, rates, strict=True)))
    jax.eval_shape(lambda key: call(config, key, note), jax.random.key(0))
    rate, sites = DESCRIBED[preset]
    assert {site: found[site] for site in found if found[site] > 0} == dict.fromkeys(sites, rate)


@functools.partial(jax.jit, static_argnums=0)
def masks(config, key):
    """Return, by site, what its dropout makes of ones: 0 where it drops, else the factor."""
    seen = {}

    def note(dropout, drop, x):
        assert site_of(dropout) not in seen
        seen[site_of(dropout)] = drop(jnp.ones_like(x))
        return x

    call(config, key, note)
    return seen


def expected_rates(preset):
    rates = dict.fromkeys(SITES, 0.0) | dict.fromkeys(possible_sites(preset), 0.1)
    rates |= dict.fromkeys(ATTENTION_WEIGHTS, 0.2) | dict.fromkeys(ACTIVATIONS, 0.3)
    config = make_config(preset, dropout=0.1, attention_dropout=0.2, activation_dropout=0.3)
    return config, rates


def expected_shape(config, site):
    _, src, tgt = inputs(config)
    source, target = (BATCH, src.shape[1]), (BATCH, tgt.shape[1])
    queries = source if site == SOURCE or site.startswith("encoder") else target
    if site in ATTENTION_WEIGHTS:
        # One decoder's self-attention runs over the memory, which is as long as the target there.
        keys = target if site.startswith("decoder/layers_0/self") else source
        return BATCH, config.num_heads, queries[1], keys[1]
    return *queries, config.d_ff if site in ACTIVATIONS else config.d_model


@pytest.mark.parametrize("preset", COMPILED)
@pytest.mark.usefixtures("x64")
def test_each_site_drops_at_its_own_rate_and_scales_what_it_keeps(preset):
    config, rates = expected_rates(preset)
    drawn = masks(config, jax.random.key(1))
    assert drawn.keys() == rates.keys()
    for site, rate in rates.items():
        mask = np.asarray(drawn[site])
        assert mask.shape == expected_shape(config, site), site
        if rate == 0:
            assert (mask == 1).all(), site
            continue
        kept = mask > 0
        np.testing.assert_allclose(mask[kept], 1 / (1 - rate), rtol=1e-15, err_msg=site)
        deviation = (rate * (1 - rate) / mask.size) ** 0.5
        assert abs(kept.mean() - (1 - rate)) < 5 * deviation, site
        for axis in range(mask.ndim):  # no row, head or position has the mask of another
            first, second = np.take(kept, 0, axis), np.take(kept, 1, axis)
            assert not np.array_equal(first, second), (site, axis)


@pytest.mark.parametrize("preset", COMPILED)
@pytest.mark.usefixtures("x64")
def test_masks_follow_the_key_and_no_two_sites_share_one(preset):
    config, rates = expected_rates(preset)
    one, same, other = (masks(config, jax.random.key(seed)) for seed in (1, 1, 2))
    kept = {}
    for site in possible_sites(preset):
        assert np.array_equal(one[site], same[site]), site
        kept[site] = np.asarray(one[site]).ravel() > 0
        kept[site, "other key"] = np.asarray(other[site]).ravel() > 0
        rates[site, "other key"] = rates[site]
    for (first, a), (second, b) in itertools.combinations(kept.items(), 2):
        # Equal keys give arrays of any shapes equal uniform numbers, in order.
        size = min(a.size, b.size)
        agreement = np.mean(a[:size] == b[:size])
        p, q = rates[first], rates[second]
        independent = p * q + (1 - p) * (1 - q)
        deviation = (independent * (1 - independent) / size) ** 0.5
        assert abs(agreement - independent) < 5 * deviation, (first, second)


def certain_config(preset):
    return make_config(preset, dropout=1.0, attention_dropout=1.0, activation_dropout=1.0)


@functools.partial(jax.jit, static_argnums=0)
def run(config, params, src, tgt, dropped, blank):
    """Return the logits where chosen sites drop everything.

    Args:
        config: Has rate 1 everywhere.
        params: Parameters.
        src: Source tokens.
        tgt: Target tokens.
        dropped: By site, whether it drops; where not, it is left out.
        blank: By stack, "encoder" and "decoder", whether zeros are fed into it.
    """

    def interceptor(method, args, kwargs, context):
        path = site_of(context.module) if context.method_name == "__call__" else None
        if path in dropped:
            (x,) = args
            return jnp.where(dropped[path], method(x), x)
        if path in blank:
            x, *others = args
            return method(jnp.where(blank[path], 0, x), *others, **kwargs)
        return method(*args, **kwargs)

    with nn.intercept_methods(interceptor):
        return apply(params, config, src, tgt, dropout_key=jax.random.key(0))


def run_with(preset, *, dropped=None, blank=None, zero=None):
    """Run a preset with one site dropped, one stack fed with zeros, or some parameters zero."""
    config = certain_config(preset)
    params, *tokens = inputs(config)

    def clear(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return np.zeros_like(leaf) if zero and name.startswith(zero) else leaf

    changed = jax.tree_util.tree_map_with_path(clear, params)
    assert not zero or not jax.tree.all(jax.tree.map(np.array_equal, changed, params))
    switches = {site: site == dropped for site in SITES}
    stacks = {stack: stack == blank for stack in ("encoder", "decoder")}
    return np.asarray(run(config, changed, *tokens, switches, stacks))


def by_hand(preset, site):
    """Return the logits that rate 1 at one site should give, found without dropout."""
    if site in (SOURCE, TARGET):
        return run_with(preset, blank="encoder" if site == SOURCE else "decoder")
    block = site.removesuffix("/dropout")
    if site in FINAL:
        return run_with(preset, zero=f"{block}/norm/")
    if site in ATTENTION_WEIGHTS:  # nothing is gathered; the output bias stays
        return run_with(preset, zero=f"{block}/output/kernel")
    if site in ACTIVATIONS:
        return run_with(preset, zero=f"{block}/outer/kernel")
    if certain_config(preset).dropout_placement == "norm":
        return run_with(preset, zero=f"{block}/norm/")
    last = "outer" if "feed_forward" in site else "output"
    return run_with(preset, zero=f"{block.removesuffix('_residual')}/{last}/")


@functools.cache
def torch_module(preset):
    config = certain_config(preset)
    module = torch_reference.Transformer(config).double().train()
    module.load_state_dict(convert.to_torch(inputs(config)[0], config), strict=True)
    return module


def torch_name(site):
    return site.replace("layers_0", "layers.0").replace("/", ".")


@pytest.mark.parametrize(
    ("preset", "site"),
    [
        pytest.param(preset, site, marks=() if preset in SMALL_SET else pytest.mark.exhaustive)
        for preset in PATTERNS
        for site in possible_sites(preset)
    ],
)
@pytest.mark.usefixtures("x64")
def test_rate_one_at_one_site_is_that_by_hand_and_of_the_torch_reference(preset, site):
    actual = run_with(preset, dropped=site)
    assert np.array_equal(actual, by_hand(preset, site))
    assert error(actual, run_with(preset)) > 1e-3  # each site changes the output
    module = torch_module(preset)
    for child in module.modules():
        if isinstance(child, torch.nn.Dropout):
            child.p = 0.0
    module.get_submodule(torch_name(site)).p = 1.0
    expected = module(*map(torch.from_numpy, inputs(certain_config(preset))[1:]))
    assert error(actual, expected) <= bound("logits", "float64")


@pytest.mark.parametrize("preset", COMPILED)
@pytest.mark.usefixtures("x64")
def test_equal_masks_at_all_sites_give_what_the_torch_reference_gives(preset):
    # Some places differ at rates between 0 and 1 alone: before and after an activation, for one.
    config, _ = expected_rates(preset)
    drawn = masks(config, jax.random.key(1))

    @jax.jit
    def run(drawn):
        return call(config, jax.random.key(0), lambda dropout, _, x: x * drawn[site_of(dropout)])

    def multiply(module, args, output, site):
        return args[0] * torch.tensor(np.asarray(drawn[site]))

    module = copy.deepcopy(torch_module(preset))
    for site in drawn:
        dropout = module.get_submodule(torch_name(site))
        dropout.register_forward_hook(functools.partial(multiply, site=site))
    expected = module(*map(torch.from_numpy, inputs(config)[1:]))
    assert error(run(drawn), expected) <= bound("logits", "float64")


@pytest.mark.parametrize("preset", COMPILED)
@pytest.mark.usefixtures("x64")
def test_rate_zero_with_a_key_and_any_rate_without_one_are_the_forward(preset):
    forward = jax.jit(apply, static_argnums=1)
    certain = certain_config(preset)
    never = make_config(preset, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    params, src, tgt = inputs(certain)
    expected = forward(params, certain, src, tgt)
    with_key = forward(params, never, src, tgt, dropout_key=jax.random.key(0))
    assert np.array_equal(with_key, expected)
    assert error(run_with(preset), expected) <= 1e-14  # what the sites are compared with


@pytest.mark.parametrize("implementation", tiered(["threefry2x32", "rbg", "untyped"], ["rbg"]))
def test_each_call_of_each_place_has_a_mask_of_its_own(implementation):
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> list[jax.Array]:
            one, other = Dropout(0.5), Dropout(0.5)
            return [one(x), one(x), other(x)]

    def masks(key: jax.Array) -> list[np.ndarray]:
        return [np.asarray(y) for y in Twice().apply({}, jnp.ones((8, 64)), rngs={"dropout": key})]

    if implementation == "untyped":
        key, other_key = jax.random.PRNGKey(1), jax.random.PRNGKey(2)
    else:
        key, other_key = jax.random.split(jax.random.key(1, impl=implementation))
    drawn = masks(key)
    np.testing.assert_array_equal(drawn, masks(key))
    for a, b in itertools.combinations(drawn + masks(other_key), 2):
        assert 0.4 < np.mean(a == b) < 0.6  # as of independent masks


@pytest.mark.parametrize("mask", ["packed", "generated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_kept_elements_and_their_gradients_are_scaled_by_the_share_kept(rate, dtype, mask):
    x = jax.random.normal(jax.random.key(1), (300, 700), dtype)

    def drop(seed):
        return jax.vjp(lambda x: dropout(x, rate, jax.random.key(seed), mask), x)

    (y, pull), (same, _), (other, _) = map(drop, (2, 2, 3))
    (slope,) = pull(jnp.ones_like(x))
    kept = np.asarray(slope != 0)
    np.testing.assert_array_equal(y, same)
    assert abs((kept & np.asarray(other != 0)).mean() - (1 - rate) ** 2) < 0.01
    assert y.dtype == slope.dtype == x.dtype
    assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / x.size) ** 0.5
    scale = 1 / (1 - rate)
    tolerance = 2 * jnp.finfo(dtype).eps
    for actual, expected in ((y, x.astype("float32") * scale), (slope, np.float32(scale))):
        wanted = np.where(kept, expected, 0)
        np.testing.assert_allclose(np.asarray(actual, np.float32), wanted, rtol=tolerance)


@pytest.mark.parametrize("length", [700, 701])
def test_elements_that_share_a_random_word_are_dropped_independently(length):
    rate = 0.3
    kept = np.asarray(dropout(jnp.ones((300, length)), rate, jax.random.key(2))) > 0
    first, second = kept[:, : length - 1 : 2], kept[:, 1::2]
    assert not kept[:, -1].all()  # the last one of an odd row, alone in its word
    assert kept[:, -1].any()
    expected = (1 - rate) ** 2
    deviation = (expected * (1 - expected) / first.size) ** 0.5
    assert abs((first & second).mean() - expected) < 5 * deviation


@pytest.mark.parametrize(
    "shape",
    tiered([(1000,), (1, 1000), (20, 50), (3, 7, 50), (2, 2, 9, 30)], [(1000,), (2, 2, 9, 30)]),
)
def test_rows_of_any_number_and_order_are_dropped_by_their_own_bits(shape):
    key = jax.random.key(3)
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), "uint32")
    halves = np.asarray(words).view(np.uint16).reshape(shape)
    kept = dropout(jnp.ones(shape), 0.5, key) > 0
    np.testing.assert_array_equal(kept, halves < 2**15)


@pytest.mark.exhaustive
def test_the_backward_pass_keeps_a_bit_an_element():
    layers, rows, width = 8, 256, 512

    def temporary_bytes(rate):
        def loss(kernel, x):
            for key in jax.random.split(jax.random.key(0), layers):
                x = x + dropout(x @ kernel, rate, key)
            return jnp.sum(x)

        lowered = jax.jit(jax.grad(loss)).lower(jnp.ones((width, width)), jnp.ones((rows, width)))
        compiled = lowered.compile(compiler_options=AS_USERS_DO)
        return compiled.memory_analysis().temp_size_in_bytes

    one_layer = rows * width * 4  # what a layer's dropout works with comes and goes
    bits = layers * rows * width / 8
    assert temporary_bytes(0.1) - temporary_bytes(0.0) < one_layer + 1.1 * bits


def test_rates_zero_and_one_are_the_identity_and_nothing():
    x = jnp.array([[1.0, np.inf, np.nan, -0.0]])
    nothing = dropout(x, 1.0, jax.random.key(0))
    assert np.array_equal(nothing, np.zeros_like(x))
    assert dropout(x, 0.0, jax.random.key(0)).tobytes() == x.tobytes()


@pytest.mark.parametrize("mask", ["packed", "generated"])
def test_half_precision_does_not_round_the_scale(mask):
    x = jnp.full((400, 100), 1.0, jnp.bfloat16)
    y = np.float64(dropout(x, 0.1, jax.random.key(0), mask))
    assert set(np.unique(y)) == {0.0, np.float64(jnp.bfloat16(1 / 0.9))}
    twice = np.float64(dropout(x * 1.0078125, 0.1, jax.random.key(0), mask))
    assert twice.max() == np.float64(jnp.bfloat16(1.0078125 / 0.9))
