"""One model of each preset, and of what no preset has, in both frameworks with the same weights."""

import jax
import pytest

from tests.models import small_config
from tests.parity.ladder import Ladder
from tests.parity.measure import make_case, make_pair, trainable
from tests.tiers import DISTINCT_MODELS, MODELS, QUICK_MODELS, tiered

FLOAT32_PRESETS = ("umt5",)  # of the quick tier; float64 has all of QUICK_MODELS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        values = getattr(item, "callspec", None) and item.callspec.params
        preset = values and (values.get("pair") or values.get("trainable_pair"))
        if preset and values.get("dtype") == "float32" and preset not in FLOAT32_PRESETS:
            item.add_marker("exhaustive" if preset in QUICK_MODELS else "sweep")


@pytest.fixture(scope="session")
def ladder():
    ladder = Ladder()
    yield ladder
    if ladder.worst:
        print(f"\n\nWorst error of each block, float64 · float32:\n\n{ladder.table()}")


@pytest.fixture(scope="module", params=["float64", "float32"])
def dtype(request):
    """Run in this precision, with the products of float32 not rounded further."""
    jax.config.update("jax_enable_x64", request.param == "float64")
    with jax.default_matmul_precision("highest"):
        yield request.param
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module", params=tiered(MODELS, QUICK_MODELS, DISTINCT_MODELS))
def pair(request, dtype):
    """Return one of `MODELS` in both frameworks, with ids."""
    return make_case(request.param, small_config(request.param), dtype)


@pytest.fixture(scope="module", params=tiered(MODELS, QUICK_MODELS, DISTINCT_MODELS))
def trainable_pair(request, dtype):
    """Return (preset, dtype, one small model of token ids in both frameworks)."""
    seed = MODELS.index(request.param)
    return request.param, dtype, make_pair(trainable(request.param), dtype, seed)
