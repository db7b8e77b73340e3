"""How layers are run changes neither what they compute nor, rematerialised, what they drop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import apply, layers
from jax_transformer.layer_stack import UNROLLED, LayerLoop
from tests.models import random_params, random_tokens, small_config

CONFIG = small_config("pre_norm", num_encoder_layers=2, num_decoder_layers=1)
DROPPING = dataclasses.replace(CONFIG, dropout=0.3)
SITES = 2 + 2 * 4 + 6  # in embeddings; in attention, feed-forward network and residuals


def loss(params, config, loop, key=None):
    logits = apply(params, config, *random_tokens(config), dropout_key=key, loop=loop)
    return jnp.mean(logits**2)


def differentiate(config, loop, key=None):
    run = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    return run(random_params(config), config, loop, key)


@pytest.fixture(scope="module")
def plain():
    return differentiate(CONFIG, UNROLLED)


@pytest.mark.parametrize(
    "loop",
    [
        LayerLoop("layers"),
        LayerLoop("dots"),
        LayerLoop("none", scan=True),
        LayerLoop("layers", scan=True),
    ],
)
def test_loss_and_gradient_are_those_of_the_plain_loop(plain, loop):
    found = differentiate(CONFIG, loop)
    assert found[0] == pytest.approx(float(plain[0]), rel=1e-6)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(plain[1]))
    for ours, theirs in zip(*(jax.tree.leaves(one[1]) for one in (found, plain)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * largest)


def masks_drawn(monkeypatch, loop):
    """Return every mask that a gradient draws, forward and, computed anew, backward."""
    original, masks = layers.dropout, []

    def recorded(x, rate, key):
        kept = original(jnp.ones_like(x), rate, key) > 0
        jax.debug.callback(lambda kept: masks.append(np.asarray(kept).tobytes()), kept)
        return original(x, rate, key)

    monkeypatch.setattr(layers, "dropout", recorded)
    jax.block_until_ready(differentiate(DROPPING, loop, jax.random.key(7)))
    jax.effects_barrier()
    monkeypatch.undo()
    return masks


def test_what_is_computed_anew_is_dropped_by_the_same_masks(monkeypatch):
    once = masks_drawn(monkeypatch, UNROLLED)
    assert len(once) == len(set(once)) == SITES
    for remat in ("layers", "dots"):
        twice = masks_drawn(monkeypatch, LayerLoop(remat))
        assert set(twice) == set(once)
        assert len(twice) == 2 * SITES - 2  # all but those of the embeddings


def test_each_layer_of_a_scan_has_masks_of_its_own(monkeypatch):
    masks = masks_drawn(monkeypatch, LayerLoop(scan=True))
    assert len(masks) == len(set(masks)) == SITES


def test_a_scan_holds_one_layer():
    def products(layers, loop):
        config = small_config("pre_norm", num_encoder_layers=layers, num_decoder_layers=layers)
        shapes = jax.eval_shape(lambda: random_params(config))
        text = jax.jit(loss, static_argnums=(1, 2)).lower(shapes, config, loop).as_text()
        return text.count("dot_general")

    scan = LayerLoop(scan=True)
    assert products(1, scan) == products(3, scan)
    assert products(3, UNROLLED) > 2 * products(1, UNROLLED)
