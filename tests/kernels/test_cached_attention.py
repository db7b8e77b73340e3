"""Attention to a cache of either layout is attention to the keys and values that it was made of."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.kernels.cached_attention import (
    AttentionCache,
    attend_to_cache,
    cached_keys,
    cached_values,
    empty_slots,
    write_slots,
)
from jax_transformer.model import functional
from tests.models import unchecked
from tests.parity.ladder import bound, error
from tests.tiers import tiered

BATCH, HEADS, COUNT, SLOTS, HEAD_DIM = 2, 6, 3, 5, 7


@pytest.mark.parametrize("layout", ["split_heads", "joined_heads"])
@pytest.mark.parametrize("key_heads", tiered([1, 2, 6], [2]))
@pytest.mark.parametrize("mask_heads", [1, HEADS])
def test_a_cache_of_few_heads_gives_what_their_copies_give(layout, key_heads, mask_heads):
    random = np.random.default_rng(key_heads)
    with jax.enable_x64(True):
        query = jnp.asarray(random.normal(size=(BATCH, HEADS, COUNT, HEAD_DIM)))
        key, value = jnp.asarray(random.normal(size=(2, BATCH, key_heads, SLOTS, HEAD_DIM)))
        mask = jnp.asarray(random.random((BATCH, mask_heads, COUNT, SLOTS)) < 0.6)
        bias = jnp.asarray(random.normal(size=(1, HEADS, 1, SLOTS)))
        copies = (jnp.repeat(x, HEADS // key_heads, axis=1) for x in (key, value))
        expected = functional.dot_product_attention(
            query, *copies, mask, None, jnp.repeat(bias, COUNT, axis=2), 0.7, softcap=1.5
        )
        new = AttentionCache(cached_keys(key, layout), cached_values(value, layout))
        cache = write_slots(empty_slots(new, SLOTS), new, jnp.int32(0), jnp.ones(BATCH, bool))
        found = attend_to_cache(query, cache, mask, bias, 0.7, softcap=1.5)
        (batch,) = jax.export.symbolic_shape("batch")

        def attend(query, cache, mask):
            return attend_to_cache(query, cache, mask, bias, 0.7)

        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), (query, cache, mask)
        )
        with unchecked():
            assert jax.eval_shape(attend, *shapes).shape == (batch, HEADS, COUNT, HEAD_DIM)
    assert cache.keys.size == BATCH * key_heads * SLOTS * HEAD_DIM
    assert error(found, expected) <= bound("block", "float64")
