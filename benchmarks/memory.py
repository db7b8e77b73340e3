"""Memory of the training step beside PyTorch's nn.Transformer: python -m benchmarks.memory.

Of the base size of benchmarks.training, float32 on one core: what XLA asks for to run the compiled
step, and the most that is resident in a process that trains, above what was before there was a
model. Beside it, what a beam search pays for hypotheses that continue others. Needs the extra
"test", and Linux (/proc).
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.conversion import memory
from benchmarks.decoding import LINEAGES, NEW_TOKENS
from benchmarks.nn_transformer import draw_batch, model_config
from benchmarks.systems import processor, spread, start, stop, time_in_turn
from benchmarks.training import DROPOUTS, LOADERS, SETTINGS, SIZES, System
from jax_transformer import Cache, decode_step, init_cache, init_params, select_hypotheses
from jax_transformer.model.transformer import Params
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.training.step import init_state, sharded_train_step

CONFIG = LINEAGES["marian"].config  # of the cache
SIZE = "base"
DROPOUT = 0.1  # of the processes that train
SETTINGS_OF = {  # what is kept for the backward pass, and how layers are compiled
    "as it is": {},
    "remat dots": {"remat": "dots"},
    "remat layers": {"remat": "layers"},
    "scan": {"scan_layers": True},
    "scan, remat layers": {"scan_layers": True, "remat": "layers"},
}
BATCH, BEAM_SIZE, SOURCE_LENGTH = 32, 4, 36  # of the beam search
MEGABYTE = 1e6


def compiled_step(dropout: float, **fields: Any) -> dict[str, int]:
    """Return the bytes that XLA asks for to run the training step.

    Args:
        dropout: Of the model.
        **fields: Of `TrainingConfig`, beside those of benchmarks.training.
    """
    config = model_config(SIZES[SIZE], dropout)
    settings = dataclasses.replace(SETTINGS, **fields)
    state = jax.eval_shape(lambda: init_state(config, settings))
    step = sharded_train_step(make_mesh(), config, settings)
    step = step.lower(state, draw_batch(SIZES[SIZE])).compile()
    found = step.memory_analysis()
    return {
        "temporary": found.temp_size_in_bytes,
        "arguments": found.argument_size_in_bytes,
        "new outputs": new_outputs(found),
    }


def new_outputs(found: Any) -> int:
    """Return the bytes of the outputs that do not take the place of an argument."""
    return found.output_size_in_bytes - found.alias_size_in_bytes


def load_measured(load: Callable[[], System]) -> Callable[[str, float], list[int]]:
    """Return a system that answers a task with the most bytes resident in each of its calls.

    On top of what is resident now, after the imports, torch among them, and the start of JAX. The
    first call makes and compiles the model. What helper processes of a compiler take is not seen.
    """
    system = load()
    jnp.zeros(1).block_until_ready()
    before = memory("VmRSS")
    peaks = []

    def measure(*task: Any) -> list[int]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        system(*task)
        peaks.append(memory("VmHWM") - before)
        return peaks

    return measure


def gather_hypotheses(
    slots: list[Float[Array, "B N H L K"]], parents: Int[Array, "B N"]
) -> list[Float[Array, "B N H L K"]]:
    """Return keys and values in which each hypothesis has its own copy.

    What `select_hypotheses` spares: the usual beam search moves the whole cache at each position.
    """
    return [one[jnp.arange(len(parents))[:, None], parents] for one in slots]


def beam_search(rounds: int) -> dict[str, dict[str, Any]]:
    """Return, by what is done at a position of the target, the bytes it adds, and its seconds."""
    params = init_params(jax.random.key(0), CONFIG)
    encoded = jnp.ones((BATCH, SOURCE_LENGTH, CONFIG.d_model))
    new_cache = partial(init_cache, params, CONFIG, encoded, NEW_TOKENS, beam_size=BEAM_SIZE)
    head_dim = CONFIG.d_model // CONFIG.num_heads
    shape = (BATCH, BEAM_SIZE, CONFIG.num_heads, NEW_TOKENS, head_dim)
    slots = [jnp.zeros(shape) for _ in range(2 * CONFIG.num_decoder_layers)]
    ids = jnp.tile(jnp.arange(BEAM_SIZE)[::-1], (BATCH, 1))  # no hypothesis continues itself
    work: dict[str, tuple] = {  # what is done, to what, and the rest that it needs
        "decode_step": (_step, new_cache(), (ids, params)),
        "continue others, by ancestors": (select_hypotheses, new_cache(), (ids,)),
        "continue others, by gathering": (gather_hypotheses, slots, (ids,)),
    }
    found = {}
    for name, (do, state, rest) in work.items():
        # Slots cannot be gathered in place: donated, they would be copied twice.
        donated = () if do is gather_hypotheses else 0
        compiled = jax.jit(do, donate_argnums=donated).lower(state, *rest).compile()
        memory = compiled.memory_analysis()
        added = memory.temp_size_in_bytes + new_outputs(memory)
        found[name] = {"added bytes": added, "seconds": []}
        work[name] = (compiled, state, rest)
    for _ in range(rounds):
        for name, (do, state, rest) in work.items():
            state = jax.block_until_ready(do(state, *rest))  # discarded
            begun = time.perf_counter()
            state = jax.block_until_ready(do(state, *rest))
            found[name]["seconds"].append(time.perf_counter() - begun)
            work[name] = (do, state, rest)
    return found


def _step(cache: Cache, ids: Int[Array, "B N"], params: Params) -> Cache:
    return decode_step(params, CONFIG, cache, ids)[1]


def step_table(steps: dict[str, dict[str, dict[str, int]]]) -> Table:
    """Return the memory of the compiled steps."""
    table = Table(f"{SIZE}, MB", *(f"temporary, dropout {dropout}" for dropout in DROPOUTS))
    table.add_column("arguments")
    table.add_column("new outputs")
    for name, found in steps.items():
        last = found[str(DROPOUTS[-1])]
        sizes = [one["temporary"] for one in found.values()]
        sizes += [last["arguments"], last["new outputs"]]
        table.add_row(name, *(f"{size / MEGABYTE:,.0f}" for size in sizes))
    return table


def process_table(peaks: dict[str, list[int]]) -> Table:
    """Return the peaks of the processes that train."""
    table = Table("training process", "compiling and first steps, MB", "later steps, MB", "/ ours")
    ours = peaks["ours"]
    for name, (first, *later) in peaks.items():
        ratios = np.divide(later, ours[1:])
        megabytes = (f"{size / MEGABYTE:,.0f}" for size in (first, median(later)))
        table.add_row(name, *megabytes, spread(ratios))
    return table


def search_table(found: dict[str, dict[str, Any]]) -> Table:
    """Return what a position of a beam search takes."""
    heading = f"beam {BEAM_SIZE}, batch {BATCH}, {NEW_TOKENS} positions"
    table = Table(heading, "added, MB", "ms", "/ decode_step")
    step = found["decode_step"]["seconds"]
    for name, one in found.items():
        table.add_row(
            name,
            f"{one['added bytes'] / MEGABYTE:,.1f}",
            f"{1e3 * median(one['seconds']):.1f}",
            spread(np.divide(one["seconds"], step)),
        )
    return table


def main(rounds: int = 3, core: int = 0, json_file: Path | None = None) -> None:
    """Measure compiled steps, training processes and a beam search, print a table of each.

    Args:
        rounds: How often each process trains, in turn with the others, after its first time.
        core: The one core that everything runs on.
        json_file: Where to write the bytes and seconds, if anywhere.
    """
    os.sched_setaffinity(0, {core})  # inherited by the processes begun from here on
    systems = start({name: partial(load_measured, load) for name, load in LOADERS.items()})
    peaks, _ = time_in_turn(systems, (SIZE, DROPOUT), rounds)
    stop(systems)
    steps = {
        name: {str(dropout): compiled_step(dropout, **fields) for dropout in DROPOUTS}
        for name, fields in track(SETTINGS_OF.items(), "compiling")
    }
    search = beam_search(rounds)
    versions = {name: version(name) for name in ("jax", "torch")}
    console = Console()
    for table in (step_table(steps), process_table(peaks), search_table(search)):
        console.print(table)
    console.print(f"{processor()}. {versions}")
    if json_file is not None:
        record = {"processor": processor(), "versions": versions}
        record |= {"compiled steps": steps, "processes": peaks, "beam search": search}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
