"""`jax-transformer export`: a model for a program that knows nothing of this library."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

from jax_transformer.adapters import lora
from jax_transformer.commands.translate import ModelArguments
from jax_transformer.errors import InputError, check_installed
from jax_transformer.storage.hub import local_folder
from jax_transformer.translation.model_folder import load

# The libraries that a target needs beside those of every command.
NEEDED = {
    "ctranslate2": ["ctranslate2"],
    "onnx": ["onnxscript", "onnxruntime", "torch"],
    "stablehlo": ["flatbuffers"],
    "torch": ["torch"],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ModelArguments):
    """Write a model for another program, and prove it: both translate the same sources.

    In float32 each token must be equal, else nothing is written. In narrower types the number of
    equal translations is printed.

    Attributes:
        output: Folder to write; it must not exist.
        to: The program.
        quantization: Type of the weights, for ctranslate2.
        beam: Hypotheses of the search with beams, for stablehlo; without it, the model's number, or
            4 where that is greedy search.
    """

    output: Path
    to: Literal["ctranslate2", "onnx", "stablehlo", "torch"] = "ctranslate2"
    quantization: Literal["float32", "float16", "int8"] = "float32"
    beam: int | None = None


def export(arguments: Arguments) -> None:
    """Export a model, and print how many translations are equal."""
    to, output = arguments.to, arguments.output
    quantization, beam = arguments.quantization, arguments.beam
    if to != "ctranslate2" and quantization != "float32":
        raise InputError(f"--quantization {quantization} is for --to ctranslate2; leave it out")
    if to != "stablehlo" and beam is not None:
        raise InputError(f"--beam {beam} is for --to stablehlo; leave it out")
    for module in NEEDED[to]:
        check_installed(module)
    if os.path.lexists(output):
        raise InputError(f"{output}: exists already; name another output")
    folder = local_folder(arguments.model)
    source, target = arguments.source_lang, arguments.target_lang
    if to == "torch":
        from jax_transformer.runs.model_settings import read_initial_model

        model, origin, report = read_initial_model(folder, source_lang=source, target_lang=target)
        model = model.for_text(str(folder))
        for line in report:
            print(line)
    else:
        model = load(folder, source_lang=source, target_lang=target).for_text(str(folder))
    model = model._replace(params=lora.merge(model.with_adapter(arguments.adapter).params))
    if to == "torch":
        from jax_transformer.export.torch_folder import export_torch

        proven = export_torch(model, output, origin)
    elif to == "onnx":
        from jax_transformer.export.onnx_folder import export_onnx

        proven = export_onnx(model, output)
    elif to == "stablehlo":
        from jax_transformer.export.stablehlo_folder import export_stablehlo

        proven = export_stablehlo(model, output, beam)
    else:
        from jax_transformer.export.ctranslate2_folder import export_ctranslate2

        proven = export_ctranslate2(model, output, quantization)
    print(f"{output} written: {proven}")
