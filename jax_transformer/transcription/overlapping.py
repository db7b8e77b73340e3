"""A long sound as windows that overlap, and their one text, as transformers' pipeline has it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from jax_transformer.audio.log_mel import SAMPLE_RATE
from jax_transformer.audio.sound_files import open_sound
from jax_transformer.errors import InputError
from jax_transformer.transcription.segments import Progress, Segment, Transcript, sound_name

Window = Float32[np.ndarray, " samples"]


@dataclass
class Cut:
    """A sound that is cut into windows, and what those before the next one say."""

    name: str
    seconds: float = 0.0
    windows: list[Transcript] = field(default_factory=list)
    fault: str | None = None


def joined_transcripts(
    sounds: Iterable[Any],
    size: int,
    listen: Callable[[Iterator[Window]], Iterator[Transcript]],
    decode: Callable[[Sequence[int]], str],
    progress: Progress | None,
) -> Iterator[Transcript]:
    """Yield what each sound says, in order, without times.

    Args:
        sounds: As of `Transcriber.stream`, and so is `progress`.
        size: Samples of a window.
        listen: Yields what each window says, in order.
        decode: Returns the text of tokens.
    """
    cut: list[Cut] = []
    owners: list[int] = []  # the sound of each window
    following = 0

    def windows() -> Iterator[Window]:
        for number, source in enumerate(sounds):
            one = Cut(sound_name(number, source))
            cut.append(one)
            try:
                sound = open_sound(source, one.name)
                one.seconds = sound.seconds
                for window in overlapping_windows(sound.blocks(), size):
                    owners.append(number)
                    yield window
            except InputError as error:
                one.fault = str(error)

    def joined(one: Cut) -> Transcript:
        if one.fault is not None:
            return Transcript(one.name, "", (), fault=one.fault)
        ids = merged([[i for part in each.segments for i in part.tokens] for each in one.windows])
        text = decode(ids).strip()
        segment = Segment(0.0, one.seconds, text, tuple(ids))
        return Transcript(one.name, text, (segment,), one.windows[0].language)

    for index, heard in enumerate(listen(windows())):
        one = cut[owners[index]]
        one.windows.append(heard)
        yield from map(joined, cut[following : owners[index]])
        following = owners[index]
        if progress is not None:
            done = (2 * len(one.windows) + 1) / 3 * size / SAMPLE_RATE
            progress(one.name, min(done, one.seconds), one.seconds)
    yield from map(joined, cut[following:])


def overlapping_windows(blocks: Iterable[Window], size: int) -> Iterator[Window]:
    """Yield windows of `size` samples; each begins with the last third of the one before it."""
    step, rest = size - 2 * round(size / 6), np.zeros(0, np.float32)
    for block in blocks:
        rest = np.concatenate([rest, block])
        while len(rest) > size:
            yield rest[:size]
            rest = rest[step:]
    yield rest if len(rest) else np.zeros(1, np.float32)  # silence


def merged(windows: Sequence[Sequence[int]]) -> list[int]:
    """Return one sequence of tokens of windows that overlap.

    The next window is moved along the end of those before it, to where the share of equal tokens is
    largest, two at least. There, each of the two has the half of the overlap that it hears better.
    """
    whole, left = [], np.array(windows[0], np.int64)
    for window in windows[1:]:
        right, best = np.array(window, np.int64), 0.0
        left_middle, right_middle = len(left), 0
        for moved in range(1, len(left) + len(right)):
            first, second = max(0, len(left) - moved), max(0, moved - len(left))
            length = min(len(left) - first, len(right) - second)
            equal = int(np.sum(left[first : first + length] == right[second : second + length]))
            share = equal / moved + moved / 10_000  # of two equal shares the longer overlap
            if equal > 1 and share > best:
                best = share
                left_middle, right_middle = first + length // 2, second + length // 2
        whole += left[:left_middle].tolist()
        left = right[right_middle:]
    return whole + left.tolist()
