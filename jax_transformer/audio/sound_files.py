"""Sounds of files and arrays as blocks of mono samples at 16,000 Hz, read as they are needed.

A damaged or cut FLAC or MP3 is refused. Another file that ends early is read up to its end: the
length in its header may be a guess, as that of a WAV from a pipe is.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Shaped

from jax_transformer.audio.log_mel import SAMPLE_RATE
from jax_transformer.errors import InputError, naming_the_extra, shorten
from jax_transformer.storage.reading import errors_naming, open_regular

BLOCK = 2**16  # samples of each channel that are read at once
MOST_CHANNELS = 256
RATES = range(1000, 768_001)  # Hz
LOUDEST = 100  # full scale is 1: beyond are integers that were not divided by their range
SCALES = {"uint8": (128.0, 2.0**7), "int16": (0.0, 2.0**15), "int32": (0.0, 2.0**31)}
SCALES |= dict.fromkeys(("float16", "float32", "float64"), (0.0, 1.0))  # middle and full scale
REMEDY = "fetch it again, or convert it: ffmpeg -i FILE sound.wav"


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound of a file or of an array; `open_sound` makes it.

    Attributes:
        name: What messages call it: the path, or for example "array 3".
        source: The file, or the samples, [samples, channels].
        rate: Sampling rate of the source, in Hz.
        seconds: Its length, which the header of some files only estimates.
    """

    name: str
    source: Path | Shaped[np.ndarray, "samples channels"] = field(repr=False)
    rate: int
    seconds: float

    def blocks(self) -> Iterator[Float32[np.ndarray, " samples"]]:
        """Yield the sound from its start: the mean of its channels, [samples], at 16,000 Hz.

        Raises:
            InputError: If a file cannot be decoded, or a sample is not finite or above 100.
        """
        is_file, resampler, start = isinstance(self.source, Path), None, 0
        if self.rate != SAMPLE_RATE:
            with naming_the_extra(f"{self.name} has another rate than {SAMPLE_RATE:,} Hz and"):
                import soxr
            resampler = soxr.ResampleStream(self.rate, SAMPLE_RATE, 1, "float32", "HQ")
        for block in _file_blocks(self.source) if is_file else _array_blocks(self.source):
            if not np.abs(block).max() <= LOUDEST:  # or it is NaN
                place = (np.abs(block) <= LOUDEST).all(axis=1).argmin()
                raise InputError(
                    f"{self.name}: {block[place].tolist()} at {(start + place) / self.rate:.4f} s "
                    "must be finite and from -1 to 1: divide integers by their range"
                )
            start, mono = start + len(block), block.mean(axis=1)
            yield resampler.resample_chunk(mono) if resampler else mono
        if resampler:
            yield resampler.resample_chunk(np.zeros(0, np.float32), last=True)


def open_sound(
    source: str | os.PathLike[str] | np.ndarray | tuple[np.ndarray, int], name: str = "array"
) -> Sound:
    """Return a sound, after a look at its header or shape.

    Args:
        source: A file (WAV, FLAC, OGG, MP3, and what else libsndfile reads), samples at 16,000 Hz,
            [samples] or [samples, channels], or a pair of samples and their rate in Hz, as
            `soundfile.read` returns it. Integers (uint8, int16, int32) have their type's range.
        name: What messages call an array.

    Raises:
        InputError: If it is no sound, is empty, or its rate, channels or dtype cannot be used.
    """
    if isinstance(source, str | os.PathLike):
        name, source, dtype = str(source), Path(source), "float32"
        with _opened(source) as (file, _):
            rate, shape = file.samplerate, (file.frames, file.channels)
    else:
        is_pair = isinstance(source, tuple) and len(source) == 2
        source, rate = source if is_pair else (source, SAMPLE_RATE)
        shape, dtype = (), type(source).__name__
        if hasattr(source, "__array__"):
            source = np.asarray(source)
            source = source[:, None] if source.ndim == 1 else source
            shape, dtype = source.shape, source.dtype.name
    fault = None
    if not isinstance(rate, int | np.integer) or rate not in RATES:
        fault = f"rate={shorten(rate)} must be a whole number from {RATES[0]:,} to {RATES[-1]:,} Hz"
    elif dtype not in SCALES:
        fault = f"dtype {dtype} must be one of {', '.join(SCALES)}: convert the samples"
    elif len(shape) != 2 or not 1 <= shape[1] <= MOST_CHANNELS:
        fault = f"shape {shape} must be [samples, channels], at most {MOST_CHANNELS} channels"
    elif shape[0] == 0:
        fault = "no samples: leave it out"
    if fault:
        raise InputError(f"{name}: {fault}")
    return Sound(name, source, int(rate), shape[0] / rate)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, io.BufferedReader]]:
    """Open a file as `soundfile.SoundFile`, and as the bytes that this reads."""
    with naming_the_extra(f"{path}: a sound file"):
        import soundfile
    with open_regular(path, "cannot be read") as raw:
        fault = f"is no sound that libsndfile reads; {REMEDY}" if raw.peek(1) else "has no bytes"
        with errors_naming(path, fault, RuntimeError):
            file = soundfile.SoundFile(raw)
        with file:
            yield file, raw


def _file_blocks(path: Path) -> Iterator[Float32[np.ndarray, "samples channels"]]:
    count = 0
    with _opened(path) as (file, raw), errors_naming(path, f"is damaged; {REMEDY}", RuntimeError):
        while len(block := file.read(BLOCK, "float32", always_2d=True)):
            count += len(block)
            yield block
        # libsndfile estimates the length of an MP3 whose header lacks it, and reads no further.
        following = raw.read(3) if file.format == "MP3" else b""
    if count < 0.99 * file.frames or following >= b"\xff\xe0" or following == b"ID3":
        found, said = count / file.samplerate, file.frames / file.samplerate
        what = f"{found:.1f} s" if count < file.frames else "more"
        raise InputError(f"{path} has {what}, and {said:.1f} s as its header says; {REMEDY}")


def _array_blocks(
    samples: Shaped[np.ndarray, "samples channels"],
) -> Iterator[Float32[np.ndarray, "samples channels"]]:
    middle, full = SCALES[samples.dtype.name]
    for start in range(0, len(samples), BLOCK):
        with np.errstate(over="ignore"):  # what is infinite in float32 is refused
            yield ((samples[start : start + BLOCK] - middle) / full).astype(np.float32)
