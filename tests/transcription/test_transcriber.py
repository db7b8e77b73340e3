"""Sounds as text: beside transformers, in batches, with faults, and by the rule of fallback."""

import itertools
import json
import re
import shutil
import tracemalloc
import zlib

import numpy as np
import pytest
import torch

import jax_transformer
from jax_transformer import InputError, Transcriber, Translator
from jax_transformer.audio import sound_files
from jax_transformer.audio.log_mel import log_mel
from jax_transformer.transcription.overlapping import merged
from tests.models import one_layer, random_params, unchecked
from tests.tiers import tiered, tiered_rows
from tests.transcription.whisper_folder import (
    BANDS,
    LANGUAGES,
    LENGTH,
    SECOND,
    sound,
    transformers,
    write_folder,
)

soundfile = pytest.importorskip("soundfile")

NO_TIME = -100.0  # logit
GREEDY = {"temperatures": (0.0,)}
ALL_FAIL, NONE_FAIL = {"log_probability": 0.0, "no_speech": 1.0}, {"log_probability": -1e9}
TEXT = " the tree and the house"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that writes a folder, and keeps it and the transcriber of it."""
    made = {}

    def models(seed=0, english=False, timed=True, batch_size=2):
        key = seed, english, timed
        if key not in made:
            languages, times = () if english else LANGUAGES, 0.5 if timed else NO_TIME
            folder = tmp_path_factory.mktemp("whisper") / "model"
            made[key] = write_folder(folder, seed, languages=languages, times=times)
        if (*key, batch_size) not in made:
            made[*key, batch_size] = Transcriber(made[key].folder, batch_size=batch_size)
        return made[key], made[*key, batch_size]

    return models


def parts(transcript):
    """Return (start, end, tokens) of each segment; times are rounded to a microsecond."""
    return rounded((one.start, one.end, [*one.tokens]) for one in transcript.segments)


def rounded(segments):
    return [(round(start, 6), round(end, 6), tokens) for start, end, tokens in segments]


def assert_same(found, expected):
    """Assert that transcripts are equal, but for the names of arrays."""
    assert [one._replace(name="") for one in found] == [one._replace(name="") for one in expected]


SPOKEN = ("given", "detected", "translated", "English alone")
FORMS = ("one window", "one window with times", "several windows")
SEEDS = range(5)
QUICK = [
    ("given", 1, "one window", 0),
    ("detected", 3, "several windows", 1),
    ("translated", 1, "several windows", 0),
    ("English alone", 1, "one window with times", 0),
]
CASES = [
    (spoken, beams, form, seed)
    for spoken in SPOKEN
    for beams in (1, 3)
    for form in FORMS
    for seed in SEEDS
]


@pytest.mark.parametrize(
    ("spoken", "beams", "form", "seed"), tiered_rows(CASES, lambda *case: case in QUICK)
)
def test_ids_and_times_are_those_of_transformers(models, spoken, beams, form, seed):
    """An odd seed has a prompt, too."""
    timed, english = form != "one window", spoken == "English alone"
    foreign, transcriber = models(seed, english, timed)
    seconds = 2.3 + 0.4 * seed if form == "several windows" else 1 - 0.17 * seed
    heard = sound(seconds, 10 + seed)
    options, theirs = {"timestamps": timed}, {"return_timestamps": timed, "num_beams": beams}
    if spoken == "translated":
        options["task"] = theirs["task"] = "translate"
    if spoken in ("given", "translated"):
        options["language"] = theirs["language"] = LANGUAGES[seed % 3]
    if seed % 2:
        options["prompt"] = TEXT
        theirs["prompt_ids"] = torch.from_numpy(foreign.tokenizer.get_prompt_ids(TEXT))
    (found,) = transcriber([heard], beam_size=beams, **NONE_FAIL, **GREEDY, **options)
    expected = foreign.hears(heard, **theirs)
    assert parts(found) == rounded(expected)
    tokens = [token for *_, tokens in expected for token in tokens]
    assert found.text == foreign.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert all(
        one.text == foreign.tokenizer.decode(one.tokens, skip_special_tokens=True).strip()
        for one in found.segments
    )
    assert found.fault is None
    if spoken != "detected":
        assert found.language == options.get("language")


def test_the_search_of_the_folder_is_the_usual_one(models, tmp_path):
    foreign = models(1)[0]
    shutil.copytree(foreign.folder, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_beams": 3}))
    heard, options = sound(1, 5), {"timestamps": True, "prompt": TEXT}
    (found,) = Transcriber(tmp_path / "model", batch_size=2)([heard], **GREEDY, **options)
    ids = torch.from_numpy(foreign.tokenizer.get_prompt_ids(TEXT))
    greedy, expected = (
        foreign.hears(heard, return_timestamps=True, num_beams=beams, prompt_ids=ids)
        for beams in (1, 3)
    )
    assert parts(found) == rounded(expected) != rounded(greedy)


def test_a_long_prompt_is_cut_to_its_end(models):
    foreign, transcriber = models(1)
    heard, long = sound(1, 3), TEXT * 30
    ids = foreign.tokenizer.get_prompt_ids(long)
    last = LENGTH // 2 - 1  # as transformers cuts the text before a window
    assert len(ids) > LENGTH
    theirs = torch.from_numpy(np.concatenate([ids[:1], ids[-last:]]))
    expected = foreign.hears(heard, return_timestamps=True, prompt_ids=theirs)
    (found,) = transcriber([heard], timestamps=True, prompt=long, **GREEDY)
    assert parts(found) == rounded(expected)
    (other,) = transcriber([heard], timestamps=True, **GREEDY)
    assert parts(found) != parts(other)


LENGTHS = (0.4, 2.7, 1.0, 3.3, 0.9, 1.5, 0.01)


@pytest.mark.parametrize("options", [{}, {"timestamps": True, "prompt": TEXT}], ids=str)
def test_a_batch_gives_what_each_sound_gives_alone(models, options):
    transcriber = models()[1]
    sounds = [sound(seconds, seed) for seed, seconds in enumerate(LENGTHS)]
    alone = [transcriber([one], **GREEDY, **options)[0] for one in sounds]
    assert len({one.text for one in alone}) > 4
    assert_same(transcriber(sounds, **GREEDY, **options), alone)
    taken, stream = [], None

    def coming():
        for number, one in enumerate(sounds):
            taken.append(number)
            yield one, SECOND

    stream = transcriber.stream(coming(), **GREEDY, **options)
    found = [next(stream)]
    assert len(taken) <= 3  # two are heard at once, and one follows the first
    found += stream
    assert_same(found, alone)
    assert [one.name for one in found] == [f"sound {n + 1}" for n in range(len(sounds))]
    assert transcriber(iter([])) == []


def test_a_file_is_heard_as_its_samples(models, tmp_path):
    transcriber = models()[1]
    heard = sound(1.7, 2)
    soundfile.write(tmp_path / "it.wav", heard, SECOND, subtype="FLOAT")
    both = transcriber([tmp_path / "it.wav", str(tmp_path / "it.wav"), heard], **GREEDY)
    assert [one.name for one in both] == [str(tmp_path / "it.wav")] * 2 + ["sound 3"]
    assert_same(both[:2], both[2:] * 2)
    assert both[0].segments


def test_a_sound_that_cannot_be_read_has_a_fault_and_the_others_are_heard(models, tmp_path):
    transcriber = models()[1]
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("Once upon a time. " * 99)
    soundfile.write(tmp_path / "none.wav", np.zeros(0), SECOND)
    broken = sound(2.2, 1)
    broken[30_000] = np.nan
    faults = {
        1: (tmp_path / "empty.wav", "has no bytes"),
        2: (broken, "nan"),
        3: (tmp_path / "text.wav", "is no sound"),
        6: (tmp_path / "absent.wav", "absent.wav"),
        7: (np.arange(9), "int64"),
        8: (tmp_path / "none.wav", "no samples"),
        9: (np.array([None]), "object"),
    }
    sounds = [faults.get(n, (sound(0.3 * n + 0.5, n),))[0] for n in range(10)]
    found = transcriber(sounds, **GREEDY)
    assert len(found) == len(sounds)
    for number, (heard, one) in enumerate(zip(sounds, found, strict=True)):
        if number in faults:
            assert faults[number][1] in one.fault
            assert "\n" not in one.fault
            assert one[1:4] == ("", (), None)
        else:
            assert one.fault is None
            assert_same([one], transcriber([heard], **GREEDY))
    assert [one.name for one in found[1:4]] == [str(sounds[1]), "sound 3", str(sounds[3])]


def mean_and_silence(foreign, heard, found):
    """Return the mean log-probability of a text without times, and the chance of silence."""
    codes = ["startoftranscript", found.language, "transcribe", "notimestamps"]
    begin, tokens = [foreign.id(code) for code in codes], [*found.segments[0].tokens]
    full = len(begin) + len(tokens) == LENGTH
    written = tokens if full else [*tokens, foreign.model.config.eos_token_id]
    logits = foreign.logits(heard, [*begin, *written])[len(begin) - 1 : -1]
    generation = foreign.model.generation_config
    logits[:, generation.suppress_tokens] = -torch.inf
    logits[0, generation.begin_suppress_tokens] = -torch.inf
    logs = torch.log_softmax(logits, dim=-1)[range(len(written)), written]
    first = torch.softmax(foreign.logits(heard, begin[:1])[0], dim=-1)
    return float(logs.mean()), float(first[foreign.id("nospeech")])


@pytest.mark.parametrize("seed", tiered(range(6), [0]))
def test_a_text_is_kept_that_is_likely_enough(models, seed):
    foreign, transcriber = models(seed, timed=False)
    heard = sound(1, seed)
    (greedy,) = transcriber([heard], **NONE_FAIL, **GREEDY)
    mean, silence = mean_and_silence(foreign, heard, greedy)

    def found(threshold, no_speech=1.0):
        options = {"log_probability": threshold, "compression_ratio": 1e9}
        return transcriber([heard], temperatures=(0.0, 1.0), no_speech=no_speech, **options)[0]

    assert found(mean - 1e-4) == greedy
    assert found(mean + 1e-4).text != greedy.text
    # A window is silent only where its text is unlikely.
    assert found(mean - 1e-4, silence - 1e-6) == greedy
    assert found(mean + 1e-4, silence + 1e-6).text == found(mean + 1e-4).text
    assert found(mean + 1e-4, silence - 1e-6)[1:3] == ("", ())


def test_a_text_is_kept_that_repeats_little(models):
    transcriber = models(0, timed=False)[1]
    heard = sound(1, 0)
    (greedy,) = transcriber([heard], **NONE_FAIL, **GREEDY)
    content = greedy.text.encode()
    ratio = len(content) / len(zlib.compress(content))

    def found(threshold):
        options = {"compression_ratio": threshold, "temperatures": (0.0, 1.0)}
        return transcriber([heard], **NONE_FAIL, **options)[0]

    assert found(ratio + 0.05) == greedy
    assert found(ratio - 0.05).text != greedy.text


def test_the_last_draw_is_kept_where_all_fail(models):
    transcriber = models()[1]
    sounds = [sound(0.7, 20), sound(2.3, 21)]

    def found(*temperatures, by=transcriber, sounds=sounds, **options):
        return by(sounds, temperatures=temperatures, timestamps=True, **ALL_FAIL, **options)

    drawn = found(0.0, 0.7)
    assert all(one.segments for one in drawn)
    assert found(0.0, 0.7) == drawn
    assert found(0.0, 0.7, by=models(batch_size=1)[1]) == drawn  # whatever runs beside it
    others = [found(0.0, 0.7, seed=1), found(0.0), found(0.0, 1.5), found(0.7)]
    for number, one in enumerate(drawn):
        assert all(one.text != other[number].text for other in others)
    assert found(0.0) == transcriber(sounds, timestamps=True, **NONE_FAIL, **GREEDY)
    twice = found(0.7, sounds=[sounds[1]] * 2)
    assert twice[0].text != twice[1].text  # each has draws of its own


def test_all_is_silent_where_nothing_is_likely(models):
    transcriber = models()[1]
    silent = {"log_probability": 0.0, "no_speech": 0.0}
    found = transcriber([sound(2.3, 1), sound(0.5, 2)], language="de", **silent)
    assert [one[1:] for one in found] == [("", (), "de", None)] * 2


def test_progress_rises_to_the_whole_length(models):
    transcriber, calls = models()[1], {}

    def progress(name, done, whole):
        calls.setdefault(name, []).append((done, whole))

    sounds = [sound(2.7, 1), sound(0.5, 2), np.zeros(0), sound(4.2, 3)]
    silent = {"log_probability": 0.0, "no_speech": 0.0}
    for options in (silent, {"language": "en", **silent}):
        calls.clear()
        found = [*transcriber.stream(sounds, progress, **options)]
        assert len(found) == 4
        assert calls.keys() == {"sound 1", "sound 2", "sound 4"}
        for name, seconds in (("sound 1", 2.7), ("sound 2", 1.0), ("sound 4", 4.2)):
            done, whole = zip(*calls[name], strict=True)
            assert [*done] == sorted({*done})
            assert done[-1] == whole[-1] == pytest.approx(seconds)
            assert len({*whole}) == 1
    calls.clear()
    [*transcriber.stream(sounds, progress, **GREEDY)]
    assert len(calls["sound 4"]) > 4  # windows begin at the end of a segment
    assert all([*done] == sorted({*done}) for done in calls.values())


def test_a_longer_file_needs_no_more_memory(models, tmp_path, monkeypatch):
    monkeypatch.setattr(sound_files, "BLOCK", 4000)
    transcriber, path, peaks = models(batch_size=1)[1], tmp_path / "long.wav", []
    silent = {"log_probability": 0.0, "no_speech": 0.0, "timestamps": True}
    with unchecked():
        for seconds in (2, 10, 40):  # the first one compiles
            soundfile.write(path, np.tile(sound(1), seconds), SECOND)
            tracemalloc.start()
            (found,) = transcriber([path], **silent)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert found.fault is None
    assert peaks[2] < peaks[1] + 2**18  # in float32 it has 2 MB more, and its features 1 MB


REFUSED = {
    "beams=3 is not a setting; did you mean beam_size": {"beams": 3},
    "languages='de' is not a setting; did you mean language": {"languages": "de"},
    "language='xx' must be one of en, de, fr": {"language": "xx"},
    "task='summarize'": {"task": "summarize"},
    "beam_size=0": {"beam_size": 0},
    "temperatures": {"temperatures": ()},
    "seed=-1": {"seed": -1},
}


@pytest.mark.parametrize("fault", REFUSED)
def test_options_are_refused(models, fault):
    with unchecked(), pytest.raises(InputError) as caught:
        models()[1]([sound(1)], **REFUSED[fault])
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_english_has_no_task_and_no_language(models):
    transcriber = models(english=True)[1]
    for options, fault in (
        ({"task": "translate"}, "task='translate' needs a model of several languages"),
        ({"language": "en"}, "language='en' must be one of none"),
    ):
        with pytest.raises(InputError, match=fault):
            transcriber([sound(1)], **options)


@pytest.mark.parametrize("one", [sound(1), "it.wav"], ids=["array", "file"])
def test_one_sound_is_no_list(models, one):
    with pytest.raises(InputError, match="must be a list of sounds"):
        models()[1](one)


@pytest.mark.parametrize(
    ("options", "fault"), [({"batch_size": 0}, "batch_size=0"), ({"dtype": "int8"}, "int8")]
)
def test_arguments_are_refused(models, options, fault):
    with pytest.raises(InputError, match=fault):
        Transcriber(models()[0].folder, **options)


def test_a_model_of_text_is_refused_and_a_translator_of_sound(models, tmp_path):
    config = one_layer("bart", 60, d_model=8, num_heads=2, d_ff=9, max_length=9)
    model = config, random_params(config), None, {}
    jax_transformer.save(tmp_path / "text", model)
    with pytest.raises(InputError, match="reads no sound"):
        Transcriber(tmp_path / "text")
    with pytest.raises(InputError, match="reads sound"):
        Translator(models()[0].folder)


@pytest.mark.exhaustive  # compiles for seconds
def test_bfloat16_runs(models):
    transcriber = Transcriber(models()[0].folder, dtype="bfloat16", batch_size=2)
    assert "parameters of bfloat16" in repr(transcriber)
    found = transcriber([sound(1.6)], **GREEDY)
    assert found[0].fault is None
    assert found[0].segments


@pytest.mark.parametrize("english", tiered([False, True], [False]))
def test_a_saved_model_hears_the_same(models, tmp_path, english):
    foreign, transcriber = models(english=english, timed=False)
    jax_transformer.save(tmp_path / "own", jax_transformer.load(foreign.folder))
    again = Transcriber(tmp_path / "own", batch_size=2)
    sounds = [sound(0.8, 1), sound(1.0, 2)]
    for options in ({}, {"prompt": TEXT} if english else {"task": "translate"}):
        expected = transcriber(sounds, **GREEDY, **options)
        assert all(one.text for one in expected)
        assert again(sounds, **GREEDY, **options) == expected
    if english:
        with pytest.raises(InputError, match="several languages"):
            again(sounds, task="translate")


def test_a_tokenizer_without_special_tokens_is_refused(models, tmp_path):
    shutil.copytree(models()[0].folder, tmp_path / "model")
    for path in (tmp_path / "model").iterdir():
        if path.suffix == ".json":
            path.write_text(path.read_text().replace("<|notimestamps|>", "<|other|>"))
    with pytest.raises(InputError, match=r"lacks <\|notimestamps\|>"):
        Transcriber(tmp_path / "model")


OVERLAPPING = [*itertools.product(range(4), (False, True), (1, 3))]


@pytest.mark.parametrize(
    ("seed", "english", "beams"), tiered_rows(OVERLAPPING, lambda *row: row == (1, False, 1))
)
def test_windows_that_overlap_give_the_text_of_the_pipeline_of_transformers(
    models, seed, english, beams
):
    foreign, transcriber = models(seed, english, timed=False)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    pipeline = transformers.pipeline(
        "automatic-speech-recognition",
        model=foreign.model,
        tokenizer=foreign.tokenizer,
        feature_extractor=extractor,
        chunk_length_s=1,
        device="cpu",
    )
    options = {"num_beams": beams, "do_sample": False}
    if not english:
        options |= {"language": "de", "task": "transcribe"}
    sounds = [sound(seconds, seed) for seconds in (0.4, 1, 1.4, 3.71, 1 + 2 / 3)]
    expected = [
        pipeline({"raw": heard, "sampling_rate": SECOND}, generate_kwargs=options)["text"]
        for heard in sounds
    ]
    language = {} if english else {"language": "de"}
    found = transcriber(
        sounds, overlapping=True, beam_size=beams, **NONE_FAIL, **GREEDY, **language
    )
    assert [one.text for one in found] == [text.strip() for text in expected]
    assert [one.segments[0].end for one in found] == [len(heard) / SECOND for heard in sounds]
    assert len({*expected}) == len(sounds)


def test_overlapping_windows_keep_order_and_faults(models, tmp_path):
    _, transcriber = models(1)
    soundfile.write(tmp_path / "whole.flac", sound(2.5, 3), SECOND)
    (tmp_path / "bad.flac").write_bytes(b"no sound")
    cut = (tmp_path / "whole.flac").read_bytes()
    (tmp_path / "cut.flac").write_bytes(cut[: len(cut) // 2])
    nan = sound(2, 4)
    nan[-3] = np.nan
    inputs = [tmp_path / "bad.flac", sound(2.2, 5), nan, tmp_path / "cut.flac"]
    inputs += [(sound(2.5, 6)[::2], SECOND // 2), tmp_path / "whole.flac", tmp_path / "absent.mp3"]
    seen = []
    options = {"overlapping": True, **GREEDY, **ALL_FAIL}
    found = [*transcriber.stream(inputs, lambda *call: seen.append(call), **options)]
    assert [one.fault is None for one in found] == [False, True, False, False, True, True, False]
    assert found[2].name == "sound 3"
    assert re.match("sound 3: .*nan.* at 1.99", found[2].fault)
    assert "cut.flac" in found[3].fault
    alone = [transcriber([inputs[place]], **options)[0] for place in (1, 5)]
    assert [found[1].text, found[5].text] == [one.text for one in alone]
    assert found[1].language in LANGUAGES
    ends = {name: (done, total) for name, done, total in seen}
    assert ends["sound 2"] == (2.2, 2.2)
    assert ends["sound 5"] == (2.5, 2.5)
    with pytest.raises(InputError, match="overlapping=True has no times: leave"):
        transcriber([inputs[1]], overlapping=True, timestamps=True)


def test_tokens_are_joined_where_transformers_joins_them():
    from transformers.models.whisper.tokenization_whisper import _find_longest_common_sequence

    random, joined = np.random.default_rng(0), 0
    for kinds in (3, 8, 50) * 40:
        text = random.integers(kinds, size=40)
        windows = []
        for start in range(0, 40, 10):
            window = text[start : start + random.integers(20)].copy()
            window[random.random(len(window)) < 0.1] = 99
            windows.append(window.tolist())
        found = merged(windows)
        assert found == _find_longest_common_sequence(windows)
        joined += len(found) < sum(map(len, windows))
    assert joined > 60


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 2])
def test_ctranslate2_says_the_same_of_a_folder_that_is_given_back(models, tmp_path, seed):
    ctranslate2 = pytest.importorskip("ctranslate2")
    foreign, _ = models(seed, timed=False)
    config, params, tokenizer, _ = jax_transformer.load(foreign.folder)
    back, written = tmp_path / "back", tmp_path / "ctranslate2"
    jax_transformer.convert.to_huggingface(
        params, config, back, family="whisper", tokenizer=tokenizer
    )
    shutil.copy(foreign.folder / "generation_config.json", back)
    ctranslate2.converters.TransformersConverter(str(back)).convert(str(written))
    other, transcriber = ctranslate2.models.Whisper(str(written)), Transcriber(back)
    names = ("startoftranscript", "de", "transcribe", "notimestamps")
    prompt, texts = [foreign.id(name) for name in names], set()
    sounds = [sound(0.9, number) for number in range(10)]
    for heard, ours in zip(
        sounds, transcriber(sounds, language="de", **GREEDY, **NONE_FAIL), strict=True
    ):
        features = log_mel(np.pad(heard, (0, SECOND - len(heard))), BANDS).T[None]
        (found,) = other.generate(
            ctranslate2.StorageView.from_array(np.ascontiguousarray(features)),
            [prompt],
            beam_size=1,
            max_length=2 * (LENGTH - len(prompt)),  # of which CTranslate2 takes the half
        )
        assert tokenizer.decode(found.sequences_ids[0]).strip() == ours.text
        texts.add(ours.text)
    assert len(texts) > 3
