"""What every test shares: a compilation cache on disk, and float64 on request."""

from pathlib import Path

import jax
import pytest


def pytest_configure(config):
    cache = Path(config.rootpath) / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
