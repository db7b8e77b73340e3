"""Speed of the training step beside PyTorch's nn.Transformer: python -m benchmarks.training.

The same weights, batches and work (tied embeddings, label smoothing, Adam), float32 on one core,
the systems called in turn, each block of steps right after a discarded one. The loss of the first
step without dropout says that the work is the same. The machine's limits are measured in turn with
them: large products and long sums of vectors. Needs the extra "test", and Linux
(sched_setaffinity).
"""

import json
import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import machine
from benchmarks.nn_transformer import Size, Steps, model_config, our_steps, prepared, torch_steps
from benchmarks.systems import processor, spread, start, stop, time_in_turn
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.training.budget import step_flops
from jax_transformer.training.config import TrainingConfig

SIZES = {
    "small": Size(256, 4, 1024, 3, vocab_size=8_000, rows=32, length=32),
    "base": Size(512, 8, 2048, 6, vocab_size=8_000, rows=16, length=64),
}
DROPOUTS = (0.0, 0.1)
SETTINGS = TrainingConfig(schedule="constant", learning_rate=1e-4, warmup_steps=1)
STEPS = 3  # of a timed block

System = Callable[[str, float], float]  # of a size and a dropout rate, the first step's loss


def load_ours() -> System:
    """Return the training step of this library, as train.py runs it."""
    keep_freed_memory()
    return prepared(_our_steps)


def load_ours_unkept() -> System:
    """Return the same with the memory of a step handed back to the system after it."""
    return prepared(_our_steps)


def load_torch() -> System:
    """Return the training step of nn.Transformer, as it runs from Python."""
    return prepared(partial(_torch_steps, compiled=False))


def load_torch_compile() -> System:
    """Return the training step of nn.Transformer under torch.compile."""
    return prepared(partial(_torch_steps, compiled=True))


LOADERS = {
    "ours": load_ours,
    "ours, memory not kept": load_ours_unkept,
    "torch": load_torch,
    "torch.compile": load_torch_compile,
}


def _our_steps(size: str, dropout: float) -> Steps:
    return our_steps(SIZES[size], dropout, SETTINGS, STEPS)


def _torch_steps(size: str, dropout: float, *, compiled: bool) -> Steps:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return torch_steps(SIZES[size], dropout, SETTINGS, STEPS, compiled=compiled)


def compare(
    systems: dict[str, Connection], size: str, dropout: float, rounds: int
) -> dict[str, Any]:
    """Return the seconds a step of each system in each round, their first losses and the limits.

    Limits, in FLOPs or bytes a second, and with them the systems' shares of the faster product,
    are of each round as well.
    """
    found, seconds = time_in_turn(systems, (size, dropout), rounds)
    limits = {name: np.divide(work, seconds[name]) for name, work in machine.AMOUNTS.items()}
    peak = np.maximum(*(limits[name] for name in machine.PRODUCT_LOADERS))
    steps = {name: np.divide(seconds[name], STEPS) for name in LOADERS}
    work = step_flops(model_config(SIZES[size], dropout), SIZES[size].rows, SIZES[size].length)
    return {
        "size": size,
        "dropout": dropout,
        "losses": {name: found[name] for name in LOADERS},
        "seconds": {name: taken.tolist() for name, taken in steps.items()},
        "shares of the peak": {n: (work / taken / peak).tolist() for n, taken in steps.items()},
        "limits": {name: rates.tolist() for name, rates in limits.items()},
    }


def steps_table(results: list[dict[str, Any]]) -> Table:
    """Return a row for each system on each task."""
    table = Table("size", "dropout", "system", "s a step", "/ ours", "share of the peak")
    table.add_column("loss unlike ours")
    for result in results:
        seconds, losses = result["seconds"], result["losses"]
        for name in LOADERS:
            table.add_row(
                result["size"],
                str(result["dropout"]),
                name,
                f"{median(seconds[name]):.3f}",
                spread(np.divide(seconds[name], seconds["ours"])),
                f"{median(result['shares of the peak'][name]):.1%}",
                f"{abs(losses[name] - losses['ours']):.1e}",
            )
    return table


def limits_table(results: list[dict[str, Any]]) -> Table:
    """Return what the machine reached in all rounds of all tasks."""
    table = Table("the machine", "least - median - most")
    for name in machine.LOADERS:
        rates = np.concatenate([result["limits"][name] for result in results])
        unit = "GFLOP/s" if name in machine.PRODUCT_LOADERS else "GB/s"
        table.add_row(f"{name}, {unit}", spread(rates / 1e9))
    return table


def main(
    rounds: int = 5, core: int = 0, all_cores: bool = False, json_file: Path | None = None
) -> None:
    """Time the systems and the machine's limits on every task, print seconds, ratios and shares.

    Args:
        rounds: How often each system is timed on each task, in turn with the others.
        core: The one core that everything runs on.
        all_cores: Run on all of them instead.
        json_file: Where to write the seconds of every block, if anywhere.
    """
    if not all_cores:
        os.sched_setaffinity(0, {core})  # inherited by the processes begun from here on
    results = []
    systems = start(LOADERS | machine.LOADERS)
    for size in SIZES:
        results += [compare(systems, size, rate, rounds) for rate in track(DROPOUTS, size)]
    stop(systems)
    versions = {name: version(name) for name in ("jax", "torch")}
    console = Console()
    console.print(steps_table(results), limits_table(results), f"{processor()}. {versions}")
    if json_file is not None:
        record = {"processor": processor(), "versions": versions, "results": results}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
