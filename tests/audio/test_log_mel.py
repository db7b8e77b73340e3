"""Log-mel features against WhisperFeatureExtractor, in numpy, in JAX, and of streams."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import InputError
from jax_transformer.audio import log_mel as module
from jax_transformer.audio.log_mel import LogMelStream, log_mel, log_mel_features, mel_filters
from tests.models import unchecked

transformers = pytest.importorskip("transformers")

LENGTH = 30_077  # samples; the end is no multiple of a frame
RANDOM = np.random.default_rng(7)
NOISE = RANDOM.standard_normal(LENGTH)
TIME = np.arange(LENGTH) / 16_000
SOUNDS = {
    "noise": 0.3 * NOISE,
    "quiet": 1e-4 * NOISE,
    "loud": 30 * NOISE,
    "silence": 0 * NOISE,
    "sine": 0.9 * np.sin(2 * np.pi * 440 * TIME),
    "tone over faint noise": 0.5 * np.sin(2 * np.pi * 3000 * TIME) + 1e-3 * NOISE,
    "swelling": np.sin(np.pi * TIME) ** 2 * NOISE,
}
SOUNDS = {name: sound.astype(np.float32) for name, sound in SOUNDS.items()}


@pytest.fixture(scope="module", params=[80, 128])
def extractor(request):
    return transformers.WhisperFeatureExtractor(feature_size=request.param)


def theirs(extractor, sound):
    return extractor._np_extract_fbank_features(sound[None], "cpu")[0].T


def cut(sound, *sizes):
    """Return a source of blocks whose sizes repeat."""
    ends = itertools.accumulate(itertools.cycle(sizes))
    places = [0, *itertools.takewhile(lambda end: end < len(sound), ends), len(sound)]
    return lambda: iter([sound[a:b] for a, b in itertools.pairwise(places)])


def test_the_filters_are_those_of_transformers(extractor):
    bands = extractor.feature_size
    np.testing.assert_allclose(mel_filters(bands), extractor.mel_filters, rtol=0, atol=1e-15)


def test_every_number_of_bands_has_no_empty_band():
    for bands in range(1, 129):
        assert mel_filters(bands).max(axis=0).min() > 0, bands


@pytest.mark.parametrize("name", SOUNDS)
def test_features_are_those_of_whisper(extractor, name):
    ours = log_mel(SOUNDS[name], extractor.feature_size)
    assert ours.dtype == np.float32
    assert ours.shape == (LENGTH // 160, extractor.feature_size)
    assert np.abs(ours - theirs(extractor, SOUNDS[name])).max() <= 1e-6


def test_whole_and_short_lengths_are_those_of_whisper(extractor):
    for length in (201, 319, 320, 321, 400, 1600):
        sound = SOUNDS["noise"][:length]
        ours = log_mel(sound, extractor.feature_size)
        np.testing.assert_allclose(ours, theirs(extractor, sound), rtol=0, atol=1e-6)


def test_numpy_and_jax_agree_in_float64(x64):
    sounds = np.stack([*SOUNDS.values()]).astype(np.float64)  # each has a maximum of its own
    for bands in (80, 128):
        features = log_mel_features(jnp.asarray(sounds), bands)
        assert features.dtype == jnp.float64
        for sound, ours in zip(sounds, features, strict=True):
            rows = np.concatenate([*module._log_bands_of([sound], bands)])
            expected = module._scaled(rows, rows.max())  # not yet rounded to float32
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-14)


BOUNDS = {"noise": 5e-6, "quiet": 5e-6, "silence": 0, "sine": 3e-5, "tone over faint noise": 2e-4}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_error_of_float32_is_what_the_docstring_says(name):
    for bands in (80, 128):
        features = log_mel_features(jnp.asarray(SOUNDS[name])[None], bands)
        assert features.dtype == jnp.float32
        assert np.abs(features[0] - log_mel(SOUNDS[name], bands)).max() <= BOUNDS[name]


def test_products_are_not_rounded_on_an_accelerator():
    program = jax.make_jaxpr(lambda sounds: log_mel_features(sounds, 80))(jnp.zeros((1, 400)))
    assert "Precision.HIGHEST" in str(program)


@pytest.mark.parametrize("sizes", [(1, 7, 200), (159, 161), (201,), (4096,), (30_076,), (99_999,)])
@pytest.mark.parametrize("name", ["noise", "swelling"])
def test_a_stream_has_the_features_of_the_whole(name, sizes):
    sound, bands = SOUNDS[name], 80
    stream = LogMelStream(cut(sound, *sizes), bands)
    assert stream.num_frames == LENGTH // 160
    read = [stream.frames(start, 50) for start in range(0, 250, 50)]
    assert [len(rows) for rows in read] == [50, 50, 50, 37, 0]
    np.testing.assert_allclose(np.concatenate(read), log_mel(sound, bands), rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [0, 1, 159, 200, 201, 360, 400, 401, 560])
def test_a_short_sound_is_continued_with_zeros(length):
    sound = SOUNDS["noise"][:length]
    for least in (0, 1000):
        expected = log_mel(np.pad(sound, (0, max(0, 201 - length, least - length))), 80)
        stream = LogMelStream(cut(sound, 100), 80, least)
        assert stream.num_frames == len(expected)
        np.testing.assert_allclose(stream.frames(0, 99), expected, rtol=0, atol=1e-6)
    expected = log_mel(np.pad(sound, (0, max(0, 201 - length))), 80)
    features = log_mel_features(jnp.asarray(sound)[None], 80)[0]
    for ours in (log_mel(sound, 80), features):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-6)


def test_a_stream_reads_forwards_in_overlaps_and_leaps():
    sound = SOUNDS["noise"]
    expected, stream = log_mel(sound, 80), LogMelStream(cut(sound, 1000), 80)
    for start, count in [(0, 3), (0, 30), (5, 2), (5, 30), (90, 1), (120, 500), (187, 9), (999, 9)]:
        rows = stream.frames(start, count)
        np.testing.assert_allclose(rows, expected[start : start + count], rtol=0, atol=1e-6)
        rows[:] = 0  # the next frames are not written over
    with pytest.raises(InputError, match="start=100 is before frame 187: make a new stream"):
        stream.frames(100, 1)


def test_a_stream_keeps_few_frames():
    def blocks():
        for _ in range(100):
            yield SOUNDS["noise"][:16_000]

    stream = LogMelStream(blocks, 80)
    assert len(stream.frames(9_000, 10)) == 10
    assert len(stream._rows) < 300


WRONG = {
    "bands=0 must be from 1 to 128": lambda: mel_filters(0),
    "bands=129 must be from 1 to 128": lambda: log_mel(SOUNDS["sine"], 129),
    "bands='80' must be": lambda: LogMelStream(cut(SOUNDS["sine"], 999), "80"),
    "samples of int16 must be float32 or float64, from -1 to 1": (
        lambda: log_mel(np.zeros(500, np.int16), 80)
    ),
    "samples of int32 must be": lambda: log_mel_features(jnp.zeros((1, 500), jnp.int32), 80),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_used_is_one_line(message):
    with pytest.raises(InputError) as refusal, unchecked():
        WRONG[message]()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
