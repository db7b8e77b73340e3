"""Both precisions, with the products of float32 not rounded further."""

import jax
import pytest

from tests.tiers import tiered


@pytest.fixture(params=tiered(["float64", "float32"], ["float64"]))
def dtype(request):
    jax.config.update("jax_enable_x64", request.param == "float64")
    with jax.default_matmul_precision("highest"):
        yield request.param
    jax.config.update("jax_enable_x64", False)
