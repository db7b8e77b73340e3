"""`jax-transformer export`: a model for a program that knows nothing of this library."""

import os
from pathlib import Path
from typing import Literal

from jax_transformer.errors import InputError, check_installed
from jax_transformer.storage.hub import local_folder
from jax_transformer.translation.model_folder import load


def export(
    model: Path,
    output: Path,
    /,
    to: Literal["ctranslate2"] = "ctranslate2",
    quantization: Literal["float32", "float16", "int8"] = "float32",
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> None:
    """Write a model for another program, and prove it: both translate the same sources.

    In float32 each token must be equal, else nothing is written. In float16 and int8 the number of
    equal translations is printed.

    Args:
        model: As for translate.
        output: Folder to write; it must not exist.
        to: The program.
        quantization: Type of the weights.
        source_lang: As for translate.
        target_lang: As for translate.
    """
    check_installed("ctranslate2")
    if os.path.lexists(output):
        raise InputError(f"{output}: exists already; name another output")
    from jax_transformer.export.ctranslate2_folder import export_ctranslate2

    folder = local_folder(model)
    loaded = load(folder, source_lang=source_lang, target_lang=target_lang)
    print(f"{output} written: {export_ctranslate2(loaded, output, quantization)}")
