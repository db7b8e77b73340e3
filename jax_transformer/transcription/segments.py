"""What a sound says: text and segments, and the formats in which they are written."""

import html
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Format = Literal["txt", "srt", "vtt", "json"]
Progress = Callable[[str, float, float], None]  # of a sound's name, its seconds that are text, all


class Segment(NamedTuple):
    """A part of a sound and its text.

    Attributes:
        start: Where it begins, in seconds.
        end: Where it ends.
        text: What is said.
        tokens: Its ids, those of times among them.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]


class Transcript(NamedTuple):
    """What a sound says.

    Attributes:
        name: The file, or "sound 3" of an array.
        text: The whole text; "" where there is a fault.
        segments: Its parts, in order.
        language: Code of the language; None of a model of English alone.
        fault: Why the sound could not be read; None where it could.
    """

    name: str
    text: str
    segments: tuple[Segment, ...]
    language: str | None = None
    fault: str | None = None

    def written(self, form: Format) -> str:
        """Return the content of a file: plain text, SubRip, WebVTT, or all fields as JSON."""
        if form == "txt":
            return f"{self.text}\n"
        if form == "json":
            segments = [segment._asdict() for segment in self.segments]
            return json.dumps(self._asdict() | {"segments": segments}, ensure_ascii=False) + "\n"
        mark, number = (",", "{}\n") if form == "srt" else (".", "")
        cues = [
            f"{number.format(n)}{_clock(part.start, mark)} --> {_clock(part.end, mark)}\n"
            f"{_cue(part.text, form)}\n"
            for n, part in enumerate((part for part in self.segments if part.text), start=1)
        ]
        return "\n".join(["WEBVTT\n"] * (form == "vtt") + cues)


def sound_name(number: int, source: Any) -> str:
    """Return the name of a sound, by its place from 0: the file, or "sound 3" of an array."""
    return str(source) if isinstance(source, str | Path) else f"sound {number + 1}"


def _cue(text: str, form: Format) -> str:
    """Return a text without what would begin the next cue: an arrow, an empty line."""
    line = " ".join(text.split())
    return html.escape(line, quote=False) if form == "vtt" else re.sub("-+>", "->", line)


def _clock(seconds: float, mark: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{mark}{thousandths:03}"


def split_at_times(
    tokens: Sequence[int], first_time: int, frames: int
) -> tuple[list[tuple[int, int, Sequence[int]]], int]:
    """Return the segments of a window, and how many of its frames they pass.

    A pair of times ends a segment and begins the next one. What follows the last pair is said
    again in the next window, unless a time alone ends it: then nothing more is said.

    Args:
        tokens: Of the window, without EOS.
        first_time: The id of time 0; a time counts two frames.
        frames: Number of frames of the window.

    Returns:
        Start and end, as times, and the tokens of each segment; the number of frames.
    """
    is_time = [token >= first_time for token in tokens]
    ends = [n + 1 for n in range(len(tokens) - 1) if is_time[n] and is_time[n + 1]]
    if not ends:
        times = [token - first_time for token in tokens if token >= first_time]
        end = times[-1] if times and times[-1] > 0 else frames // 2
        return [(0, end, tokens)], frames
    is_finished = is_time[-2:] == [False, True]
    if is_finished:
        ends.append(len(tokens))
    segments = []
    for begin, end in zip([0, *ends], ends, strict=False):
        times = tokens[begin] - first_time, tokens[end - 1] - first_time
        # As in transformers, the last one has the time that begins the next window, too.
        part = tokens[begin : end + (end == ends[-1] and not is_finished)]
        segments.append((*times, part))
    return segments, frames if is_finished else 2 * segments[-1][1]
