"""What a transcription must survive: vanished files, what is no sound, odd times and settings."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest

import jax_transformer
from jax_transformer import InputError, Transcriber
from jax_transformer.commands import main as cli
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.transcription.segments import Segment, Transcript
from tests.models import unchecked
from tests.transcription.whisper_folder import SECOND, sound, write_folder

soundfile = pytest.importorskip("soundfile")
GREEDY = {"temperatures": (0.0,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("whisper") / "model").folder


@pytest.fixture(scope="module")
def transcriber(folder):
    return Transcriber(folder, batch_size=2)


def test_a_file_that_vanishes_costs_no_other_sound(transcriber):
    def coming():
        yield sound(0.5)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "it.wav"
            soundfile.write(path, sound(1.5, 1), SECOND)
            yield path  # is gone when the generator is asked for more
        yield sound(0.6)

    found = transcriber(coming(), **GREEDY)
    assert [one.fault is None for one in found] == [True, False, True]


@pytest.mark.parametrize("other", [(0.1, 0.2, 0.3), [[0.1], [0.2, 0.3]]], ids=["triple", "ragged"])
def test_what_is_no_sound_costs_no_other_sound(transcriber, other):
    with unchecked():
        found = transcriber([sound(0.5), other, sound(0.6)], **GREEDY)
    assert [one.fault is None for one in found] == [True, False, True]


def test_progress_stays_inside_of_the_sound(transcriber):
    calls = []
    [*transcriber.stream([sound(3.3)], lambda *call: calls.append(call), **GREEDY)]
    assert calls[-1][1] == calls[-1][2]


def test_a_window_without_times_begins_no_segment_before_the_sound(transcriber):
    (found,) = transcriber([sound(1, 10)], **GREEDY)
    assert all(0 <= one.start <= one.end for one in found.segments)


def test_no_text_holds_what_separates_cues():
    parts = (Segment(0.0, 1.0, "a ---> b", ()), Segment(1.0, 2.0, "a\n\nb", ()))
    for form in ("srt", "vtt"):
        written = Transcript("x", "", parts).written(form)
        assert written.count("-->") == 2
        assert "a\n\nb" not in written


@pytest.mark.parametrize("value", [None, "a"])
def test_a_latest_first_time_that_is_no_number_is_no_crash(folder, tmp_path, value):
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    values = json.loads(path.read_text()) | {"max_initial_timestamp_index": value}
    path.write_text(json.dumps(values))
    refused = pytest.raises(InputError, match="max_initial_timestamp_index")
    with contextlib.nullcontext() if value is None else refused:
        Transcriber(tmp_path / "model")


def test_commands_of_text_refuse_it_and_verify_compares_it(folder, tmp_path, capsys):
    (tmp_path / "words").write_text("foo\n")
    refused = {
        ("extend", str(folder), str(tmp_path / "out"), f"--tokens={tmp_path / 'words'}"): "sound",
        ("translate", str(folder), f"--input={tmp_path / 'words'}"): "reads sound",
        ("export", str(folder), str(tmp_path / "out")): "reads sound",
        ("budget", f"--model={folder}"): "from token ids",
        ("train", "--preset=whisper", "--steps=1", f"--output={tmp_path / 'run'}"): "reads sound",
    }
    for (command, *arguments), words in refused.items():
        with pytest.raises((InputError, SystemExit), match=words):
            cli.command_call(command, *arguments)()
    cli.command_call("verify", str(folder))()
    assert "a agrees with b" in capsys.readouterr().out


def test_a_model_that_overflows_is_no_silence(folder, tmp_path):
    config, params, tokenizer, generation = jax_transformer.load(folder)
    params["decoder"]["norm"]["scale"] = 1e38 * params["decoder"]["norm"]["scale"]
    jax_transformer.save(tmp_path / "large", (config, params, tokenizer, generation))
    with pytest.raises(NonFiniteError, match="sound 1 are NaN or infinite at step"):
        Transcriber(tmp_path / "large")([sound(0.5)], **GREEDY)
