"""Cross-entropy against torch's, and what must not count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_transformer import TransformerConfig, make_train_step
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import cross_entropy
from tests.models import unchecked

PAD = 3


def example(seed=0, dtype=np.float64):
    generator = np.random.default_rng(seed)
    logits = 5 * generator.standard_normal((3, 7, 11)).astype(dtype)
    targets = generator.integers(0, 11, (3, 7)).astype(np.int32)
    targets[1, 4:] = PAD
    return logits, targets


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
def test_sum_count_and_gradient_are_torchs(x64, label_smoothing):
    logits, targets = example()
    theirs = torch.tensor(logits, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        theirs.flatten(0, 1),
        torch.tensor(targets, dtype=torch.int64).flatten(),
        label_smoothing=label_smoothing,
        ignore_index=PAD,
        reduction="sum",
    )
    expected.backward()

    differentiate = jax.value_and_grad(cross_entropy, has_aux=True)
    (total, count), gradient = differentiate(jnp.asarray(logits), targets, PAD, label_smoothing)
    assert total.dtype == jnp.float64
    assert abs(total - expected.item()) < 1e-12 * expected.item()
    assert count == (targets != PAD).sum()
    np.testing.assert_allclose(gradient, theirs.grad, atol=1e-12)


@pytest.mark.exhaustive
def test_derivatives_are_those_of_the_formula_forward_and_of_second_order(x64):
    logits, targets = example()
    tangent = np.random.default_rng(1).standard_normal(logits.shape)

    def loss(logits):
        return cross_entropy(logits, targets, PAD, 0.1)[0]

    def formula(logits):
        gold = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - 0.9 * gold - 0.1 * jnp.mean(logits, axis=-1)
        return jnp.sum(losses, where=targets != PAD)

    for ours, theirs in ((loss, formula), (jax.grad(loss), jax.grad(formula))):
        expected = jax.jvp(theirs, (logits,), (tangent,))
        for one, other in zip(jax.jvp(ours, (logits,), (tangent,)), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_low_precision_logits_are_summed_in_float32_and_their_gradient_is_rounded_once():
    logits, targets = example(dtype=np.float32)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    differentiate = jax.value_and_grad(lambda logits: cross_entropy(logits, targets, PAD, 0.1)[0])
    (total, gradient), (wide_total, wide) = map(differentiate, (rounded, np.float32(rounded)))
    assert total.dtype == jnp.float32
    assert total == wide_total
    np.testing.assert_array_equal(gradient, wide.astype(jnp.bfloat16))


def test_padding_is_left_out_whatever_its_logits_are():
    logits, targets = example(dtype=np.float32)
    differentiate = jax.value_and_grad(cross_entropy, has_aux=True)
    (total, count), gradient = differentiate(logits, targets, PAD, 0.1)
    assert not gradient[targets == PAD].any()
    assert gradient[targets != PAD].all()
    logits[targets == PAD] = np.nan
    assert cross_entropy(logits, targets, PAD, 0.1) == (total, count)
    assert cross_entropy(logits, np.full_like(targets, PAD), PAD, 0.1) == (0, 0)


@pytest.mark.parametrize("number", [np.float32(0.1), np.float64(0.1), np.float16(0.1), 0, 0.1])
def test_label_smoothing_takes_the_numbers_that_a_config_takes(number):
    logits, targets = np.zeros((1, 2, 5), np.float32), np.ones((1, 2), np.int32)
    with unchecked():
        make_train_step(TransformerConfig(), optax.sgd(0.1), label_smoothing=number)
        loss, _ = cross_entropy(logits, targets, 0, number)
    assert loss == pytest.approx(2 * np.log(5), rel=1e-6)


def test_numbers_of_numpy_are_those_of_python():
    numbers = {"steps": np.int64(3), "clip_norm": np.float64(0.5), "freeze": ["x"]}
    settings = TrainingConfig(**numbers)
    assert settings == TrainingConfig(steps=3, clip_norm=0.5, freeze=("x",))
    assert hash(settings) == hash(TrainingConfig(steps=3, clip_norm=0.5, freeze=("x",)))
