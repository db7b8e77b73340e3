"""`jax-transformer budget`: estimates memory, FLOPs and time of training."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import declarations
from jax_transformer.convert.huggingface import read_model_config
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import parse_sizes
from jax_transformer.runtime.topologies import (
    DEVICES,
    OutOfMemory,
    data_sheet,
    is_gpu,
    topology_devices,
)
from jax_transformer.training import budget as estimate
from jax_transformer.training.config import Batching, ComputeDtype, Count, Remat, TrainingConfig

TPU_COLUMNS = 128  # of a matrix unit


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print the estimated memory, FLOPs and time of training a model; nothing is run.

    With --compile the step is also compiled for a TPU slice, which takes minutes and no TPU, and
    XLA's own memory and FLOPs are printed.

    The batch is by default the paper's, about 25,000 source and 25,000 target tokens (section 5.1).

    Attributes:
        size: Model of Vaswani et al. 2017, table 3; the sizes below replace its own.
        preset: The described implementation, in its own sizes.
        model: A Hugging Face folder of a known family or its config.json, or the folder of a model
            of this library, in the place of size and preset; no weights are read.
        vocab_size: Entries of both vocabularies.
        d_model: Width of the residual stream.
        num_heads: Attention heads.
        d_ff: Inner width of the feed-forward networks.
        num_encoder_layers: Layers of the encoder.
        num_decoder_layers: Layers of the decoder.
        dropout: Probability of dropout; without it, the preset's.
        mesh: Sizes of the mesh's axes, for example data=8,fsdp=4; their product is the number of
            devices. Without it, data takes the devices of --compile, or is 1.
        batch_rows: Rows of the batch on all devices together.
        length: Length of a source and of a target, in tokens.
        compute_dtype: Dtype that the model computes in; parameters and optimizer are float32.
        steps: Steps of the training; without it, the paper's.
        utilisation: Share of the peak of a device that is reached.
        freeze: Patterns of parameters that are not trained: they have no gradients and no moments.
        lora_rank: Rank of an adapter (LoRA), which alone is trained then.
        lora_targets: Patterns of the products that the adapter changes.
        compile: What to compile the step for: a TPU slice, for example v5e:2x4, v4:2x2x1 or
            v6e:1x1, or NVIDIA GPUs, for example H100:8.
        remat: With --compile, what the backward pass recomputes to save memory.
        scan_layers: Whether the layers are one loop, which keeps more.
        batching: With --compile, whether the rows are buckets or packed pairs.
    """

    size: Literal["base", "big"] = "base"
    preset: str = "vaswani2017"
    model: Path | None = None
    vocab_size: int | None = None
    d_model: int | None = None
    num_heads: int | None = None
    d_ff: int | None = None
    num_encoder_layers: int | None = None
    num_decoder_layers: int | None = None
    dropout: float | None = None
    mesh: str | None = None
    batch_rows: int = 256
    length: int = 96
    compute_dtype: ComputeDtype = "bfloat16"
    steps: Count | None = None
    utilisation: Annotated[float, Meta(gt=0, le=1)] = 0.4
    freeze: tuple[str, ...] = ()
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = TrainingConfig.lora_targets
    compile: str | None = None
    remat: Remat = "none"
    scan_layers: bool = False
    batching: Batching = "buckets"


def budget(arguments: Arguments) -> None:
    """Print the estimates."""
    config, topology, mesh = _model(arguments), arguments.compile, arguments.mesh
    if topology is not None:
        jax.config.update("jax_platforms", "cpu")  # libtpu is asked to compile, not for a TPU
        chips = len(topology_devices(topology))
        mesh = mesh or f"data={chips}"
        parse_sizes(mesh, chips)
    training = TrainingConfig(
        compute_dtype=arguments.compute_dtype,
        freeze=arguments.freeze,
        lora_rank=arguments.lora_rank,
        lora_targets=arguments.lora_targets,
        remat=arguments.remat,
        scan_layers=arguments.scan_layers,
        batching=arguments.batching,
    )
    workload = estimate.Workload(arguments.batch_rows, arguments.length, mesh or "data=1", training)
    steps = estimate.SIZES[arguments.size][1] if arguments.steps is None else arguments.steps
    cost = estimate.budget(config, workload)
    console = Console(width=100)
    console.print(_memory_table(cost, workload))
    console.print(_time_table(cost, workload, steps, arguments.utilisation))
    if topology is not None:
        with Console(stderr=True).status(f"compiling for {topology}; it takes minutes"):
            compiled = _compiled(config, workload, topology)
        console.print(compiled)


def _model(arguments: Arguments) -> TransformerConfig:
    declared, size = vars(arguments).items(), arguments.vocab_size
    sizes = {name: value for name, value in declared if name in declarations(TransformerConfig)}
    named = {"src_vocab_size": size, "tgt_vocab_size": size, **sizes}
    sizes = {name: value for name, value in named.items() if value is not None}
    if arguments.model is None:
        paper_sizes, _ = estimate.SIZES[arguments.size]
        return TransformerConfig.preset(arguments.preset, **paper_sizes | sizes)
    if (arguments.size, arguments.preset) != (Arguments.size, Arguments.preset):
        raise InputError(
            f"--model {arguments.model} takes the place of --size and --preset; leave them out"
        )
    return dataclasses.replace(read_model_config(arguments.model), **sizes)


def _memory_table(cost: estimate.Budget, workload: estimate.Workload) -> Table:
    table = Table(
        "on each device",
        *(f"remat {remat}" for remat in cost.activations),
        title=f"{cost.num_parameters:,} parameters; {cost.rows} x {workload.length} tokens a "
        f"side in {workload.training.compute_dtype} on {cost.num_devices} devices "
        f"({workload.mesh})",
    )
    for name in ("parameters", "gradients", "adam_moments", "loss"):
        table.add_row(name.replace("_", " "), *[_gigabytes(getattr(cost, name))] * 3)
    table.add_row("activations", *map(_gigabytes, cost.activations.values()))
    table.add_row("total", *(_gigabytes(cost.total(remat)) for remat in cost.activations))
    return table


def _time_table(
    cost: estimate.Budget, workload: estimate.Workload, steps: int, utilisation: float
) -> Table:
    tokens = cost.rows * workload.length
    table = Table(
        f"{cost.num_devices} x",
        "a step",
        f"{steps:,} steps",
        "target tokens/s",
        "fits with remat",
        title=f"{cost.flops:.3g} FLOPs a step, {cost.flops / tokens / 1e6:,.0f} million a "
        f"target token; by data sheet, at {utilisation:.0%} of the peak",
    )
    for name, device in DEVICES.items():
        seconds = cost.seconds(device, utilisation)
        fitting = [remat for remat in cost.activations if cost.total(remat) <= device.memory]
        table.add_row(
            name,
            f"{seconds * 1000:,.1f} ms",
            f"{steps * seconds / 3600:,.2f} h",
            f"{tokens / seconds:,.0f}",
            ", ".join(fitting) or "no",
        )
    return table


def _compiled(config: TransformerConfig, workload: estimate.Workload, topology: str) -> str:
    try:
        compiled = estimate.compile_step(config, workload, topology)
    except OutOfMemory as error:
        return (
            f"{topology}: the step does not fit: XLA needs at least {_gigabytes(error.needed)} of "
            f"{_gigabytes(error.available)} ({_gigabytes(error.needed - error.available)} too much)"
        )
    memory, device = compiled.memory_analysis(), data_sheet(topology)
    counted = advice = ""
    if not is_gpu(topology):
        counted = f"XLA counts {compiled.cost_analysis()['flops']:.3g} FLOPs on a chip; "
        if config.head_dim < TPU_COLUMNS:
            advice = (
                f". Heads of {config.head_dim} leave columns of the matrix unit idle: where rows "
                f"are long, fewer heads of {TPU_COLUMNS} take fewer cycles"
            )
    return (
        f"{topology}: the step fits: XLA's peak is {_gigabytes(memory.peak_memory_in_bytes)} of "
        f"{_gigabytes(device.memory)} (arguments {_gigabytes(memory.argument_size_in_bytes)}, "
        f"temporary {_gigabytes(memory.temp_size_in_bytes)}); {counted}nothing was timed{advice}"
    )


def _gigabytes(size: float | int) -> str:
    return f"{size / 1e6:,.2f} MB" if 0 < size < 1e7 else f"{size / 1e9:,.2f} GB"
