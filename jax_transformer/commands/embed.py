"""`jax-transformer embed`: one vector for each line of a file."""

import dataclasses
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from jax_transformer.embedding.embedder import Embedder
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.writing import check_new_file, staged_file
from jax_transformer.text.text_files import count_lines, decode_lines, open_text


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write the vectors of the lines of a file: those of jax_transformer.Embedder.

    Attributes:
        model: Folder of a model with an encoder, or of sentence-transformers.
        input: File of texts, one a line; it must be named.
        output: File to write, float32 [lines, d] for numpy.load; it must be named.
        prompt: Put before every line; without it, the model's default prompt.
        source_lang: Code of the language of the lines, for a model with language codes.
        special_tokens: Pool the tokens that the tokenizer puts around a line, too.
        max_length: Most tokens of a line; longer lines are cut. Without it, the model's limit.
        dtype: Type of the encoder's parameters, "float32" or "bfloat16".
        mesh: Axes of the devices, for example data=4.
        overwrite: Replace an existing output.
    """

    model: str
    input: Path | None = None
    output: Path | None = None
    prompt: str | None = None
    source_lang: str | None = None
    special_tokens: bool = True
    max_length: int | None = None
    dtype: str | None = None
    mesh: str | None = None
    overwrite: bool = False


def embed(arguments: Arguments) -> None:
    """Embed the lines of a file."""
    source, output = arguments.input, arguments.output
    if source is None or output is None or output.suffix != ".npy":
        raise InputError(
            "name the texts by --input FILE, and by --output a file whose name ends in .npy"
        )
    check_new_file(output, arguments.overwrite, "output")
    if not (number := count_lines(source)):
        raise InputError(f"{source}: has no line of text; name another file")
    embedder = Embedder(
        arguments.model,
        special_tokens=arguments.special_tokens,
        source_lang=arguments.source_lang,
        dtype=arguments.dtype,
        max_length=arguments.max_length,
        mesh=None if arguments.mesh is None else make_mesh(arguments.mesh),
    )
    with open_text(source) as file, staged_file(output) as staged:
        lines = decode_lines(file, str(source))
        vectors = embedder.stream(lines, arguments.prompt)
        first = next(vectors)
        shape = (number, len(first))
        array = np.lib.format.open_memmap(staged, "w+", np.float32, shape)
        array[0] = first
        shown = track(vectors, "embedding", number - 1, console=Console(stderr=True))
        for index, vector in enumerate(shown, start=1):
            array[index] = vector
        array.flush()
    print(f"{output} written: float32 {[*shape]}")
