"""`Transcriber`: sounds to text in one call, by a Whisper model (Radford et al. 2022)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jax_transformer.audio.log_mel import HOP, SAMPLE_RATE, LogMelStream
from jax_transformer.audio.sound_files import open_sound
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.checks import check_whole_number
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.hub import local_folder
from jax_transformer.transcription.segments import Segment, Transcript, split_at_times
from jax_transformer.transcription.windows import Options, Task, WindowModel
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import check_dtype

FRAME = HOP / SAMPLE_RATE  # seconds; a time is two


@dataclass
class Listened:
    """A sound of which all before frame `seek` is text."""

    number: int
    name: str
    stream: LogMelStream
    timed: bool
    language: str | None
    seek: int = 0
    tokens: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


class Transcriber:
    """A Whisper model as a function from sounds to text.

        transcriber = jax_transformer.Transcriber("whisper-small")
        (heard,) = transcriber(["speech.flac"])
        heard.text, heard.language, heard.segments

    Args:
        model: A folder, or a name of the hub, as for `Translator`.
        dtype: Type that the parameters are converted to; None keeps theirs.
        batch_size: Windows that are decoded together, each of another sound.
        mesh: The devices, from `make_mesh`; windows are distributed over the axes data and fsdp.

    Raises:
        InputError: As `load`; or the model reads no sound, or its tokenizer is not Whisper's.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | None = None,
        batch_size: int = 8,
        mesh: Mesh | None = None,
    ) -> None:
        check_dtype(dtype)
        check_whole_number("batch_size", batch_size, least=1)
        folder = local_folder(model)
        read = model_folder.read(folder).with_dtype(dtype)
        self.name = str(model)
        self._windows = WindowModel(read, folder, batch_size, mesh or make_mesh())

    def __repr__(self) -> str:
        """Return one line with the model's name and sizes."""
        return f"Transcriber({self.name!r}: {self._windows.model!r})"

    def __call__(self, sounds: Iterable[Any], **options: Any) -> list[Transcript]:
        """Return what each sound says, in order; arguments and errors as of `stream`."""
        return list(self.stream(sounds, **options))

    def stream(
        self,
        sounds: Iterable[Any],
        progress: Callable[[str, float, float], None] | None = None,
        **options: Any,
    ) -> Iterator[Transcript]:
        """Yield what each sound says, in order. A sound that cannot be read has a `fault`.

        A long sound is read in windows, the next one from the end of the last whole segment. Only
        a window of each open sound is in memory.

        Args:
            sounds: Files, arrays [samples] at 16,000 Hz, or pairs of an array and its rate in Hz.
            progress: Is called with the name of a sound, its seconds that are text, and all.
            **options: Fields of `transcription.windows.Options`.

        Raises:
            InputError: An option is unknown, or does not fit the model.
        """
        if isinstance(sounds, str | Path | np.ndarray):
            raise InputError(f"sounds={shorten(sounds)} must be a list of sounds")
        chosen = self._windows.checked(options)
        waiting, running, done, following = enumerate(sounds), [], {}, 0
        while True:
            while len(running) < self._windows.rows and (new := next(waiting, None)) is not None:
                opened = self._open(*new, chosen)
                if isinstance(opened, Transcript):
                    done[new[0]] = opened
                else:
                    running.append(opened)
            while following in done:
                yield done.pop(following)
                following += 1
            if not running:
                return
            together = [one for one in running if one.timed == running[0].timed]
            self._advance(together, chosen)
            for one in together:
                if progress is not None:
                    progress(one.name, FRAME * one.seek, FRAME * one.stream.num_frames)
                if one.seek >= one.stream.num_frames:
                    text = self._windows.model.tokenizer.decode(one.tokens).strip()
                    segments = tuple(one.segments)
                    done[one.number] = Transcript(one.name, text, segments, one.language)
                    running.remove(one)

    def _open(self, number: int, source: Any, options: Options) -> Listened | Transcript:
        name = str(source) if isinstance(source, str | Path) else f"sound {number + 1}"
        bands, frames = self._windows.model.config.source_features, self._windows.frames
        try:
            stream = LogMelStream(open_sound(source, name).blocks, bands, least=frames * HOP)
        except InputError as error:
            return Transcript(name, "", (), fault=str(error))
        timed = options.timestamps or stream.num_frames > frames
        return Listened(number, name, stream, timed, options.language)

    def _advance(self, sounds: Sequence[Listened], options: Options) -> None:
        """Add a window to the text of each sound."""
        windows, tokenizer = self._windows, self._windows.model.tokenizer
        shape = windows.rows, windows.frames, windows.model.config.source_features
        features = np.zeros(shape, np.float32)
        for row, one in zip(features, sounds, strict=False):
            found = one.stream.frames(one.seek, windows.frames)
            row[: len(found)] = found
        placed, languages, silence = windows.listen(features)
        for one, language in zip(sounds, languages, strict=False):
            one.language = one.language or language
        tasks = [Task(one.language, one.timed, (one.number, one.seek)) for one in sounds]
        decoded = windows.decode(placed, silence, tasks, options)
        for one, (tokens, is_silent) in zip(sounds, decoded, strict=True):
            frames, begin = min(windows.frames, one.stream.num_frames - one.seek), one.seek
            parts, passed = split_at_times(tokens, windows.first_time, frames)
            one.seek += frames if is_silent else passed
            for low, high, ids in [] if is_silent else parts:
                times = FRAME * (begin + 2 * low), FRAME * (begin + 2 * high)
                one.segments.append(Segment(*times, tokenizer.decode(ids).strip(), tuple(ids)))
                one.tokens += ids
