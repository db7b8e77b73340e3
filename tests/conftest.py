"""What every test shares: a compilation cache on disk, one torch thread, float64 on request."""

from pathlib import Path

import jax
import pytest
import torch


def pytest_configure(config):
    cache = Path(config.rootpath) / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    torch.set_num_threads(1)  # small products in several processes: threads wait for each other


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
