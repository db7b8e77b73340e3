"""Log-mel features of sounds (Radford et al. 2022, section 2.2), in numpy and in JAX.

Samples are mono, at 16,000 Hz, from -1 to 1. A frame begins each 10 ms and sees 25 ms. A sound of
fewer than 201 samples, which its ends need, is continued with zeros.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64

from jax_transformer.errors import InputError, shorten

SAMPLE_RATE = 16_000  # Hz
WINDOW = 400  # samples
HOP = 160  # samples from one window to the next
REACH = WINDOW // 2  # samples of a window on each side of its middle
MOST_BANDS = 128  # of many more, some would lie between two frequencies of the spectrum
Blocks = Iterable[Float[np.ndarray, " samples"]]
Bands = Float[Array | np.ndarray, "... frames bands"]


def mel_filters(bands: int) -> Float64[np.ndarray, "201 bands"]:
    """Return the weight of each frequency of a spectrum in each mel band, [frequencies, bands].

    A band is a triangle between the middles of its neighbours, with an area of 1 Hz. The mel scale
    is that of Slaney 1998, "Auditory Toolbox": logarithmic above 1,000 Hz, which is 15 mel.

    Args:
        bands: Number of mel bands, 80 or 128.

    Raises:
        InputError: If `bands` is no number from 1 to 128; so do all functions here.
    """
    if bands not in range(1, MOST_BANDS + 1):
        raise InputError(f"bands={shorten(bands)} must be from 1 to {MOST_BANDS}: Whisper has 80")
    octave = np.log(6.4) / 27  # growth of the logarithm of a frequency, per mel
    mels = np.linspace(0, 15 + np.log(SAMPLE_RATE / 2 / 1000) / octave, bands + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(octave * (mels - 15)))  # Hz
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    frequencies = np.linspace(0, SAMPLE_RATE / 2, REACH + 1)[:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


def log_mel(
    samples: Float[np.ndarray, " samples"], bands: int
) -> Float32[np.ndarray, "frames bands"]:
    """Return the features of one sound, [frames, bands], as WhisperFeatureExtractor computes them.

    Args:
        samples: The sound, [samples]; 160 of them give a frame. The sums are in float64.
        bands: Number of mel bands, 80 or 128.
    """
    log_bands = np.concatenate([*_log_bands_of([samples], bands)])
    return _scaled(log_bands, log_bands.max()).astype(np.float32)


@functools.partial(jax.jit, static_argnames="bands")
def log_mel_features(
    samples: Float[Array, "batch samples"], bands: int
) -> Float[Array, "batch frames bands"]:
    """Return the features of each sound, [batch, frames, bands], in the dtype of the samples.

    The Fourier transform in float32 rounds all frequencies of a window by 1e-7 of the loudest. So
    the features of noise are off by 2e-6, and those of quiet bands beside a loud tone by 2e-4.

    Args:
        samples: The sounds, [batch, samples]; each has its own maximum.
        bands: Number of mel bands, 80 or 128.
    """
    _check_floats(samples)
    samples = jnp.pad(samples, ((0, 0), (0, max(0, REACH + 1 - samples.shape[1]))))
    samples = jnp.pad(samples, ((0, 0), (REACH, REACH)), mode="reflect")
    with jax.default_matmul_precision("highest"):  # a GPU or a TPU would round its factors
        log_bands = _log_bands(samples, bands, jnp)
    return _scaled(log_bands, log_bands.max(axis=(1, 2), keepdims=True))


class LogMelStream:
    """The features of a sound of any length, read forwards: those of `log_mel` of the whole.

    The sound is read twice, as each frame depends on the maximum of all. Few frames are in memory.

    Args:
        blocks: Begins the samples anew and returns them in blocks of any sizes: `Sound.blocks`.
        bands: Number of mel bands, 80 or 128.
        least: Number of samples up to which zeros continue a shorter sound; Whisper needs 480,000.

    Attributes:
        num_frames: Number of frames of the sound.
    """

    def __init__(self, blocks: Callable[[], Blocks], bands: int, least: int = 0) -> None:
        self.num_frames, self._peak = 0, -np.inf
        for rows in _log_bands_of(blocks(), bands, least):
            self.num_frames += len(rows)
            self._peak = max(self._peak, rows.max(initial=-np.inf))
        self._coming = _log_bands_of(blocks(), bands, least)
        self._rows, self._start = np.zeros((0, bands), np.float32), 0  # read and not yet passed

    def frames(self, start: int, count: int) -> Float32[np.ndarray, "frames bands"]:
        """Return `count` frames from `start` on, [frames, bands], or fewer at the end of the sound.

        Raises:
            InputError: If an earlier call had a later start.
        """
        if start < self._start:
            raise InputError(f"start={start} is before frame {self._start}: make a new stream")
        self._pass(start)
        while len(self._rows) < count and (rows := next(self._coming, None)) is not None:
            rows = _scaled(rows, self._peak).astype(np.float32)
            self._rows = np.concatenate([self._rows, rows])
            self._pass(start)
        return self._rows[:count].copy()

    def _pass(self, start: int) -> None:
        passed = min(start - self._start, len(self._rows))
        self._rows, self._start = self._rows[passed:], self._start + passed


def _check_floats(samples: Array | np.ndarray) -> None:
    if samples.dtype not in (np.float32, np.float64):
        raise InputError(f"samples of {samples.dtype} must be float32 or float64, from -1 to 1")


def _log_bands_of(blocks: Blocks, bands: int, least: int = 0) -> Iterator[Bands]:
    """Yield `_log_bands` of a whole sound as it is read, its ends being reflected."""
    rest, length, before = np.zeros(0), 0, REACH  # samples from the next window on
    for block in blocks:
        _check_floats(block)
        rest, length = np.concatenate([rest, block]), length + len(block)
        if length > REACH:
            rest, before = np.pad(rest, (before, 0), mode="reflect"), 0
            yield (rows := _log_bands(rest, bands, np))
            rest = rest[len(rows) * HOP :]
    rest = np.pad(rest, (0, max(0, least - length, REACH + 1 - length)))
    yield _log_bands(np.pad(rest, (before, REACH), mode="reflect"), bands, np)


def _log_bands(
    samples: Float[Array | np.ndarray, "... samples"], bands: int, xp: ModuleType
) -> Bands:
    """Return log10 of the bands of all windows but the last; `xp` is numpy or jax.numpy."""
    count = max(0, (samples.shape[-1] - WINDOW) // HOP)
    hops = samples[..., : (count + 2) * HOP].reshape(*samples.shape[:-1], -1, HOP)
    thirds = [hops[..., :-2, :], hops[..., 1:-1, :], hops[..., 2:, : WINDOW - 2 * HOP]]
    hann = np.hanning(WINDOW + 1)[:-1].astype(samples.dtype)  # periodic
    spectrum = xp.fft.rfft(xp.concatenate(thirds, axis=-1) * hann)
    power = spectrum.real**2 + spectrum.imag**2
    return xp.log10(xp.maximum(power @ mel_filters(bands).astype(samples.dtype), 1e-10))


def _scaled(log_bands: Bands, peak: Float[Array, "batch 1 1"] | float) -> Bands:
    return (log_bands.clip(min=peak - 8) + 4) / 4
