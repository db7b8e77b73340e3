"""Time and memory of converting a model of opus-mt size: python benchmarks/conversion.py.

Peak memory counts all that is held on top of the imports, parameters and files' contents alike,
and is given in multiples of the weights' bytes. Needs Linux (/proc).
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # noqa: F401 else its import would count as part of a conversion

from jax_transformer import TransformerConfig, init_params
from jax_transformer.convert import files
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface

OPUS_MT = TransformerConfig.preset("marian")


def memory(field: str) -> int:
    """Return a memory figure of this process in bytes: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def export_weights(folder: Path) -> Callable[[], Any]:
    """Return the call that writes random parameters as model.safetensors."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), OPUS_MT))
    params = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape, np.float32), shapes)
    return lambda: to_huggingface(params, OPUS_MT, folder)


def import_safetensors(folder: Path) -> Callable[[], Any]:
    """Return the call that reads model.safetensors."""
    return lambda: from_huggingface(folder)


def import_bin(folder: Path) -> Callable[[], Any]:
    """Return the call that reads pytorch_model.bin."""
    return lambda: from_huggingface(folder / "old")


def measure(prepare: Callable[[Path], Callable[[], Any]], folder: Path) -> tuple[float, int]:
    """Return seconds and memory, in bytes on top of the imports, of the first call there is."""
    jnp.zeros(1).block_until_ready()
    imported = memory("VmRSS")
    call = prepare(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    call()
    return time.perf_counter() - start, memory("VmHWM") - imported


def main() -> None:
    """Print a row for each direction and kind of file, each measured in a process of its own."""
    print(f"{'opus-mt shape, float32':36}seconds  peak memory / bytes of the weights")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        for prepare in (export_weights, import_safetensors, import_bin):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, peak = pool.apply(measure, (prepare, folder))
            weights = folder / "model.safetensors"
            size = weights.stat().st_size
            print(f"{prepare.__name__:36}{seconds:7.2f}{peak / size:8.2f}", flush=True)
            if prepare is import_safetensors:
                (folder / "old").mkdir()
                (folder / "config.json").rename(folder / "old" / "config.json")
                files.write(folder / "old" / "pytorch_model.bin", files.read(weights))


if __name__ == "__main__":
    main()
