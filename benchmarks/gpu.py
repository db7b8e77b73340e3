"""Speed of the training step on a GPU beside PyTorch's nn.Transformer: python -m benchmarks.gpu.

The base and the big model of Vaswani et al. 2017 in bfloat16: target tokens a second, and model
FLOP utilisation (MFU), the share of the device's peak that `budget.step_flops` a step come to.
The same weights, batches and work (benchmarks.nn_transformer), PyTorch under autocast; the systems
are called in turn, each block of steps right after a discarded one. What a system has taken of the
device's memory it keeps: a batch may need about a third of it. Needs the extra "bench", and "cuda".
"""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.nn_transformer import (
    Size,
    Steps,
    draw_batch,
    model_config,
    our_steps,
    prepared,
    torch_steps,
)
from benchmarks.systems import processor, spread, start, stop, time_in_turn
from jax_transformer import TransformerConfig
from jax_transformer.runtime.attention_backend import choose_for
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.training import budget
from jax_transformer.training.config import TrainingConfig

FIELDS = {name: size.fields for name, size in budget.SIZES.items()} | {
    "tiny": {
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "src_vocab_size": 64,
        "tgt_vocab_size": 64,
    }
}
SETTINGS = TrainingConfig(
    schedule="constant", learning_rate=1e-4, warmup_steps=1, compute_dtype="bfloat16"
)
STEPS = 10  # of a timed block
# What the driver calls the devices of budget.DEVICES; PCIe and NVL ones are slower than SXM.
DRIVER_NAMES = {"A100": "NVIDIA A100.*", "H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200"}

System = Callable[[Size, float], float]  # of a size and a dropout rate, the first step's loss


def load_ours(device: str) -> System:
    """Return the training step of this library, as train.py runs it."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the others need memory as well
    jax.config.update("jax_platforms", device)
    keep_freed_memory()
    return prepared(_our_steps)


def load_torch(device: str) -> System:
    """Return the training step of nn.Transformer, as it runs from Python."""
    return _load_torch(device, compiled=False)


def load_torch_compile(device: str, compile_backend: str = "inductor") -> System:
    """Return the training step of nn.Transformer under torch.compile with this backend."""
    return _load_torch(device, compiled=True, compile_backend=compile_backend)


LOADERS = {"ours": load_ours, "torch": load_torch, "torch.compile": load_torch_compile}


def _our_steps(size: Size, dropout: float) -> Steps:
    config = model_config(size, dropout)
    choice = choose_for(jax.devices()[0], SETTINGS.compute_dtype, config.head_dim, dropout > 0)
    print(f"ours, d_model {size.d_model}, dropout {dropout}: {choice}", flush=True)
    return our_steps(size, dropout, SETTINGS, STEPS)


def _load_torch(device: str, *, compiled: bool, **options: Any) -> System:
    import torch

    jax.config.update("jax_platforms", "cpu")  # it draws the weights, and takes no memory there
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_float32_matmul_precision("high")  # as JAX on a GPU
    return prepared(
        partial(
            torch_steps, settings=SETTINGS, steps=STEPS, compiled=compiled, device=device, **options
        )
    )


def shape(name: str, rows: int, length: int) -> Size:
    """Return the model of a name, and its batch."""
    config = TransformerConfig.preset("vaswani2017", **FIELDS[name])
    return Size(
        config.d_model,
        config.num_heads,
        config.d_ff,
        config.num_encoder_layers,
        config.tgt_vocab_size,
        rows,
        length,
    )


def device_name(device: str) -> str:
    """Return what the device is called."""
    if device == "cpu":
        return processor()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: device='cuda': there is none; try --device cpu --size tiny")
    return torch.cuda.get_device_name()


def data_sheet_peak(name: str) -> float | None:
    """Return the peak of a device by its data sheet, in FLOP/s, if `budget` knows the device."""
    for known, pattern in DRIVER_NAMES.items():
        if re.fullmatch(pattern, name):
            return budget.DEVICES[known].flops
    return None


def measure(losses: dict[str, float], seconds: dict[str, list[float]], **task: Any) -> dict:
    """Return what is known of a task: its work, and each system's seconds a step and loss.

    Args:
        losses: Of the first step, by system.
        seconds: Of each block, by system.
        task: `name` of the model, its `size` and `dropout`.
    """
    size, config = task["size"], model_config(task["size"], task["dropout"])
    return {
        "model": task["name"],
        "dropout": task["dropout"],
        "rows": size.rows,
        "length": size.length,
        "target_tokens": int(np.sum(draw_batch(size).tgt_out != config.pad_id)),
        "flops": budget.step_flops(config, size.rows, size.length),
        "losses": losses,
        "seconds": {name: [taken / STEPS for taken in times] for name, times in seconds.items()},
    }


def table_of(result: dict[str, Any], peak: float | None) -> Table:
    """Return a result as a table with a row for each system."""
    table = Table("system", "a step", "target\ntokens/s", "MFU", "time / ours", "loss")
    table.title = f"{result['model']}, dropout {result['dropout']}"
    for name, seconds in result["seconds"].items():
        step = median(seconds)
        table.add_row(
            name,
            f"{step * 1000:,.1f} ms",
            f"{result['target_tokens'] / step:,.0f}",
            f"{result['flops'] / step / peak:.1%}" if peak else "-",
            spread(np.divide(seconds, result["seconds"]["ours"])),
            f"{result['losses'][name]:.4f}",
        )
    return table


def main(
    size: tuple[Literal["base", "big", "tiny"], ...] = ("base", "big"),
    dropout: tuple[float, ...] = (0.0, 0.1),
    rows: int = 128,
    length: int = 128,
    rounds: int = 5,
    device: Literal["cuda", "cpu"] = "cuda",
    peak_tflops: float | None = None,
    compile_backend: str = "inductor",
    json_file: Path | None = None,
) -> None:
    """Time the systems on every task; print target tokens a second and model FLOP utilisation.

    Args:
        size: Models; "tiny" is for machines without a GPU.
        dropout: Rates, attention weights included; at 0 the losses agree, as far as bfloat16 goes.
        rows: Sentence pairs of a batch.
        length: Tokens of the longest source and target; a sentence has seven eighths or more.
        rounds: How often each system is timed on each task, in turn with the others.
        device: What to run on.
        peak_tflops: Peak of the device in bfloat16; if None, that of its data sheet, where known.
        compile_backend: Backend of torch.compile; "aot_eager" traces the step and its gradient, and
            generates no code: it starts quickly and runs slowly.
        json_file: Where to write the seconds of every block, if anywhere.
    """
    name = device_name(device)
    peak = data_sheet_peak(name) if peak_tflops is None else peak_tflops * 1e12
    versions = {package: version(package) for package in ("jax", "torch")}
    shown = f"{peak / 1e12:g} TFLOP/s" if peak else "unknown (--peak-tflops names it)"
    console = Console()
    console.print(f"{name}, peak {shown}; {rows} x {length} tokens a side. {versions}")
    results = []
    compiled = partial(load_torch_compile, compile_backend=compile_backend)
    systems = start(LOADERS | {"torch.compile": compiled}, device)
    for model in size:
        for rate in dropout:
            task = shape(model, rows, length), rate
            losses, seconds = time_in_turn(systems, task, rounds)
            results.append(measure(losses, seconds, name=model, size=task[0], dropout=rate))
            console.print(table_of(results[-1], peak))
    stop(systems)
    if json_file is not None:
        record = {"device": name, "peak_flops": peak, "versions": versions, "results": results}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
