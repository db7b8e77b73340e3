"""The schedule of section 5.3 against its formula; Adam, decay and clipping against torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_transformer import TransformerConfig
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.optimizer import adam, clip_by_global_norm, noam
from tests.models import random_params, small_config


@pytest.mark.parametrize("step", [1, 2, 399, 400, 401, 100_000])
def test_learning_rate_is_the_papers(step):
    expected = 0.5 * 512**-0.5 * min(step**-0.5, step * 400**-1.5)
    assert noam(512, warmup_steps=400, factor=0.5)(step - 1) == pytest.approx(expected, rel=1e-6)


def test_learning_rate_peaks_at_the_end_of_the_warm_up():
    rates = [float(noam(64, warmup_steps=5)(steps_made)) for steps_made in range(12)]
    assert np.argmax(rates) == 4
    assert min(rates) > 0


def test_updates_are_those_of_torchs_adam(x64):
    config = TransformerConfig(d_model=8, num_heads=1)
    settings = TrainingConfig(
        warmup_steps=3, learning_rate_factor=0.7, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-4
    )
    generator = np.random.default_rng(0)
    start, *gradients = generator.standard_normal((8, 5))

    theirs = torch.nn.Parameter(torch.tensor(start))
    reference = torch.optim.Adam([theirs], lr=1.0, betas=(0.8, 0.95), eps=1e-4)
    optimizer = adam(config, settings)
    params = {"kernel": jnp.asarray(start)}
    state = optimizer.init(params)
    for step, gradient in enumerate(gradients, start=1):
        rate = 0.7 * 8**-0.5 * min(step**-0.5, step * 3**-1.5)
        reference.param_groups[0]["lr"] = rate
        theirs.grad = torch.tensor(gradient)
        reference.step()
        updates, state = optimizer.update({"kernel": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["kernel"], theirs.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", [0, 1e-12, 0.999999, 1, 1.000001, 1e6, 1e18])
def test_clipping_is_torchs(norm):
    direction = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    gradient = np.float32(norm) * direction / np.linalg.norm(direction)
    theirs = [torch.nn.Parameter(torch.zeros(6)), torch.nn.Parameter(torch.zeros(9))]
    theirs[0].grad, theirs[1].grad = torch.from_numpy(gradient.copy()).split([6, 9])
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    ours = {"kernel": jnp.asarray(gradient[:6]), "bias": jnp.asarray(gradient[6:])}
    ours, _ = clip_by_global_norm(1.0).update(ours, clip_by_global_norm(1.0).init(ours))
    for one, other in zip((ours["kernel"], ours["bias"]), theirs, strict=True):
        np.testing.assert_allclose(one, other.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", TransformerConfig.presets())
def test_weight_decay_is_for_matrices(preset):
    config = small_config(preset, num_encoder_layers=1, num_decoder_layers=1)
    settings = TrainingConfig(warmup_steps=1, learning_rate_factor=42**0.5, weight_decay=0.25)
    params = random_params(config)
    optimizer = adam(config, settings)
    nothing = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(nothing, optimizer.init(params), params)  # learning rate 1
    for (path, update), leaf in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        expected = -0.25 * leaf if leaf.ndim == 2 else np.zeros_like(leaf)
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=str(path))
