"""How a model is executed changes neither its result nor, rematerialised, its dropout masks."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import apply
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, Execution
from jax_transformer.model import layers
from tests.models import random_params, random_tokens, small_config
from tests.parity.ladder import ROUNDED, error

CONFIG = small_config("pre_norm", num_encoder_layers=2, num_decoder_layers=1)
DROPPING = dataclasses.replace(CONFIG, dropout=0.3)
SITES = 2 + 2 * 4 + 6  # in embeddings; in attention, feed-forward network and residuals


def loss(params, config, execution, key=None):
    logits = apply(params, config, *random_tokens(config), dropout_key=key, execution=execution)
    return jnp.mean(logits**2)


def differentiate(config, execution, key=None):
    run = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    return run(random_params(config), config, execution, key)


@pytest.fixture(scope="module")
def plain():
    return differentiate(CONFIG, DEFAULT_EXECUTION)


@pytest.mark.parametrize(
    "execution",
    [
        Execution(remat="layers"),
        pytest.param(Execution(remat="dots"), marks=pytest.mark.exhaustive),
        pytest.param(Execution(scan_layers=True), marks=pytest.mark.exhaustive),
        pytest.param(Execution(remat="layers", scan_layers=True), marks=pytest.mark.exhaustive),
        pytest.param(Execution.for_platform("gpu"), marks=pytest.mark.exhaustive),
        Execution.for_platform("tpu"),
    ],
)
def test_loss_and_gradient_are_those_of_the_plain_loop(plain, execution):
    found = differentiate(CONFIG, execution)
    assert found[0] == pytest.approx(float(plain[0]), rel=1e-6)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain[1]))
    for ours, theirs in zip(*(jax.tree.leaves(one[1]) for one in (found, plain)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * largest)


def masks_drawn(monkeypatch, execution):
    """Return every mask that a gradient draws, forward and, computed anew, backward."""
    original, masks = layers.dropout, []

    def recorded(x, rate, key, mask):
        kept = original(jnp.ones_like(x), rate, key, mask) > 0
        jax.debug.callback(lambda kept: masks.append(np.asarray(kept).tobytes()), kept)
        return original(x, rate, key, mask)

    monkeypatch.setattr(layers, "dropout", recorded)
    jax.block_until_ready(differentiate(DROPPING, execution, jax.random.key(7)))
    jax.effects_barrier()
    monkeypatch.undo()
    return masks


@pytest.mark.exhaustive
def test_what_is_computed_anew_is_dropped_by_the_same_masks(monkeypatch):
    once = masks_drawn(monkeypatch, DEFAULT_EXECUTION)
    assert len(once) == len(set(once)) == SITES
    for remat in ("layers", "dots"):
        twice = masks_drawn(monkeypatch, Execution(remat=remat))
        assert set(twice) == set(once)
        assert len(twice) == 2 * SITES - 2  # all but those of the embeddings


@pytest.mark.exhaustive
def test_each_layer_of_a_scan_has_masks_of_its_own(monkeypatch):
    masks = masks_drawn(monkeypatch, Execution(scan_layers=True))
    assert len(masks) == len(set(masks)) == SITES


@pytest.mark.exhaustive
def test_a_scan_holds_one_layer():
    def products(layers, execution):
        config = small_config("pre_norm", num_encoder_layers=layers, num_decoder_layers=layers)
        shapes = jax.eval_shape(lambda: random_params(config))
        text = jax.jit(loss, static_argnums=(1, 2)).lower(shapes, config, execution).as_text()
        return text.count("dot_general")

    scan = Execution(scan_layers=True)
    assert products(1, scan) == products(3, scan)
    assert products(3, DEFAULT_EXECUTION) > 2 * products(1, DEFAULT_EXECUTION)


@pytest.mark.parametrize(("preset", "per_stack"), [("t5", True), ("umt5", False)])
@pytest.mark.exhaustive
def test_a_relative_bias_is_computed_once_a_stack_or_once_a_layer(preset, per_stack):
    config = small_config(preset)
    computed = []

    def count(call, args, kwargs, context):
        if isinstance(context.module, layers.RelativeAttentionBias):
            computed.append((*context.module.path, context.method_name))
        return call(*args, **kwargs)

    params, tokens = random_params(config), random_tokens(config)
    with nn.intercept_methods(count):
        plain = apply(params, config, *tokens)
    owners = [path[:-2] for path in computed if path[-1] == "__call__"]
    stacks = [("encoder",), ("decoder",)]
    each_layer = [("encoder", f"layers_{i}") for i in range(config.num_encoder_layers)]
    each_layer += [("decoder", f"layers_{i}") for i in range(config.num_decoder_layers)]
    assert owners == (stacks if per_stack else each_layer)

    for execution in (Execution(scan_layers=True), Execution(remat="layers")):
        found = apply(params, config, *tokens, execution=execution)
        assert error(found, plain) <= ROUNDED
