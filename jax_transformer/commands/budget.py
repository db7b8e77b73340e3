"""`jax-transformer budget`: estimates memory, FLOPs and time of training."""

import dataclasses
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.huggingface import read_model_config
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import parse_sizes
from jax_transformer.runtime.topologies import topology_devices
from jax_transformer.training import budget as estimate
from jax_transformer.training.config import Batching, Remat


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
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    steps: int | None = None
    utilisation: float = 0.4
    freeze: tuple[str, ...] = ()
    compile: str | None = None
    remat: Remat = "none"
    scan_layers: bool = False
    batching: Batching = "buckets"


def budget(arguments: Arguments) -> None:
    """Print the estimates."""
    names = ("d_model", "num_heads", "d_ff", "num_encoder_layers", "num_decoder_layers", "dropout")
    sizes = {name: getattr(arguments, name) for name in names}
    sizes |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), arguments.vocab_size)
    sizes = {name: value for name, value in sizes.items() if value is not None}
    model, compile, mesh = arguments.model, arguments.compile, arguments.mesh
    fields, paper_steps = estimate.SIZES[arguments.size]
    if model is None:
        config = TransformerConfig.preset(arguments.preset, **fields | sizes)
    elif (arguments.size, arguments.preset) == ("base", "vaswani2017"):
        config = dataclasses.replace(read_model_config(model), **sizes)
    else:
        raise InputError(f"--model {model} takes the place of --size and --preset; leave them out")
    if compile is not None:
        jax.config.update("jax_platforms", "cpu")  # libtpu is asked to compile, not for a TPU
        chips = len(topology_devices(compile))
        mesh = mesh or f"data={chips}"
        parse_sizes(mesh, chips)
    workload = estimate.Workload(
        arguments.batch_rows,
        arguments.length,
        arguments.compute_dtype,
        mesh or "data=1",
        arguments.freeze,
        arguments.scan_layers,
    )
    steps = paper_steps if arguments.steps is None else arguments.steps
    shown = estimate.show(config, workload, steps, arguments.utilisation)
    console = Console(width=100)
    console.print(shown)
    if compile is not None:
        training_config = estimate.training_config_of(
            workload, remat=arguments.remat, batching=arguments.batching
        )
        with Console(stderr=True).status(f"compiling for {compile}; it takes minutes"):
            compiled = estimate.show_compiled(config, training_config, workload, compile)
        console.print(compiled)
