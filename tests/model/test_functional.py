"""Groups of queries and soft caps in both frameworks, beside a loop over heads and positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer.model import functional
from tests.parity.ladder import bound, error, to_numpy

BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 2, 6, 4, 5, 7
DIVISOR, SOFTCAP = 0.4, 2.0  # most scores are near the cap


def by_loops(query, key, value, mask, bias, softcap):
    """Return what each head gathers: the cap comes after the divisor, before bias and mask."""
    output = np.zeros(query.shape)
    group = query.shape[1] // key.shape[1]
    for row, head, position in np.ndindex(query.shape[:3]):
        scores = key[row, head // group] @ query[row, head, position] / DIVISOR
        if softcap is not None:
            scores = np.array([softcap * math.tanh(score / softcap) for score in scores])
        scores += bias[0, head, position]
        exponentials = np.where(mask[row, 0, position], np.exp(scores), 0)
        if exponentials.any():
            output[row, head, position] = exponentials @ value[row, head // group]
            output[row, head, position] /= exponentials.sum()
    return output


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_each_head_reads_the_keys_of_its_group_and_caps_its_scores(key_heads, softcap):
    random = np.random.default_rng(key_heads)
    query = random.normal(size=(BATCH, HEADS, QUERIES, HEAD_DIM))
    key, value = random.normal(size=(2, BATCH, key_heads, KEYS, HEAD_DIM))
    mask = random.random((BATCH, 1, QUERIES, KEYS)) < 0.6
    mask[0, 0, 1] = False
    bias = random.normal(size=(1, HEADS, QUERIES, KEYS))
    expected = by_loops(query, key, value, mask, bias, softcap)
    with jax.enable_x64(True):
        inputs = map(jnp.asarray, (query, key, value, mask))
        ours = functional.dot_product_attention(
            *inputs, None, jnp.asarray(bias), DIVISOR, softcap=softcap
        )
    inputs = map(torch.from_numpy, (query, key, value, mask))
    theirs = torch_reference.functional.dot_product_attention(
        *inputs, None, torch.from_numpy(bias), DIVISOR, softcap
    )
    assert error(ours, expected) <= bound("block", "float64")
    assert error(to_numpy(theirs), expected) <= bound("block", "float64")


def test_what_no_head_of_a_group_attends_to_has_no_influence():
    """A key that another group attends to is hidden from this one all the same."""
    random = np.random.default_rng(0)
    query = random.normal(size=(BATCH, HEADS, QUERIES, HEAD_DIM))
    key, value = random.normal(size=(2, BATCH, 2, KEYS, HEAD_DIM))
    mask = random.random((BATCH, HEADS, QUERIES, KEYS)) < 0.1
    hidden = ~mask.reshape(BATCH, 2, -1, KEYS).any(axis=2)[..., None]
    assert (hidden[:, 0] != hidden[:, 1]).any()
    dirty = np.where(hidden, np.nan, key), np.where(hidden, np.inf, value)
    attend = functional.dot_product_attention
    clean = attend(*map(jnp.float32, (query, key, value)), jnp.asarray(mask))
    assert np.array_equal(attend(*map(jnp.float32, (query, *dirty)), jnp.asarray(mask)), clean)
