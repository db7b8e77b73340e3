"""What every test shares: quick compilation, kept on disk; one torch thread; float64 on request."""

import os
from pathlib import Path

import jax
import pytest
import torch

from tests.compilation import QUICKLY

CACHE = {
    "jax_compilation_cache_dir": str(Path(__file__).parent.parent / ".jax_cache"),
    "jax_persistent_cache_min_compile_time_secs": 0,
}


def pytest_configure():
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"
    for name, value in CACHE.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests start
    torch.set_num_threads(1)  # small products in several processes: threads wait for each other


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_code():
    """Let go of a module's programs.

    Each of their kernels is some mappings of memory; Linux allows a process 65,530, and XLA ends
    it with a segmentation fault at the next one.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
