"""The functional face: transformations, dropout, masks by default, and refused input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import (
    InputError,
    Transformer,
    apply,
    decode,
    encode,
    init_params,
)
from tests.models import random_params, random_tokens, shallow_config
from tests.parity.ladder import ROUNDED, error
from tests.tiers import tiered

# Ids and vectors, each kind of positions, both decoders, both placements of the norms.
PRESETS = ("marian", "shared_heads", "torch_nn", "pre_norm_memory_norm", "bart", "umt5")

run, run_encoder, run_decoder, start = (
    jax.jit(function, static_argnames="config") for function in (apply, encode, decode, init_params)
)


@pytest.fixture(params=tiered(PRESETS, ["marian", "shared_heads"]))
def model(request):
    config = shallow_config(request.param)
    return config, random_params(config), *random_tokens(config)


def test_encode_then_decode_is_apply_and_the_module_masks_as_they_do(model):
    """Without masks the module and its methods hide padding and later positions, as in torch."""
    config, *arrays = model
    params, src, tgt = jax.tree.map(jnp.asarray, arrays)
    kept = None
    if config.token_embeddings != "none":
        kept = (src != config.pad_id)[:, None, None, :]
    logits, memory = run(params, config, src, tgt), run_encoder(params, config, src, kept)
    assert error(run_decoder(params, config, tgt, memory, src_mask=kept), logits) <= ROUNDED
    module = jax.jit(Transformer(config).apply, static_argnames="method")
    assert error(module({"params": params}, src, tgt), logits) <= ROUNDED
    assert error(module({"params": params}, src, method="encode"), memory) <= ROUNDED
    expected = run_decoder(params, config, tgt, memory)
    assert error(module({"params": params}, tgt, memory, method="decode"), expected) <= ROUNDED


@pytest.mark.exhaustive
def test_vmap_over_models_is_a_loop_over_models(model):
    config, _, src, tgt = model
    ensemble = [random_params(config, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ensemble)
    together = jax.jit(jax.vmap(lambda params: apply(params, config, src, tgt)))(stacked)
    for one, params in zip(together, ensemble, strict=True):
        assert error(one, run(params, config, src, tgt)) <= ROUNDED


@pytest.mark.exhaustive
def test_gradient_is_the_slope(x64):
    config = shallow_config("vaswani2017")
    params = random_params(config, dtype=np.float64)
    direction = random_params(config, seed=1, dtype=np.float64)
    src, tgt = random_tokens(config)

    @jax.jit
    def objective(params):
        return jnp.sum(jnp.sin(apply(params, config, src, tgt)))

    def along(step):
        return objective(jax.tree.map(lambda leaf, move: leaf + step * move, params, direction))

    gradient = jax.grad(objective)(params)
    slope = sum(
        jnp.vdot(leaf, move)
        for leaf, move in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    step = 1e-5
    measured = (along(step) - along(-step)) / (2 * step)
    assert abs(slope - measured) < 1e-6 * abs(measured)


def test_config_is_static_and_each_shape_compiles_once():
    config = shallow_config("pre_norm")
    params = random_params(config)
    src, tgt = random_tokens(config)
    jitted = jax.jit(lambda *args, **kwargs: apply(*args, **kwargs), static_argnames="config")
    for _ in range(3):
        jitted(params, config=shallow_config("pre_norm"), src=src, tgt=tgt)
    assert jitted._cache_size() == 1
    jitted(params, config=config, src=src[:, :7], tgt=tgt)
    assert jitted._cache_size() == 2


def test_targets_see_no_later_target(model):
    config, params, src, tgt = model
    changed = tgt.copy()
    changed[:, 6:] = tgt[:, 5:-1]
    before, after = (run(params, config, src, target) for target in (tgt, changed))
    assert error(after[:, :6], before[:, :6]) <= ROUNDED
    if config.decoder_attention != "self_over_memory":
        assert not np.allclose(before[:, 6:], after[:, 6:], atol=1e-3)


@pytest.mark.parametrize("name", ["src", "tgt"])
def test_sequence_beyond_the_position_table_is_refused(name):
    config = shallow_config("pre_norm", max_length=11)
    params = random_params(config)
    tokens = dict(zip(("src", "tgt"), random_tokens(config), strict=True))
    tokens["src"] = tokens["src"][:, :11]
    apply(params, config, **tokens)  # exactly as long as the table
    tokens[name] = np.pad(tokens[name], ((0, 0), (0, 1)))
    with pytest.raises(InputError, match=rf"{name} is 12 tokens .* max_length=11"):
        run(params, config, **tokens)


def test_one_key_one_model():
    config = shallow_config("vaswani2017")
    one, same, other = (start(jax.random.key(seed), config) for seed in (1, 1, 2))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, same))
    kernels = [
        params["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"] for params in (one, other)
    ]
    assert not np.allclose(*kernels)
    assert type(one) is dict


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_lower_precision_stays_near_float32(model, dtype):
    config, params, src, tgt = model
    low = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    if config.token_embeddings == "none":
        exact = run(params, config, src, tgt)
        logits = run(low, config, jnp.asarray(src, dtype), jnp.asarray(tgt, dtype))
    else:
        exact, logits = (run(weights, config, src, tgt) for weights in (params, low))
    assert logits.dtype == dtype
    scale = np.abs(exact).max()
    assert np.abs(np.asarray(logits, np.float32) - exact).max() < 0.1 * scale


def test_positions_given_are_the_ones_added(model):
    config, params, src, tgt = model
    src_positions, tgt_positions = (
        np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape[:2]) for tokens in (src, tgt)
    )
    counted = run(params, config, src, tgt)
    positions = {"src_positions": src_positions, "tgt_positions": tgt_positions}
    given = run(params, config, src, tgt, **positions)
    np.testing.assert_allclose(given, counted, atol=1e-6)
    for name, counting in positions.items():
        moved = run(params, config, src, tgt, **(positions | {name: counting[:, ::-1]}))
        assert np.array_equal(moved, given) == (not config.has_position_table)
