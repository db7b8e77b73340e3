"""`jax-transformer transcribe`: the text of sounds, printed or as a file for each."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from jax_transformer.commands.compilation_cache import keep_compilations
from jax_transformer.decoding.generation_config import Count
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.folder import check_writable
from jax_transformer.storage.writing import exists_already, staged_file
from jax_transformer.transcription.segments import Format
from jax_transformer.transcription.transcriber import Options, Transcriber


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write what is said in sound files (wav, flac, ogg, mp3): their text, or subtitles.

    Without --output the texts are printed. A file that cannot be read is named, and the others are
    transcribed; the exit code is then 1.

    Attributes:
        model: Folder of a Whisper model, or its name on the Hugging Face hub.
        sounds: The files.
        output: Folder for a file of each sound, named as it.
        format: "txt", "srt" and "vtt" (subtitles), or "json" with all that is known.
        batch_size: Windows that are decoded together, each of another file.
        dtype: Type to compute in; without it, that of the parameters.
        mesh: Axes of the devices, for example data=4.
        overwrite: Replace existing files.
    """

    model: Path
    sounds: tuple[Path, ...]
    output: Path | None = None
    format: Format = "txt"
    batch_size: Count = 8
    dtype: Literal["float32", "bfloat16"] | None = None
    mesh: str | None = None
    overwrite: bool = False
    listening: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"options": Options}
    )


def transcribe(arguments: Arguments) -> None:
    """Transcribe sounds."""
    output, form = arguments.output, arguments.format
    files = [output / f"{s.stem}.{form}" for s in arguments.sounds] if output else []
    for file in files:
        if files.count(file) > 1:
            raise InputError(f"{file} would be written for several sounds; rename one of them")
        if os.path.lexists(file) and not arguments.overwrite:
            raise exists_already(file)
    if output:
        check_writable(output)
        output.mkdir(exist_ok=True)
    keep_compilations()
    mesh = make_mesh(arguments.mesh or "data=-1")
    transcriber = Transcriber(
        arguments.model, dtype=arguments.dtype, batch_size=arguments.batch_size, mesh=mesh
    )
    console, faults = Console(stderr=True, markup=False, highlight=False, soft_wrap=True), 0
    with Progress(console=console, transient=True) as progress:
        bars: dict[str, Any] = {}

        def show(name: str, done: float, total: float) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], completed=done)

        found = transcriber.stream(arguments.sounds, show, **arguments.listening)
        for index, transcript in enumerate(found):
            if transcript.fault is not None:
                faults += 1
                console.print(f"error: {transcript.fault}")
            elif output:
                with staged_file(files[index]) as staged:
                    staged.write_text(transcript.written(form), encoding="utf-8")
            else:
                print(transcript.written(form), end="")
    if faults:
        raise InputError(f"{faults} of {len(arguments.sounds)} sounds cannot be read")
