"""What this machine cannot hold is refused before it is allocated: in one line, at once."""

import time
from functools import partial

import jax
import numpy as np
import pytest

from jax_transformer import InputError, encode, generate, init_cache, init_params
from jax_transformer.config import LARGEST
from jax_transformer.model.checks import check_cache, check_position_table
from jax_transformer.runtime.host_memory import check_memory, total_memory
from tests.models import random_params, small_config

SRC = np.array([[3, 4, 2]], np.int32)


def refused(match, call, *args, **options):
    start = time.process_time()
    with pytest.raises(InputError, match=match) as caught:
        call(*args, **options)
    assert time.process_time() - start < 2
    assert "\n" not in str(caught.value)


def test_the_memory_is_the_lowest_of_the_limits(monkeypatch, tmp_path):
    assert 2**28 < total_memory() < 2**50
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**29, resource.RLIM_INFINITY))
    assert total_memory() == 2**29
    check_memory(2**29, "this", "-")
    refused(r"this needs at least 0\.5 GB, but this machine has 0\.5 GB; take", check_memory,
            2**29 + 1, "this", "take less")  # fmt: skip


def test_parameters_that_the_machine_cannot_hold_are_not_drawn():
    for fields in ({"d_model": 10**9, "num_heads": 1}, {"d_ff": LARGEST}):
        config = small_config("vaswani2017", **fields)
        refused(r"a model of d_model=\d+ with \d[\d,]+ parameters needs at least", init_params,
                jax.random.key(0), config)  # fmt: skip
    shapes = jax.eval_shape(lambda key: init_params(key, config), jax.random.key(0))
    inner = shapes["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"]
    assert inner.shape[1] == LARGEST  # of shapes alone nothing is refused


def test_a_position_table_that_the_machine_cannot_hold_is_not_computed():
    refused("a table of 1000000000 positions needs at least", check_position_table, 10**9, 512)
    config = small_config("vaswani2017", max_length=10**9)
    positions = np.arange(SRC.size)[None]
    refused("a table of 1000000000 positions needs", partial(encode, src_positions=positions),
            random_params(config), config, SRC)  # fmt: skip


@pytest.mark.parametrize("preset", ["t5", "pre_norm"])
def test_a_cache_that_the_machine_cannot_hold_is_not_made(preset):
    config = small_config(preset, max_length=LARGEST) if preset != "t5" else small_config(preset)
    params, memory = random_params(config), np.zeros((1, 3, config.d_model), np.float32)
    refused(r"max_new_tokens=1000000000000 must be", generate, params, config, SRC,
            max_new_tokens=10**12)  # fmt: skip
    refused(r"the cache for max_new_tokens=1000000000 .*needs at least", generate, params, config,
            SRC, max_new_tokens=10**9)  # fmt: skip
    refused("the cache for max_new_tokens=1000000000 .*needs", init_cache, params, config, memory,
            10**9)  # fmt: skip
    refused(r"2000000000000 slots", check_cache, config, 2, 3, 10**9, 1000, 4)
