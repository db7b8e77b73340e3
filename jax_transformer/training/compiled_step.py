"""The training step as XLA compiles it for a TPU slice, on a machine that has none."""

import dataclasses

import jax
import jax.numpy as jnp
from rich.console import Group
from rich.table import Table

from jax_transformer.config import TransformerConfig
from jax_transformer.runtime.compiled import OutOfMemory, Report, compile_for_topology, report
from jax_transformer.runtime.sharding import make_mesh, row_shards
from jax_transformer.runtime.topologies import data_sheet, topology_devices
from jax_transformer.text.batches import Batch
from jax_transformer.training.budget import Workload, gigabytes, step_flops
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.mesh import sharded_train_step, state_shapes


def training_config_of(workload: Workload, **fields: str | bool) -> TrainingConfig:
    """Return the settings of a step of this size, with other fields replaced."""
    shared = {name: getattr(workload, name) for name in ("compute_dtype", "freeze", "scan_layers")}
    return TrainingConfig(**shared, **fields)


def compile_step(
    config: TransformerConfig, training_config: TrainingConfig, workload: Workload, topology: str
) -> jax.stages.Compiled:
    """Compile `training.mesh.sharded_train_step` for a slice; nothing is run.

    Args:
        config: The shape of the model.
        training_config: How it is trained; its compute dtype counts, and not that of `workload`.
        workload: Rows, length and mesh of the step; rows are added as training adds them.
        topology: As for `topology_devices`.

    Raises:
        InputError: The topology is unknown, or the mesh has not its number of devices.
        OutOfMemory: The step does not fit the memory of a chip.
    """
    mesh = make_mesh(workload.mesh, topology_devices(topology))
    config = dataclasses.replace(config, max_length=max(workload.length, config.max_length))
    parts = row_shards(mesh) * training_config.num_microbatches
    rows = workload.rows + -workload.rows % parts
    ids = jax.ShapeDtypeStruct((rows, workload.length), jnp.int32)
    segments = ids if training_config.batching == "packed" else None
    batch = Batch(ids, ids, ids, segments, segments)
    step = sharded_train_step(mesh, config, training_config)
    return compile_for_topology(step.lower(state_shapes(config, training_config), batch))


def show_compiled(
    config: TransformerConfig, training_config: TrainingConfig, workload: Workload, topology: str
) -> Group:
    """Compile the step and return what XLA says of it as tables; arguments as `compile_step`.

    Raises:
        InputError: As `compile_step`.
    """
    try:
        found = report(compile_step(config, training_config, workload, topology))
    except OutOfMemory as error:
        return Group(
            f"{topology}: the step does not fit: XLA needs at least {gigabytes(error.needed)} of "
            f"{gigabytes(error.available)} ({gigabytes(error.needed - error.available)} too much)"
        )
    return Group(*tables(found, config, workload, topology))


def tables(
    found: Report, config: TransformerConfig, workload: Workload, topology: str
) -> list[Table | str]:
    """Return the report of a step as tables and lines."""
    device, chips = data_sheet(topology), len(topology_devices(topology))
    flops = step_flops(config, workload.rows, workload.length) / chips
    milliseconds = found.total_cycles / device.clock * 1000
    cycles = Table("work", "cycles", "share", title=f"estimated by XLA on a chip of {topology}")
    for name, number in found.cycles.items():
        cycles.add_row(name, f"{number:,}", f"{number / found.total_cycles:.1%}")
    cycles.add_row("all", f"{found.total_cycles:,}", f"{milliseconds:,.1f} ms")
    exchanges = Table("collective", "dtype", "asynchronous", "count", "bytes on a chip")
    for one in found.collectives:
        word = "yes" if one.asynchronous else "no"
        exchanges.add_row(one.kind, one.dtype, word, f"{one.count}", _megabytes(one.num_bytes))
    utilisation = found.utilisation(flops, device.flops_per_cycle)
    without = ", ".join(f"{count} {name}" for name, count in found.unestimated.items())
    return [
        f"{topology}: the step fits: XLA's peak is {gigabytes(found.peak)} of "
        f"{gigabytes(device.memory)} (arguments {gigabytes(found.arguments)}, temporary "
        f"{gigabytes(found.temporary)}); {found.donated} arguments are donated",
        cycles,
        f"estimated utilisation {utilisation:.1%}; collectives carry no estimate"
        + (f", nor do {without}" if without else "")
        + "; nothing was timed",
        exchanges,
    ]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
