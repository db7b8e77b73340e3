"""The smallest set of arrays that the backward pass keeps, counted by hand in small functions."""

import math

import jax
import jax.numpy as jnp
import pytest

from jax_transformer.training.activations import least_kept

ROWS, WIDTH = 8, 32
SIZE = ROWS * WIDTH


def kept(function, *shapes):
    """Return the bytes that are kept of the results of a function."""
    shapes = shapes or [(ROWS, WIDTH), (WIDTH, WIDTH)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.make_jaxpr(function)(*arguments).jaxpr
    return least_kept(traced, cost)


def cost(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize if aval.size >= SIZE else 0


def test_what_is_computed_cheaply_from_a_product_is_not_kept_beside_it():
    assert kept(lambda x, w: [y := x @ w, jnp.exp(y.astype(jnp.float32)), y > 0]) == 2 * SIZE


def test_the_smallest_array_between_a_product_and_its_use_is_kept():
    assert kept(lambda x, w: (x @ w > 0).astype(jnp.float32)) == SIZE  # one byte an element


def test_of_a_chain_of_sums_each_term_is_kept_once():
    def chain(x, w):
        a = x @ w
        b = a + jnp.tanh(a) @ w
        return a, b, jnp.tanh(b), b.astype(jnp.float32)

    assert kept(chain) == 2 * 2 * SIZE


def test_each_call_of_one_function_has_its_own_arrays():
    cast = jax.jit(lambda y: y.astype(jnp.float32) * 2)
    assert kept(lambda x, w: [cast(x @ w), cast(jnp.sin(x) @ w)]) == 2 * 2 * SIZE


def test_a_dropout_mask_is_a_byte_an_element():
    def drop(key, x):
        kept = jax.random.bits(key, x.shape, jnp.uint32) < 2**30
        return jnp.where(kept, x * 2, 0)

    key, x = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    assert least_kept(jax.make_jaxpr(drop)(key, x).jaxpr, cost) == SIZE


@pytest.mark.parametrize("length", [2, 3])
def test_a_loop_keeps_all_that_it_returns(length):
    def loop(x, w):
        return jax.lax.scan(lambda y, _: (z := y @ w, (z, jnp.exp(z))), x, length=length)[1]

    assert kept(loop) == length * 2 * 2 * SIZE


def test_an_array_that_is_read_by_indices_is_written():
    def gold(x, w):
        return jnp.take_along_axis((x @ w).astype(jnp.float32), jnp.zeros((ROWS, 1), int), axis=1)

    assert kept(lambda x, w: [gold(x, w), x @ w]) == 2 * SIZE + 4 * SIZE


def test_what_is_computed_from_arguments_alone_is_not_kept():
    assert kept(lambda x, w: [jnp.exp(x), x.astype(jnp.float32)]) == 0
