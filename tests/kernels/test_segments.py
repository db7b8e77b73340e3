"""Sliding windows and groups of heads, beside loops over positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.kernels.segments import (
    SegmentMask,
    as_boolean_mask,
    attended_keys,
    band_mask,
    join_queries,
)


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (2, 3), (0, 2), (9, 9)])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 3)])
def test_a_window_is_so_many_earlier_and_so_many_later_positions(window, lengths):
    queries, keys = lengths
    expected = np.zeros((1, 1, *lengths), bool)
    for query in range(queries):
        for key in range(query - window[0], query + window[1] + 1):  # its own position among them
            if 0 <= key < keys:
                expected[0, 0, query, key] = True
    np.testing.assert_array_equal(band_mask(queries, keys, window), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_adds_to_what_else_hides(causal):
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    mask = SegmentMask(jnp.asarray(segments), jnp.asarray(segments), causal, window=(2, 1))
    found = np.asarray(as_boolean_mask(mask, 8, 8))
    for row, query, key in np.ndindex(2, 8, 8):
        same = segments[row, query] == segments[row, key] > 0
        near = query - 2 <= key <= (query if causal else query + 1)
        assert found[row, 0, query, key] == (same and near)


def test_a_window_is_a_static_part_of_a_mask():
    mask = SegmentMask(jnp.ones((1, 3), bool), window=(1, 0))
    assert len(jax.tree.leaves(mask)) == 1
    assert jax.jit(lambda mask: mask)(mask).window == (1, 0)


def test_a_head_of_keys_is_attended_to_by_its_own_group():
    random = np.random.default_rng(0)
    mask = random.random((2, 6, 4, 5)) < 0.2
    found = np.asarray(attended_keys(jnp.asarray(mask), 2))
    rows = join_queries(jnp.asarray(mask), 2)
    for head in range(6):  # three heads of queries for each head of keys
        assert np.array_equal(rows[:, head // 3, 4 * (head % 3) :][:, :4], mask[:, head])
    for row, head, key in np.ndindex(2, 2, 5):
        assert found[row, head, key, 0] == mask[row, 3 * head : 3 * head + 3, :, key].any()
    assert 0 < found.mean() < 1
    for shared in (mask[:, :1], mask):  # for all heads, and for as many as there are heads of keys
        expected = shared.any(axis=2)[..., None]
        np.testing.assert_array_equal(attended_keys(jnp.asarray(shared), 6), expected)
