"""Programs compiled for TPUs or GPUs that are not there: python -m benchmarks.accelerators.

The training step of the base and the big model of Vaswani et al. 2017 on meshes of a TPU slice or a
host with GPUs, and searches on one device, as XLA compiles them: peak memory beside the computed
budget, kernels, estimated cycles by kind of work, estimated utilisation, collectives. The numbers
are XLA's estimates; nothing is timed. Needs the extra "tpu-compile" or "cuda". A step of 6 + 6
layers compiles in minutes of a processor for a TPU.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from jax_transformer import TransformerConfig, generate
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.transformer import init_params
from jax_transformer.runtime import sharding
from jax_transformer.runtime.topologies import (
    OutOfMemory,
    compile_for_topology,
    data_sheet,
    is_gpu,
    topology_devices,
)
from jax_transformer.training.budget import (
    SIZES,
    Workload,
    budget,
    compile_step,
    step_flops,
    training_config_of,
)
from tests.compiled import GPU_CLOCK, Report, report

VOCABULARY, ROWS, LENGTH = 32_000, 64, 128  # rows on each device
LONG = 2048  # tokens a row; as many tokens a device


@dataclasses.dataclass(frozen=True)
class Task:
    """A training step to compile.

    Attributes:
        model: A name of `budget.SIZES`.
        layers: Layers of each stack.
        mesh: Sizes of the mesh's axes.
        dropout: Rate of dropout.
        scan_layers: As `TrainingConfig.scan_layers`.
        length: Tokens of a row on each side; a device has `ROWS * LENGTH` tokens.
    """

    model: str
    layers: int
    mesh: str
    dropout: float = 0.1
    scan_layers: bool = False
    length: int = LENGTH

    def __str__(self) -> str:
        loop = ", scan" if self.scan_layers else ""
        length = f", {self.length} tokens a row" if self.length != LENGTH else ""
        layers = f"{self.layers}+{self.layers}"
        return f"{self.model} {layers}, {self.mesh}, dropout {self.dropout}{loop}{length}"


def tasks(chips: int, quick: bool) -> list[Task]:
    """Return the steps for a slice with this number of chips; `quick` leaves out deep models."""
    data = f"data={chips}"
    shallow = [Task("base", 1, data), Task("base", 1, data, length=LONG)]
    if chips % 4 == 0:
        shallow.append(Task("base", 1, f"data={chips // 2},fsdp=2"))
        shallow.append(Task("base", 1, f"data={chips // 4},fsdp=2,tensor=2"))
    if quick:
        return shallow
    deep = [Task("base", 6, data), Task("base", 6, data, dropout=0.0)]
    return [*deep, *shallow, Task("big", 6, data, scan_layers=True)]


def configuration(task: Task) -> TransformerConfig:
    """Return the model of a task."""
    fields = SIZES[task.model][0] | {
        "src_vocab_size": VOCABULARY,
        "tgt_vocab_size": VOCABULARY,
        "num_encoder_layers": task.layers,
        "num_decoder_layers": task.layers,
        "dropout": task.dropout,
    }
    return TransformerConfig.preset("vaswani2017", **fields)


def compile_task(task: Task, topology: str) -> dict[str, Any]:
    """Compile a step; return what XLA says of it, and the computed budget."""
    config, chips = configuration(task), len(topology_devices(topology))
    shards = chips // sharding.parse_sizes(task.mesh, chips)[2]
    rows = max(ROWS * LENGTH // task.length, 1) * shards
    workload = Workload(rows, task.length, mesh=task.mesh, scan_layers=task.scan_layers)
    computed = budget(config, workload).total("none")
    started = time.process_time()
    result = {"task": str(task), "computed": computed, "tokens": rows * task.length / chips}
    try:
        step = compile_step(config, training_config_of(workload), workload, topology)
    except OutOfMemory as error:
        return result | {"needed": error.needed, "available": error.available}
    found = report(step)
    flops = step_flops(config, rows, task.length) / chips
    return result | {
        "processor_seconds": time.process_time() - started,
        "report": found,
        "utilisation": found.utilisation(flops, data_sheet(topology).flops / clock_of(topology)),
    }


def clock_of(topology: str) -> float:
    """Return the cycles a second of the estimates."""
    return GPU_CLOCK if is_gpu(topology) else data_sheet(topology).clock


def compile_search(beam_size: int, topology: str) -> Report:
    """Compile a search of the base model, 2 + 2 layers, for one chip: 32 rows, 64 + 64 tokens."""
    config = configuration(Task("base", 2, "data=1", dropout=0.0))
    device = topology_devices(topology)[0]
    execution = execution_on(device, "bfloat16", config.head_dim, kind=SearchExecution)

    def run(params: Any, src: jax.Array) -> Any:
        options = {"beam_size": beam_size, "execution": execution}
        return generate(params, config, src, max_new_tokens=64, **options)

    def place(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    params = jax.tree.map(lambda leaf: place(leaf.shape, jnp.bfloat16), params)
    lowered = jax.jit(run).lower(params, place((32, 64), jnp.int32))
    return report(compile_for_topology(lowered, topology))


def show(console: Console, result: dict[str, Any], clock: float) -> None:
    """Print what XLA says of a step."""
    if "needed" in result:
        sizes = f"{result['needed'] / 1e9:.2f} GB of {result['available'] / 1e9:.2f} GB"
        console.print(f"{result['task']}: does not fit, XLA needs at least {sizes}")
        return
    found = result["report"]
    total = found.total_cycles
    console.print(
        f"\n{result['task']}: peak {found.peak / 1e9:.2f} GB (arguments "
        f"{found.arguments / 1e9:.2f}, temporary {found.temporary / 1e9:.2f}); computed "
        f"{result['computed'] / 1e9:.2f} GB, {result['computed'] / found.peak:.2f} of it\n"
        f"{total:,} cycles ({total / clock * 1000:.1f} ms), {total / result['tokens']:,.0f} a "
        f"token; estimated utilisation {result['utilisation']:.1%}; {found.kernels} operations; "
        f"without an estimate: {found.unestimated or 'nothing'}; compiled in "
        f"{result['processor_seconds']:.0f} s"
    )
    console.print(cycles_table(found.cycles))
    for one in found.collectives:
        word = "asynchronous" if one.asynchronous else "synchronous"
        size = f"{one.num_bytes / 1e6:.2f} MB"
        console.print(f"  {one.count} {word} {one.kind} in {one.dtype}: {size}")


def cycles_table(cycles: dict[str, int]) -> Table:
    """Return cycles by kind of work as a table."""
    table = Table("work", *cycles)
    table.add_row("k cycles", *(f"{number / 1000:,.0f}" for number in cycles.values()))
    whole = sum(cycles.values())
    table.add_row("share", *(f"{number / whole:.1%}" for number in cycles.values()))
    return table


def main(topology: str = "v5e:2x4", quick: bool = False, json_file: Path | None = None) -> None:
    """Compile the programs and print what XLA estimates; nothing is timed.

    Args:
        topology: The slice, as for `jax-transformer budget --compile`.
        quick: Leave out the models of 6 + 6 layers.
        json_file: Where to write the numbers, if anywhere.
    """
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=120)
    clock, chips = clock_of(topology), len(topology_devices(topology))
    console.print(
        f"{topology}, bfloat16, {ROWS} rows of {LENGTH} a device, vocabulary {VOCABULARY:,}; "
        f"compiled by jax {jax.__version__}, estimated at {clock / 1e9:g} GHz, not timed"
    )
    results = []
    for task in tasks(chips, quick):
        results.append(compile_task(task, topology))
        show(console, results[-1], clock)
    for name, beam_size in (("greedy", 1), ("beam of 4", 4)):
        found = compile_search(beam_size, topology)
        (loop,) = found.loops
        total = sum(loop.cycles.values())
        console.print(
            f"\n{name}, base 2+2, one chip, 32 rows, 64 + 64 tokens: {total:,} cycles a step, "
            f"{found.total_cycles - total:,} before; {loop.kernels} operations a step; "
            f"peak {found.peak / 1e6:,.0f} MB"
        )
        console.print(cycles_table(loop.cycles))
        results.append({"task": name, "report": found})
    if json_file is not None:
        readable = [
            result | ({"report": result["report"]._asdict()} if "report" in result else {})
            for result in results
        ]
        json_file.write_text(json.dumps(readable, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
