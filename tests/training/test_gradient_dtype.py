"""`TrainingConfig.gradient_dtype`: the dtype in which gradients leave the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer.kernels import products
from jax_transformer.kernels.execution import Execution
from jax_transformer.text.batches import Batch
from jax_transformer.training.step import make_train_step
from tests.models import random_params, random_tokens, small_config
from tests.parity.measure import error

CONFIG = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)


def loss_and_gradients(compute_dtype, gradient_dtype="bfloat16"):
    src, tgt = random_tokens(CONFIG)
    batch = Batch(src, tgt[:, :-1], tgt[:, 1:])
    half = compute_dtype == "bfloat16"
    mixed = "bfloat16" if half and gradient_dtype == "float32" else None
    step = make_train_step(
        CONFIG,
        # Keeps the gradients as its state.
        optax.GradientTransformation(lambda _: None, lambda gradients, *_: (gradients, gradients)),
        Execution.for_platform("tpu", compute_dtype=mixed),
        gradient_dtype=gradient_dtype if half else "float32",
    )
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    _, gradients, loss = step(params, None, batch)
    return loss, gradients


def rounded_to_half(leaf):
    return np.array_equal(leaf, np.float32(jnp.asarray(leaf, jnp.bfloat16)))


@pytest.mark.exhaustive
def test_gradients_are_rounded_to_the_dtype_that_the_setting_names():
    exact_loss, exact = loss_and_gradients(compute_dtype="float32")
    for dtype, is_rounded in (("bfloat16", True), ("float32", False)):
        loss, gradients = loss_and_gradients(compute_dtype="bfloat16", gradient_dtype=dtype)
        assert error(np.float32(loss), np.float32(exact_loss)) < 1e-2
        assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}
        assert {rounded_to_half(leaf) for leaf in jax.tree.leaves(gradients)} == {is_rounded}
        difference = jax.tree.map(jnp.subtract, gradients, exact)
        assert optax.tree.norm(difference) < 0.05 * optax.tree.norm(exact)


def test_a_mixed_product_has_the_gradients_of_an_ordinary_one(x64):
    random = np.random.default_rng(0)
    x, kernel, bias = (
        jnp.asarray(random.normal(size=shape)) for shape in ((2, 3, 5), (5, 7), (7,))
    )
    cotangent = jnp.asarray(random.normal(size=(2, 3, 7)))
    results = []

    def by_rows(x, kernel, bias):
        return products.mixed_linear(x, kernel.T, bias, by_rows=True)

    for linear in (products.mixed_linear, by_rows, products.linear):
        y, transpose = jax.vjp(linear, x, kernel, bias)
        results.append((y, *transpose(cotangent)))
    for ours, of_table, theirs in zip(*results, strict=True):
        assert error(np.asarray(ours), np.asarray(theirs)) < 1e-12
        assert error(np.asarray(of_table), np.asarray(theirs)) < 1e-12
