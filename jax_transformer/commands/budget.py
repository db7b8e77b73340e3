"""`jax-transformer budget`: estimates memory, FLOPs and time of training."""

import dataclasses
from pathlib import Path
from typing import Literal

from rich.console import Console

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.huggingface import read_model_config
from jax_transformer.errors import InputError
from jax_transformer.training import budget as estimate


def budget(
    size: Literal["base", "big"] = "base",
    preset: str = "vaswani2017",
    model: Path | None = None,
    vocab_size: int | None = None,
    d_model: int | None = None,
    num_heads: int | None = None,
    d_ff: int | None = None,
    num_encoder_layers: int | None = None,
    num_decoder_layers: int | None = None,
    mesh: str = "data=1",
    batch_rows: int = 256,
    length: int = 96,
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16",
    steps: int | None = None,
    utilisation: float = 0.4,
    freeze: tuple[str, ...] = (),
) -> None:
    """Print the estimated memory, FLOPs and time of training a model; nothing is run.

    The batch is by default the paper's, about 25,000 source and 25,000 target tokens (section 5.1).

    Args:
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
        mesh: Sizes of the mesh's axes, as in data=8,fsdp=4; their product is the devices.
        batch_rows: Rows of the batch on all devices together.
        length: Length of a source and of a target, in tokens.
        compute_dtype: Dtype that the model computes in; parameters and optimizer are float32.
        steps: Steps of the training; if None, the paper's.
        utilisation: Share of the peak of a device that is reached.
        freeze: Patterns of parameters that are not trained: they have no gradients and no moments.
    """
    given = {
        "src_vocab_size": vocab_size,
        "tgt_vocab_size": vocab_size,
        "d_model": d_model,
        "num_heads": num_heads,
        "d_ff": d_ff,
        "num_encoder_layers": num_encoder_layers,
        "num_decoder_layers": num_decoder_layers,
    }
    given = {name: value for name, value in given.items() if value is not None}
    fields, paper_steps = estimate.SIZES[size]
    if model is None:
        config = TransformerConfig.preset(preset, **fields | given)
    elif (size, preset) == ("base", "vaswani2017"):
        config = dataclasses.replace(read_model_config(model), **given)
    else:
        raise InputError(f"--model {model} takes the place of --size and --preset; leave them out")
    workload = estimate.Workload(batch_rows, length, compute_dtype, mesh, freeze)
    shown = estimate.show(config, workload, paper_steps if steps is None else steps, utilisation)
    Console(width=100).print(shown)
