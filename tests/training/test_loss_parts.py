"""The loss in parts of the length: the value and the gradient of one part, in less memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jax_transformer.kernels.execution import Execution
from jax_transformer.text.batches import Batch
from jax_transformer.training.objective import batch_loss
from tests.convert.tools import gradient_error
from tests.models import random_params, small_config
from tests.tiers import tiered_rows

ROWS, LENGTH = 4, 12
# Heads that are tied, a matrix of their own, with a bias, scaled.
HEADS = [
    ("vaswani2017", 5, False),
    ("pre_norm", 2, True),
    ("marian", 99, False),
    ("t5_v1_1", 5, True),
]


def one_layer(preset):
    return small_config(preset, num_encoder_layers=1, num_decoder_layers=1)


def make_batch(config, packed):
    random = np.random.default_rng(0)
    ids = [
        random.integers(4, 37, (ROWS, LENGTH)).astype(np.int32)
        for _ in ("src", "tgt_in", "tgt_out")
    ]
    ids[2][:, -3:] = config.pad_id
    segments = np.repeat([[1, 2]], LENGTH // 2, axis=1).repeat(ROWS, axis=0).astype(np.int32)
    return Batch(*ids, *((segments, segments) if packed else (None, None)))


def loss_and_gradient(params, config, packed, parts):
    def loss(params):
        execution = Execution(loss_parts=parts)
        batch = make_batch(config, packed)
        return batch_loss(params, batch, config, 0.1, execution=execution)[0] / 7

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    ("preset", "parts", "packed"), tiered_rows(HEADS, lambda preset, *_: preset == "t5_v1_1")
)
def test_loss_and_gradient_are_those_of_one_part(x64, preset, parts, packed):
    config = one_layer(preset)
    params = random_params(config, dtype=np.float64)
    (loss, gradient), (expected, whole) = (
        loss_and_gradient(params, config, packed, count) for count in (parts, 1)
    )
    assert abs(loss / expected - 1) < 1e-14
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(whole), strict=True)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole))
    assert max(np.abs(one - other).max() for one, other in pairs) < 1e-13 * largest


def test_without_a_gradient_the_loss_is_that_of_one_part(x64):
    config = one_layer("pre_norm")
    params, batch = random_params(config, dtype=np.float64), make_batch(config, packed=False)
    run = jax.jit(batch_loss, static_argnames=("config", "label_smoothing", "execution"))
    totals = [
        run(params, batch, config, 0.1, execution=Execution(loss_parts=parts)) for parts in (1, 4)
    ]
    assert abs(totals[1][0] / totals[0][0] - 1) < 1e-14
    assert totals[0][1] == totals[1][1] == (batch.tgt_out != config.pad_id).sum()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("parts", [1, 4])
def test_no_array_holds_more_logits_than_a_part_and_no_product_is_repeated(parts):
    config = one_layer("pre_norm")
    trace = partial(loss_and_gradient, config=config, packed=False, parts=parts)
    traced = list(equations(jax.make_jaxpr(trace)(random_params(config)).jaxpr))
    logits = config.tgt_vocab_size
    shapes = {out.aval.shape for one in traced for out in one.outvars}
    sizes = {np.prod(shape) for shape in shapes if shape[::2] == (ROWS, logits)}
    assert max(sizes) == ROWS * LENGTH // parts * logits
    products = [
        one
        for one in traced
        if one.primitive.name == "dot_general"
        and any(logits in value.aval.shape for value in (*one.invars, *one.outvars))
    ]
    assert len(products) == 3 * parts  # logits, and the gradients of kernel and hidden states


@pytest.mark.exhaustive
def test_gradients_of_half_precision_are_summed_in_float32():
    config = one_layer("pre_norm")
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random_params(config))
    trace = partial(loss_and_gradient, config=config, packed=False, parts=4)
    shape = params["output_projection"]["kernel"].shape
    sums = [
        one.outvars[0].aval.dtype
        for one in equations(jax.make_jaxpr(trace)(params).jaxpr)
        if one.primitive.name == "add" and one.outvars[0].aval.shape == shape
    ]
    assert sums == [jnp.float32] * 4
    many, one = (loss_and_gradient(params, config, False, parts)[1] for parts in (4, 1))
    many, one = (np.float32(tree["output_projection"]["kernel"]) for tree in (many, one))
    # One rounding of each part's gradient, and one of their sum.
    assert gradient_error(many, one) < 2**-7
