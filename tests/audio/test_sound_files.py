"""Sounds of files and arrays: formats, rates, channels, and every refusal."""

import builtins
import itertools
import os
import struct
import tracemalloc

import numpy as np
import pytest

from jax_transformer import InputError
from jax_transformer.audio import sound_files
from jax_transformer.audio.log_mel import LogMelStream
from jax_transformer.audio.sound_files import open_sound
from tests.models import unchecked

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

RANDOM = np.random.default_rng(3)
SECONDS = 1.25


def tone(rate, hertz=440.0, seconds=SECONDS):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype("f4")


def noise(length):
    return (0.1 * RANDOM.standard_normal(length)).astype(np.float32)


def read(source, name="array"):
    return np.concatenate([*open_sound(source, name).blocks()])


def loudest_frequency(sound):
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound)), 2**18))
    return spectrum.argmax() * 16_000 / 2**18


# Format, subtype, and the largest error of noise: half a step of it, or what the coder loses.
FORMATS = [
    ("wav", "PCM_U8", 1 / 128),
    ("wav", "PCM_16", 2**-15),
    ("wav", "PCM_24", 2**-23),
    ("wav", "FLOAT", 0),
    ("flac", "PCM_16", 2**-15),
    ("aiff", "PCM_16", 2**-15),
    ("ogg", "VORBIS", 0.3),
    ("mp3", "MPEG_LAYER_III", 0.3),
]


@pytest.mark.parametrize(("kind", "subtype", "bound"), FORMATS)
def test_a_file_is_read_as_it_was_written(tmp_path, monkeypatch, kind, subtype, bound):
    monkeypatch.setattr(sound_files, "BLOCK", 3000)
    samples = noise(20_001)
    path = tmp_path / f"it.{kind}"
    soundfile.write(path, samples, 16_000, subtype=subtype)
    sound = open_sound(path)
    assert (sound.name, sound.rate) == (str(path), 16_000)
    assert [len(block) for block in sound.blocks()] == [3000] * 6 + [2001]
    for _ in range(2):  # each call begins anew
        found = np.concatenate([*sound.blocks()])
        assert found.dtype == np.float32
        assert np.abs(found - samples).max() <= bound


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
def test_another_rate_is_resampled(tmp_path, monkeypatch, rate):
    soundfile.write(tmp_path / "it.wav", tone(rate), rate, subtype="FLOAT")
    whole = read(tmp_path / "it.wav")
    assert len(whole) == round(round(rate * SECONDS) * 16_000 / rate)
    assert abs(loudest_frequency(whole) - 440) < 0.1
    middle = slice(2000, -2000)
    np.testing.assert_allclose(whole[middle], tone(16_000)[: len(whole)][middle], atol=1e-3)
    monkeypatch.setattr(sound_files, "BLOCK", 777)
    np.testing.assert_array_equal(read(tmp_path / "it.wav"), whole)
    np.testing.assert_array_equal(read((tone(rate), rate)), whole)


def test_channels_are_averaged(tmp_path):
    both = noise(2000).reshape(1000, 2)
    soundfile.write(tmp_path / "it.wav", both, 16_000, subtype="FLOAT")
    np.testing.assert_allclose(read(tmp_path / "it.wav"), both.mean(axis=1), atol=1e-7)
    np.testing.assert_allclose(read(both), both.mean(axis=1), atol=1e-7)


def test_what_soundfile_reads_is_a_source(tmp_path):
    soundfile.write(tmp_path / "it.wav", tone(8000), 8000, subtype="PCM_16")
    for dtype in ("int16", "int32", "float64"):
        pair = soundfile.read(tmp_path / "it.wav", dtype=dtype)
        np.testing.assert_allclose(read(pair), read(tmp_path / "it.wav"), atol=1e-7)


def test_integers_are_divided_by_the_range_of_their_type():
    for dtype, values in {"int16": [-(2**15), 0, 2**14], "int32": [-(2**31), 0, 2**30]}.items():
        np.testing.assert_array_equal(read(np.array(values, dtype)), [-1, 0, 0.5])
    np.testing.assert_array_equal(read(np.array([0, 128, 192], np.uint8)), [-1, 0, 0.5])


def test_a_long_file_needs_little_memory(tmp_path):
    path = tmp_path / "long.wav"
    with soundfile.SoundFile(path, "w", 16_000, 1, "PCM_16") as file:
        for _ in range(60):
            file.write(noise(64_000))
    tracemalloc.start()
    stream = LogMelStream(open_sound(path).blocks, 80)
    for start in itertools.takewhile(lambda start: start < stream.num_frames, range(0, 10**6, 300)):
        stream.frames(start, 300)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert stream.num_frames == 60 * 400
    assert peak < 8 * 2**20  # in float32 the sound has 15 MB, its windows in float64 77 MB


def written(path, samples=None, rate=16_000, **options):
    soundfile.write(path, noise(40_000) if samples is None else samples, rate, **options)
    return path.read_bytes()


def refusal(source, name="array"):
    with pytest.raises(InputError) as error, unchecked():
        for _ in open_sound(source, name).blocks():
            pass
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(str(source) if isinstance(source, os.PathLike) else name)
    return text


def test_what_is_no_sound_file_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.wav")
    assert "is no regular file" in refusal(tmp_path)
    for name in ("text.wav", "text.mp3", "text.raw", "text"):
        (tmp_path / name).write_text("These are no samples.\n" * 99)
        assert "is no sound that libsndfile reads; fetch it again, or" in refusal(tmp_path / name)
    (tmp_path / "empty.wav").touch()
    assert "has no bytes" in refusal(tmp_path / "empty.wav")
    for name in ("zero.wav", "zero.ogg"):
        written(tmp_path / name, np.zeros(0))
        assert refusal(tmp_path / name) == f"{tmp_path / name}: no samples: leave it out"


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_a_file_without_its_header_is_refused(tmp_path, kind):
    path = tmp_path / f"it.{kind}"
    path.write_bytes(bytes(200) + written(path)[200:])
    assert "is no sound" in refusal(path)


def test_a_cut_or_damaged_file_is_refused_where_it_shows(tmp_path):
    for kind, message in {
        "flac": "is damaged; fetch it again",
        "mp3": "s, and 2.5 s as its header says; fetch it again",
    }.items():
        path = tmp_path / f"cut.{kind}"
        content = written(path)
        path.write_bytes(content[: len(content) // 2])
        assert message in refusal(path)
    path = tmp_path / "damaged.flac"
    content = written(path)
    path.write_bytes(content[:20_000] + bytes(5000) + content[25_000:])
    assert "is damaged" in refusal(path)


@pytest.mark.parametrize("kind", ["wav", "aiff", "ogg"])
def test_another_cut_file_is_read_to_its_end(tmp_path, kind):
    path = tmp_path / f"cut.{kind}"
    content, whole = written(path), read(path)
    path.write_bytes(content[: len(content) * 9 // 10])
    found = read(path)
    assert 0.7 * len(whole) < len(found) < 0.95 * len(whole)
    np.testing.assert_array_equal(found[:-500], whole[: len(found) - 500])


def test_a_wav_of_a_pipe_is_read_to_its_end(tmp_path):
    content = bytearray(written(tmp_path / "it.wav"))
    whole = read(tmp_path / "it.wav")
    content[40:44] = struct.pack("<I", 2**32 - 1)  # the number of bytes of samples
    (tmp_path / "it.wav").write_bytes(content)
    np.testing.assert_array_equal(read(tmp_path / "it.wav"), whole)


def without_length(content):
    """Return an MP3 without its first frame, which has no sound and says the length."""
    begin = max(content.find(b"Xing"), content.find(b"Info")) + 100
    return content[content.index(b"\xff\xfb", begin) :]


def test_an_mp3_that_is_longer_than_libsndfile_reads_is_refused(tmp_path):
    path = tmp_path / "it.mp3"
    sound = noise(44_100 * 3) * np.linspace(1, 0, 44_100 * 3) ** 2
    content = written(path, sound, 44_100, bitrate_mode="VARIABLE", compression_level=0.5)
    for longer in (without_length(content), content + content, content + b"ID3" + content):
        path.write_bytes(longer)
        assert "has more, and" in refusal(path)
    for tag in (b"TAG" + bytes(125), b"APETAGEX" + bytes(90_000), bytes(5000)):
        path.write_bytes(content + tag)
        assert abs(len(read(path)) - 48_000) <= 1
    swelling = written(path, sound[::-1], 44_100, bitrate_mode="VARIABLE", compression_level=0.5)
    path.write_bytes(without_length(swelling))
    assert "has 3.0 s, and " in refusal(path)
    content = written(path, sound, 44_100, bitrate_mode="CONSTANT", compression_level=0.5)
    path.write_bytes(without_length(content))
    assert abs(len(read(path)) - 48_000) < 1000


def test_hostile_headers_are_refused_before_memory_is_allocated(tmp_path):
    content = bytearray(written(tmp_path / "it.wav"))
    for place, layout, value, message in [
        (22, "<H", 257, "must be [samples, channels], at most 256 channels"),
        (22, "<H", 65_535, "is no sound"),
        (22, "<H", 0, "is no sound"),
        (24, "<I", 999, "rate=999 must be a whole number from 1,000 to 768,000 Hz"),
        (24, "<I", 2**31 - 1, "rate=2147483647 must be"),
        (24, "<I", 2**32 - 1, "is no sound"),
    ]:
        changed = content.copy()
        struct.pack_into(layout, changed, place, value)
        (tmp_path / "hostile.wav").write_bytes(changed)
        tracemalloc.start()
        assert message in refusal(tmp_path / "hostile.wav")
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 101.0])
def test_a_sample_that_is_no_sound_is_named_with_its_time(tmp_path, monkeypatch, value):
    monkeypatch.setattr(sound_files, "BLOCK", 1000)
    samples = np.stack([noise(8000), noise(8000)], axis=1)
    samples[3000, 1] = value
    soundfile.write(tmp_path / "it.wav", samples, 8000, subtype="FLOAT")
    for source in (tmp_path / "it.wav", (samples, 8000)):
        text = refusal(source, "array 3")
        assert f"{value}] at 0.3750 s must be finite and from -1 to 1: divide integers" in text


WRONG = {
    "dtype int64 must be one of uint8, int16,": np.zeros(500, int),
    "dtype complex128 must be one of": np.zeros(500, complex),
    "dtype object must be one of": np.array([None]),
    "shape (2, 500, 1) must be [samples, channels]": np.zeros((2, 500, 1)),
    "shape (2, 500) must be [samples, channels], at most 256": np.zeros((2, 500)),
    "shape () must be": np.float32(1),
    "no samples: leave it out": np.zeros(0),
    "rate=999 must be a whole number from 1,000 to 768,000 Hz": (np.zeros(500), 999),
    "rate=44100.0 must be a whole number": (np.zeros(500), 44_100.0),
    "rate=array([0., 0.]) must be": (44_100, np.zeros(2)),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_array_that_cannot_be_used_is_refused(message):
    assert refusal(WRONG[message], "array 3").startswith(f"array 3: {message}")


def test_numbers_too_large_for_float32_are_refused():
    assert "[inf] at 0.0001 s must be finite" in refusal(np.array([0.0, 0.0, 1e300]))


@pytest.mark.parametrize("missing", ["soundfile", "soxr"])
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, missing):
    written(tmp_path / "it.wav", rate=8000)
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=rf"it.wav.*{missing}.*jax-transformer\[audio\]"):
        read(tmp_path / "it.wav")


def test_a_sound_prints_shortly():
    assert repr(open_sound((noise(8000), 8000), "array 3")) == (
        "Sound(name='array 3', rate=8000, seconds=1.0)"
    )
