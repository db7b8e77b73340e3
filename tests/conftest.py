"""What every test shares: quick compilation, kept on disk; one torch thread; float64 on request."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest
import torch

from jax_transformer.commands import sealed_cache
from jax_transformer.commands.main import sum_rows_rightly
from tests.compilation import QUICKLY

CACHE = {
    "jax_compilation_cache_dir": os.environ.get(
        "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache")
    ),
    "jax_persistent_cache_min_compile_time_secs": 0.1,  # below, writing takes as long
}
MAPPINGS = Path("/proc/self/maps")  # on Linux, one line a mapping
MAX_MAPPINGS = 20_000


def pytest_configure():
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"
    # A command that a test calls would do so too late for this process, yet in time for those that
    # tests start, and the two would sum in other orders.
    sum_rows_rightly()
    # With libtpu installed, JAX would look for a TPU and complain on stderr that there is none.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    for name, value in CACHE.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests start
    sealed_cache.install()  # as the commands do, with which the tests share their programs
    # What training prepares of a text is kept for this session only; the fonts for all.
    os.environ["MPLCONFIGDIR"] = str(Path(CACHE["jax_compilation_cache_dir"]) / "matplotlib")
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jax-transformer-tests-")
    torch.set_num_threads(1)  # small products in several processes: threads wait for each other


def pytest_unconfigure():
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


# Modules whose fixtures take half a minute or more. They come first, so that one worker runs all
# tests of such a module: workers take tests over from the end of each other's queue.
FIRST = (
    "tests/runs/test_mesh.py",
    "tests/runs/test_kill_resume.py",
    "tests/examples/test_ray_serve.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    for item in items:  # a pair of exhaustive parameters is of the sweep: see tiers.py
        parameters = item.callspec.marks if hasattr(item, "callspec") else ()
        pair = sum(mark.name == "exhaustive" for mark in parameters) > 1
        if pair or item.get_closest_marker("sweep"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "exhaustive"]
            item.add_marker(pytest.mark.sweep)


def pytest_collection_finish():
    """Collect garbage seldom, and not in the imported modules, which it would scan many times."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # tracing makes many objects that live


@pytest.fixture(scope="module", autouse=True)
def limit_compiled_programs():
    """Drop the compiled programs once they hold many of the memory mappings of this process.

    Each kernel of a program needs some mappings; Linux allows a process 65,530, and XLA ends it
    with a segmentation fault at the next one. Below the limit the modules share their programs.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def fresh_caches():
    """Trace and compile anew in this test: it patches a traced function or counts compilations."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
