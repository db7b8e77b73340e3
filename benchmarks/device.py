"""Speed of training and generation on a GPU, a TPU or a CPU: python -m benchmarks.device.

The base and the big model of Vaswani et al. 2017 in bfloat16 on one device. Training: target tokens
a second, and model FLOP utilisation (MFU), the share of the device's peak that `budget.step_flops`
a step come to; the time that compilation adds to the first steps; the most memory in use. On a GPU,
PyTorch's nn.Transformer stands beside it, if PyTorch finds the GPU: the same weights, batches and
work (benchmarks.nn_transformer), under autocast. The systems are called in turn, each block of
steps right after a discarded one, each in a process of its own. Generation: tokens a second of this
library. Needs the extra "bench", and "cuda" or "tpu".
"""

import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
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
    torch_steps,
)
from benchmarks.systems import processor, spread, start, stop, time_in_turn
from jax_transformer import TransformerConfig, generate, init_params
from jax_transformer.kernels.attention_backend import choose_for, execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.topologies import DEVICES
from jax_transformer.training import budget
from jax_transformer.training.config import TrainingConfig

FIELDS = {name: fields for name, (fields, _) in budget.SIZES.items()} | {
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
Device = Literal["gpu", "tpu", "cpu"]
BACKENDS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}  # as jax_platforms names them
# What JAX calls the devices of runtime.devices; PCIe and NVL ones are slower than SXM.
KINDS = {
    "A100": "NVIDIA A100.*",
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "TPU-v4": "TPU v4",
    "TPU-v5e": "TPU v5 lite|TPU v5e",
    "TPU-v5p": "TPU v5|TPU v5p",
    "TPU-v6e": "TPU v6 lite|TPU v6e",
}

# Of a size and a dropout rate or a number of beams: what was computed, the seconds of the very
# first call, and the most bytes in use, where the device counts them.
System = Callable[[Size, float], dict[str, Any]]


def load_ours(device: Device) -> System:
    """Return the training step of this library, as train.py runs it."""
    _use(device)
    return _watched(_our_steps, _our_memory)


def load_torch(device: Device) -> System:
    """Return the training step of nn.Transformer, as it runs from Python."""
    return _load_torch(device, compiled=False)


def load_torch_compile(device: Device, compile_backend: str = "inductor") -> System:
    """Return the training step of nn.Transformer under torch.compile with this backend."""
    return _load_torch(device, compiled=True, compile_backend=compile_backend)


def load_generation(device: Device) -> System:
    """Return the generation of this library: greedy search, or beam search."""
    _use(device)
    return _watched(_our_generation, _our_memory)


LOADERS = {"ours": load_ours, "torch": load_torch, "torch.compile": load_torch_compile}


def _use(device: Device) -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the others need memory as well
    jax.config.update("jax_platforms", BACKENDS[device])
    keep_freed_memory()


def _watched(prepare: Callable[..., Steps], memory: Callable[[], int | None]) -> System:
    """Return a system that prepares its task once, and tells of its first call and its memory."""
    kept: dict[tuple, tuple[Steps, float]] = {}

    def system(*task: Any) -> dict[str, Any]:
        if task not in kept:
            run, begun = prepare(*task), time.perf_counter()
            run()
            kept[task] = run, time.perf_counter() - begun
        run, first = kept[task]
        return {"computed": run(), "first": first, "memory": memory()}

    return system


def _our_memory() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _our_steps(size: Size, dropout: float) -> Steps:
    config = model_config(size, dropout)
    choice = choose_for(jax.devices()[0], SETTINGS.compute_dtype, config.head_dim, dropout > 0)
    print(f"ours, d_model {size.d_model}, dropout {dropout}: {choice}", flush=True)
    return our_steps(size, dropout, SETTINGS, STEPS)


def _our_generation(size: Size, beam_size: int) -> Steps:
    """Return what generates the same number of tokens for each row, and returns that of all."""
    config = model_config(size, dropout=0.0)
    execution = execution_on(jax.devices()[0], "bfloat16", config.head_dim, kind=SearchExecution)
    params = init_params(jax.random.key(0), config)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    limits = {"max_new_tokens": size.length, "min_new_tokens": size.length - 1}  # and EOS, or not
    src = draw_batch(size).src

    def run() -> float:
        found = generate(params, config, src, beam_size=beam_size, execution=execution, **limits)
        return float(jax.device_get(found.lengths)[:, 0].sum())

    return run


def _load_torch(device: Device, *, compiled: bool, **options: Any) -> System:
    import torch

    jax.config.update("jax_platforms", "cpu")  # it draws the weights, and takes no memory there
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_float32_matmul_precision("high")  # as JAX on a GPU
    prepare = partial(
        torch_steps,
        settings=SETTINGS,
        steps=STEPS,
        compiled=compiled,
        device="cuda" if device == "gpu" else device,
        **options,
    )
    return _watched(prepare, torch.cuda.max_memory_allocated if device == "gpu" else lambda: None)


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


def device_name(device: Device) -> str:
    """Return what JAX calls the device.

    A process of its own asks: the one that asks holds a TPU for as long as it lives.

    Raises:
        SystemExit: JAX finds no such device.
    """
    with get_context("spawn").Pool(1) as pool:
        name, reason = pool.apply(_find, (device,))
    if name is None:
        remedy = "try --device cpu --size tiny"
        raise SystemExit(f"error: device={device!r}: JAX finds none ({reason}); {remedy}")
    return name


def _find(device: Device) -> tuple[str | None, str]:
    """Return the name of the device, or why there is none."""
    if device == "cpu":
        return processor(), ""
    jax.config.update("jax_platforms", BACKENDS[device])
    try:
        return jax.devices()[0].device_kind, ""
    except (RuntimeError, AssertionError) as error:  # the latter where JAX has no plugin for it
        return None, str(error).partition("\n")[
            0
        ] or f"is the extra {BACKENDS[device]!r} installed?"


def loaders_for(device: Device) -> dict[str, Callable[..., System]]:
    """Return the systems that can use a device: PyTorch where it finds it."""
    import torch

    beside = device == "cpu" or (device == "gpu" and torch.cuda.is_available())
    return LOADERS if beside else {"ours": load_ours}


def data_sheet_peak(name: str) -> float | None:
    """Return the peak of a device by its data sheet, in FLOP/s, if it is known."""
    for known, pattern in KINDS.items():
        if re.fullmatch(pattern, name):
            return DEVICES[known].flops
    return None


def measure(
    readings: dict[str, dict[str, Any]], seconds: dict[str, list[float]], **task: Any
) -> dict[str, Any]:
    """Return what is known of a task: its work, and each system's seconds a step and loss.

    Args:
        readings: Of the last call of each system.
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
        "losses": {name: reading["computed"] for name, reading in readings.items()},
        "seconds": {name: [taken / STEPS for taken in times] for name, times in seconds.items()},
    } | start_and_memory(readings, seconds)


def start_and_memory(
    readings: dict[str, dict[str, Any]], seconds: dict[str, list[float]]
) -> dict[str, dict[str, Any]]:
    """Return by system how many seconds compilation adds to the first call, and the memory."""
    return {
        "compilation": {
            name: max(reading["first"] - median(seconds[name]), 0.0)
            for name, reading in readings.items()
        },
        "memory": {name: reading["memory"] for name, reading in readings.items()},
    }


def table_of(result: dict[str, Any], peak: float | None) -> Table:
    """Return a result of training as a table with a row for each system."""
    table = Table(
        "system", "compile", "memory", "a step", "target\ntokens/s", "MFU", "time / ours", "loss"
    )
    table.title = f"{result['model']}, dropout {result['dropout']}"
    for name, seconds in result["seconds"].items():
        step = median(seconds)
        table.add_row(
            name,
            f"{result['compilation'][name]:.1f} s",
            gigabytes(result["memory"][name]),
            f"{step * 1000:,.1f} ms",
            f"{result['target_tokens'] / step:,.0f}",
            f"{result['flops'] / step / peak:.1%}" if peak else "-",
            spread(np.divide(seconds, result["seconds"]["ours"])),
            f"{result['losses'][name]:.4f}",
        )
    return table


def generation_table(results: list[dict[str, Any]]) -> Table:
    """Return the results of generation as a table."""
    table = Table("generate", "compile", "memory", "a batch", "tokens/s")
    for result in results:
        taken = median(result["seconds"])
        table.add_row(
            f"{result['model']}, "
            + ("greedy" if result["beam"] == 1 else f"beam {result['beam']}"),
            f"{result['compilation']:.1f} s",
            gigabytes(result["memory"]),
            f"{taken * 1000:,.1f} ms",
            f"{result['tokens'] / taken:,.0f}",
        )
    return table


def gigabytes(size: int | None) -> str:
    """Return a number of bytes in GB; a device that does not count them has none."""
    return "-" if size is None else f"{size / 1e9:.2f} GB"


def main(
    size: tuple[Literal["base", "big", "tiny"], ...] = ("base", "big"),
    dropout: tuple[float, ...] = (0.0, 0.1),
    beams: tuple[int, ...] = (1, 4),
    rows: int = 128,
    length: int = 128,
    rounds: int = 5,
    device: Device = "gpu",
    peak_tflops: float | None = None,
    compile_backend: str = "inductor",
    json_file: Path | None = None,
) -> None:
    """Time training and generation on a device; print tokens a second, and what they take.

    Args:
        size: Models; "tiny" is for machines without an accelerator.
        dropout: Rates, attention weights included; at 0 the losses agree, as far as bfloat16 goes.
        beams: Beam sizes of generation; 1 is greedy search.
        rows: Sentence pairs of a batch. Each system keeps the memory that it has taken: beside
            PyTorch, a batch may need about a third of the device's.
        length: Tokens of the longest source and target; a sentence has seven eighths or more.
        rounds: How often each system is timed on each task, in turn with the others.
        device: What to run on: an NVIDIA GPU, a chip of a TPU, or the CPU.
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
    loaders = loaders_for(device)
    if "torch" in loaders:
        loaders |= {"torch.compile": partial(load_torch_compile, compile_backend=compile_backend)}
    else:
        console.print(f"PyTorch {versions['torch']} finds no {device}: this library alone")
    training, generation = [], []
    for model in size:
        task_size = shape(model, rows, length)
        for rate in dropout:
            systems = start(loaders, device)
            readings, seconds = time_in_turn(systems, (task_size, rate), rounds)
            stop(systems)
            training.append(measure(readings, seconds, name=model, size=task_size, dropout=rate))
            console.print(table_of(training[-1], peak))
        for beam in beams:
            systems = start({"ours": load_generation}, device)
            readings, seconds = time_in_turn(systems, (task_size, beam), rounds)
            stop(systems)
            beside = start_and_memory(readings, seconds)
            generation.append(
                {
                    "model": model,
                    "beam": beam,
                    "tokens": readings["ours"]["computed"],
                    "seconds": seconds["ours"],
                    **{fact: values["ours"] for fact, values in beside.items()},
                }
            )
    if generation:
        console.print(generation_table(generation))
    if json_file is not None:
        record = {"device": name, "peak_flops": peak, "versions": versions}
        record |= {"results": training, "generation": generation}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
