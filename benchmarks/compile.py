"""Time to import the library and to compile its training step: python -m benchmarks.compile.

Each figure is of fresh processes, one after the other on one core: the import with Python's
compiled files at hand, as an installation has them; the compilation of the base size of
benchmarks.training, unrolled and by `scan_layers`, with nothing in the compilation cache, and with
its own result in it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.systems import processor

# Importing the module of the settings costs something that is no part of the compilation.
COMPILE = """
import dataclasses
import sys
import time
import jax
from benchmarks.nn_transformer import draw_batch, model_config
from benchmarks.training import SETTINGS, SIZES
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.training.step import init_state, sharded_train_step
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
config = model_config(SIZES["base"], 0.1)
settings = dataclasses.replace(SETTINGS, scan_layers="scan_layers" in sys.argv)
state = jax.eval_shape(lambda: init_state(config, settings))
begun = time.perf_counter()
lowered = sharded_train_step(make_mesh(), config, settings).lower(state, draw_batch(SIZES["base"]))
traced = time.perf_counter()
lowered.compile()
print(traced - begun, time.perf_counter() - traced)
"""
IMPORT = """
import time
import flax.linen, jax, jax.numpy
begun = time.perf_counter()
import jax_transformer
print(time.perf_counter() - begun)
"""


def measure(program: str, cache: str, *arguments: str) -> list[float]:
    """Return the seconds that a program prints, run with a folder as its compilation cache."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "PYTHONDONTWRITEBYTECODE": "",  # where it is set, every import compiles the sources
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return [float(seconds) for seconds in done.stdout.split()]


def main(rounds: int = 3, core: int = 0, json_file: Path | None = None) -> None:
    """Measure imports and compilations, print them.

    Args:
        rounds: How often each is measured.
        core: The one core that everything runs on.
        json_file: Where to write the seconds, if anywhere.
    """
    os.sched_setaffinity(0, {core})
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in track(range(rounds), "compiling"):
        with tempfile.TemporaryDirectory() as cache:
            measure(IMPORT, cache)  # compiles the sources
            seconds["import jax_transformer, after jax and flax"] += measure(IMPORT, cache)
            for layers in ("unrolled", "scan_layers"):
                for kept in ("cold", "cached"):
                    traced, compiled = measure(COMPILE, cache, layers)
                    seconds[f"trace the base training step, {layers}"].append(traced)
                    seconds[f"compile it, {kept}, {layers}"].append(compiled)
    table = Table("", "least, s", "median, s", "most, s")
    for name, taken in seconds.items():
        table.add_row(name, *(f"{x:.3f}" for x in (min(taken), median(taken), max(taken))))
    Console().print(table, processor())
    if json_file is not None:
        record = {"processor": processor(), "seconds": seconds}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
