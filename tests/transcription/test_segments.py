"""Windows cut at their times as transformers cuts them, and what is written of the segments."""

import json

import numpy as np
import pytest
import torch

from jax_transformer.transcription.segments import Segment, Transcript, split_at_times

generation = pytest.importorskip("transformers.models.whisper.generation_whisper")

FIRST = 20  # the first id that is a time


def by_transformers(tokens, frames):
    """Return what `split_at_times` returns, from the mixin of transformers."""
    found, passed = generation.WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(tokens, dtype=torch.long),
        seek_outputs=[None],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([frames]),
        time_precision=1,
        time_precision_features=0.5,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros((1, 3)),
    )
    segments = [(int(one["start"]), int(one["end"]), one["tokens"].tolist()) for one in found]
    return segments, int(passed)


def test_a_window_is_split_as_transformers_splits_it():
    random, counts = np.random.default_rng(0), set()
    for _ in range(1000):
        share = random.uniform(0, 1)
        length = random.integers(0, 14)
        is_time = random.random(length) < share
        tokens = np.where(is_time, random.integers(FIRST, 71, length), random.integers(0, 20))
        tokens, frames = tokens.tolist(), int(random.integers(1, 101))
        found, passed = split_at_times(tokens, FIRST, frames)
        assert ([(*times, [*part]) for *times, part in found], passed) == (
            by_transformers(tokens, frames)
        ), tokens
        counts.add((len(found), passed == frames))
    assert {(1, True), (1, False), (3, True), (3, False)} <= counts


@pytest.mark.parametrize(
    "tokens", [[], [FIRST], [FIRST + 3], [FIRST, 1, FIRST + 9], [1, 2], [FIRST, FIRST + 4]]
)
def test_few_tokens_are_split_as_transformers_splits_them(tokens):
    found, passed = split_at_times(tokens, FIRST, 100)
    assert ([(*times, [*part]) for *times, part in found], passed) == by_transformers(tokens, 100)


HEARD = Transcript(
    "talk.flac",
    "Gr\u00fc\u00dfe, a --> b. The end",
    (
        Segment(0.0, 59.9996, "Gr\u00fc\u00dfe,", (20, 1, 2, 30)),
        Segment(60.0, 61.0, "", (30, 30)),  # which players would show as nothing
        Segment(3599.25, 3600.0, "a --> b.", (30, 3, 31)),
        Segment(363_661.0006, 363_662.5, "The end", (31, 4)),
    ),
    "de",
)
SRT = """1
00:00:00,000 --> 00:01:00,000
Gr\u00fc\u00dfe,

2
00:59:59,250 --> 01:00:00,000
a -> b.

3
101:01:01,001 --> 101:01:02,500
The end
"""
VTT = """WEBVTT

00:00:00.000 --> 00:01:00.000
Gr\u00fc\u00dfe,

00:59:59.250 --> 01:00:00.000
a --&gt; b.

101:01:01.001 --> 101:01:02.500
The end
"""
JSON = """{"name": "talk.flac", "text": "Gr\u00fc\u00dfe, a --> b. The end", "segments": [\
{"start": 0.0, "end": 59.9996, "text": "Gr\u00fc\u00dfe,", "tokens": [20, 1, 2, 30]}, \
{"start": 60.0, "end": 61.0, "text": "", "tokens": [30, 30]}, \
{"start": 3599.25, "end": 3600.0, "text": "a --> b.", "tokens": [30, 3, 31]}, \
{"start": 363661.0006, "end": 363662.5, "text": "The end", "tokens": [31, 4]}], \
"language": "de", "fault": null}
"""
WRITTEN = {"txt": "Gr\u00fc\u00dfe, a --> b. The end\n", "srt": SRT, "vtt": VTT, "json": JSON}


@pytest.mark.parametrize("form", WRITTEN)
def test_a_transcript_is_written(form):
    assert HEARD.written(form) == WRITTEN[form]


def test_the_json_of_a_fault_has_all_fields():
    broken = Transcript("bad.wav", "", (), fault="bad.wav: has no bytes")
    assert json.loads(broken.written("json")) == broken._asdict() | {"segments": []}
    assert [broken.written(form) for form in ("txt", "srt", "vtt")] == ["\n", "", "WEBVTT\n"]
