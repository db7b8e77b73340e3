"""The trainer's front door: a run on real files, on the embedded task, and every bad input."""

import gzip
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest
import yaml

import train
from jax_transformer import TransformerConfig
from jax_transformer.commands import main as cli
from jax_transformer.data.tokenizer import BytePairTokenizer
from jax_transformer.training.run import output
from jax_transformer.training.run.lock import locked
from jax_transformer.training.run.metrics import read_metrics
from jax_transformer.training.run.settings_file import read_settings
from jax_transformer.translation.model_folder import load

ROOT = Path(train.__file__).parent
FILES = ("source", "target", "valid_source", "valid_target")
SMALL = (
    "--vocab-size=16 --d-model=8 --num-heads=2 --d-ff=8 --num-encoder-layers=1 "
    "--num-decoder-layers=1 --steps=12 --warmup-steps=4 --bucket-count=1 --max-tokens=60"
).split()
WORDS = ["ab", "ba", "abba", "baab", "a b", "b a"]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """The four files in the working directory: words, and the same words in capitals."""
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{word}\n" for word in WORDS)
    for name in FILES:
        content = (text.upper() if name.endswith("target") else text).encode()
        Path(name).write_bytes(gzip.compress(content) if name == "source" else content)
    return {name: name for name in FILES}


def arguments(files, *options):
    named = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    return [*named, *SMALL, *options]


def program(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    train.main()


def written():
    """Return when each file was last written; when it was read does not matter."""
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*")}


def refusal(monkeypatch, capsys, *argv):
    """Return the one line that a refused run leaves on standard error; it writes nothing."""
    before = written()
    with pytest.raises(SystemExit) as left:
        program(monkeypatch, *argv)
    assert isinstance(left.value.code, str)  # Python prints it on standard error and leaves with 1
    assert left.value.code.startswith("error: ")
    assert "\n" not in left.value.code
    assert capsys.readouterr().err == ""
    assert written() == before
    return left.value.code


def test_files_to_checkpoint_to_translations(corpus, monkeypatch, capsysbinary):
    program(monkeypatch, *arguments(corpus, "--output=models/first"))
    shown = capsysbinary.readouterr().out.decode()
    assert "training: 6 pairs read, 0 dropped for an empty side" in shown
    assert re.search(r"1 batch shapes compiled in \d+\.\d s", shown)
    assert re.search(r"step 12: validation loss \d\.\d{3}", shown)
    assert "checkpoint of step 12 written to models/first" in shown
    assert re.search(r"  ab\n    .*\n    \(AB\)\n", shown)
    assert re.search(r"BLEU = \d+\.\d\d .*nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp", shown)
    assert re.search(r"wall time, compilation included: \d+ s", shown)
    assert sorted(path.name for path in Path("models/first").iterdir()) == [
        "attention.png",
        "config.json",
        "curves.png",
        "metrics.jsonl",
        "model.safetensors",
        "run",
        "settings.yaml",
        "tokenizer.json",
    ]
    (evaluated,) = [
        report
        for report in read_metrics(Path("models/first/metrics.jsonl"))
        if "validation_loss" in report
    ]
    assert evaluated["step"] == 12
    assert 0 <= evaluated["validation_bleu"] <= 100
    assert load(Path("models/first")).config.d_model == 8

    monkeypatch.setattr(sys, "argv", ["jax-transformer", "translate", "models/first"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\n\nb a\n")))
    cli.main()
    translated = capsysbinary.readouterr().out.decode().split("\n")
    assert len(translated) == 4
    assert translated[1] == translated[3] == ""


def test_a_file_of_settings_is_as_good_as_flags(corpus, monkeypatch, capsys):
    program(monkeypatch, *arguments(corpus, "--output=flags", "--bleu-tokenization=none"))
    flags = capsys.readouterr().out
    settings = Path("flags/settings.yaml").read_text()
    assert settings in flags
    of_one_start = {"config", "overwrite", "resume", "coordinator", "num_processes", "process_id"}
    assert of_one_start.isdisjoint(yaml.safe_load(settings))
    Path("mine.yaml").write_text(settings.replace("output: flags", "output: null"))
    program(monkeypatch, "--config=mine.yaml", "--output", "file", "--steps=13")
    shown = capsys.readouterr().out
    assert "step 13: validation loss" in shown
    assert "tok:none" in shown
    assert "chrF2 = " in shown
    expected = settings.replace("flags", "file").replace("steps: 12", "steps: 13")
    assert Path("file/settings.yaml").read_text() == expected

    Path("mine.yaml").write_text("training: {stepps: 3}")
    message = refusal(monkeypatch, capsys, "--config=mine.yaml", "--output=other")
    assert message.endswith("training: knows no setting stepps; did you mean steps?")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_the_recipes_are_settings(path):
    recipe = read_settings(path, train.Arguments())
    recipe.training.check()
    assert recipe.training.max_tokens >= 8192
    assert recipe.d_model % recipe.num_heads == 0


def test_the_best_model_may_be_that_of_the_highest_bleu(corpus, monkeypatch, capsys):
    scores = iter([3.0, 5.0, 4.0, 1.0])
    monkeypatch.setattr(train.scores, "bleu", lambda *_: train.scores.Score(next(scores), "BLEU"))
    options = ("--output=model", "--select-by=bleu", "--steps=3", "--evaluation-interval=1")
    program(monkeypatch, *arguments(corpus, *options))
    assert "checkpoint of step 2 written to model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "cache"}, "cache/jax-transformer"),
        ({"XDG_CACHE_HOME": "", "HOME": "home"}, "home/.cache/jax-transformer"),
        ({"XDG_CACHE_HOME": "cache", "JAX_COMPILATION_CACHE_DIR": "mine"}, "mine"),
    ],
)
def test_what_is_compiled_is_kept(tmp_path, environment, folder):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    code = (
        "import jax, train; train.keep_compilations()\nprint(jax.config.jax_compilation_cache_dir)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == folder


def test_what_cannot_be_scored_or_logged_is_refused_first(corpus, monkeypatch, capsys):
    refused = arguments(corpus, "--output=model", "--bleu-tokenization=13b")
    assert "bleu_tokenization='13b' must be one of" in refusal(monkeypatch, capsys, *refused)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    refused = arguments(corpus, "--output=model", "--tensorboard")
    assert "needs tensorboardX" in refusal(monkeypatch, capsys, *refused)


def test_without_files_the_task_is_number_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = [option for option in SMALL if not option.startswith(("--vocab", "--token"))]
    program(monkeypatch, *small, "--steps=2", "--max-tokens=20000", "--max-length=20")
    shown = capsys.readouterr().out
    assert "training: 9,000 pairs read" in shown
    assert re.search(r"exact match on 1,000 held-out numbers: \d+\.\d\d%", shown)
    assert load(Path("runs/0")).tokenizer.vocab_size == 90
    assert train.first_free_run() == Path("runs/1")


@pytest.mark.parametrize("preset", sorted({*TransformerConfig.presets()} - {"torch_nn"}))
def test_the_ids_of_every_preset_are_the_tokenizers(preset):
    tokenizer = BytePairTokenizer.train(WORDS, vocab_size=8)
    arguments = train.Arguments(preset=preset, d_model=24, dropout=0.3)
    config = train.model_config(arguments, tokenizer)
    assert (config.pad_id, config.bos_id, config.eos_id) == (0, 1, 2)
    assert config.src_vocab_size == config.tgt_vocab_size == tokenizer.vocab_size
    assert (config.d_model, config.dropout) == (24, 0.3)


def test_an_existing_output_is_refused_before_anything_is_read(corpus, monkeypatch, capsys):
    Path("model").mkdir()
    files = dict.fromkeys(FILES, "missing")
    assert "model: exists already" in refusal(
        monkeypatch, capsys, *arguments(files, "--output=model")
    )
    assert "model: is not the folder of a trained model" in refusal(
        monkeypatch, capsys, *arguments(files, "--output=model", "--overwrite")
    )


BAD_FILES = {
    "line counts": (
        {"target": b"A\nB\n"},
        "source and target must be line-aligned but have 6 and 2 lines",
    ),
    "validation line counts": ({"valid_source": b"a\n"}, "but have 1 and 6 lines"),
    "not UTF-8": ({"target": b"A\nB\xff\n" + b"A\n" * 4}, "target:2:2: byte 0xff is not UTF-8"),
    "empty": ({"source": b"", "target": b""}, "hold no pair with text on both sides"),
    "blank": ({"source": b"\n", "target": b"A\n"}, "hold no pair with text on both sides"),
    "overlong": (
        {"valid_source": b"ab\n" * 5 + b"ab " * 200 + b"\n"},
        "max_length=128 is too short for 1 of 6 validation pairs",
    ),
}


@pytest.mark.parametrize(("contents", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused(corpus, monkeypatch, capsys, contents, message):
    for name, content in contents.items():
        Path(name).write_bytes(content)
    assert message in refusal(monkeypatch, capsys, *arguments(corpus))


BAD_ARGUMENTS = {
    "--source=missing": "missing: No such file",
    "--steps=0": "steps=0 must be at least 1",
    "--label-smoothing=1": "label_smoothing=1.0",
    "--num-heads=3": "num_heads=3 must divide d_model=8",
    "--d-model=7": "num_heads=2 must divide d_model=7",
    "--dropout=1.5": "dropout=1.5",
    "--vocab-size=5": "vocab_size=5 must be at least",
    "--max-length=2": "max_length=2 is too short for 5 of 6 validation pairs",
    "--preset=nonsense": "preset='nonsense' is unknown",
    "--preset=torch_nn": "token_embeddings='none'",
    "--output=source/model": "is no writable directory",
}


@pytest.mark.parametrize(("argument", "message"), BAD_ARGUMENTS.items(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_refused(corpus, monkeypatch, capsys, argument, message):
    assert message in refusal(monkeypatch, capsys, *arguments(corpus, argument))


def test_files_come_in_fours(corpus, monkeypatch, capsys):
    for name in FILES:
        others = {other: path for other, path in corpus.items() if other != name}
        line = refusal(monkeypatch, capsys, *arguments(others))
        assert line.startswith(f"error: {name}=None: name all four")


def test_overlong_and_empty_training_pairs_are_dropped_and_counted(corpus, monkeypatch, capsys):
    Path("source").write_text("ab\n\nab\n" + "ab " * 200 + "\nab\n")
    Path("target").write_text("AB\nAB\n \nAB\nAB\n")
    program(monkeypatch, *arguments(corpus, "--output=model"))
    shown = capsys.readouterr().out
    assert "training: 5 pairs read, 2 dropped for an empty side; 2 pairs" in shown
    assert "1 dropped as too long" in shown


def test_the_program_leaves_with_code_1_and_one_line(tmp_path):
    command = [sys.executable, ROOT / "train.py", "--source=missing", "--target=missing"]
    command += ["--valid-source=missing", "--valid-target=missing"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: missing: No such file or directory; .*\n", done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def finished(corpus, monkeypatch):
    """A run of 12 steps at model."""
    program(monkeypatch, *arguments(corpus, "--output=model", "--evaluation-interval=5"))
    return Path("model")


def test_resume_needs_nothing_but_the_directory(finished, monkeypatch, capsys):
    capsys.readouterr()
    program(monkeypatch, "--output=model", "--resume", "--steps=17")
    shown = capsys.readouterr().out
    assert "resumed at step 12 of 17" in shown
    assert re.search(r"(?s)step 15: validation loss .*\nstep 17: validation loss", shown)
    assert re.search(r"checkpoint of step 1\d written to model", shown)
    assert load(finished).config.d_model == 8
    steps = [report["step"] for report in read_metrics(finished / "metrics.jsonl")]
    assert steps == sorted(steps)
    assert set(steps) == {5, 10, 12, 15, 17}


def test_a_finished_run_is_finished_again(finished, monkeypatch, capsys):
    before = load(finished)
    program(monkeypatch, "--output=model", "--resume")
    assert "resumed at step 12 of 12" in capsys.readouterr().out
    for ours, theirs in zip(
        *map(jax.tree.leaves, (before.params, load(finished).params)), strict=True
    ):
        assert (ours == theirs).all()


CONTRADICTIONS = {
    "--d-model=16": "d_model=16 is not the run's, which has 8",
    "--preset=pre_norm": "is not the run's",
    "--dropout=0.2": "dropout=0.2 is not the run's, which has 0.1",
    "--vocab-size=17": "vocab_size=17 is not the run's, which has 16",
    "--seed=1": "seed=1 is not the run's, which has 0",
    "--warmup-steps=5": "warmup_steps=5 is not the run's, which has 4",
    "--adam-beta2=0.9": "adam_beta2=0.9 is not the run's, which has 0.98",
    "--source=target": "text's sha256=",
    "--overwrite": "resume=True needs --output, the run's directory, and no --overwrite",
}


def test_what_contradicts_the_run_is_refused(finished, monkeypatch, capsys):
    capsys.readouterr()
    for argument, message in CONTRADICTIONS.items():
        line = refusal(monkeypatch, capsys, "--output=model", "--resume", argument)
        assert message in line, argument
    assert "needs --output" in refusal(monkeypatch, capsys, "--resume")
    line = refusal(monkeypatch, capsys, "--resume", "--output=other")
    assert line == "error: other/run: holds no checkpoint of a run; start one without resume"


def test_a_damaged_checkpoint_costs_some_steps_and_not_the_run(finished, monkeypatch, capsys):
    (finished / "run/12/arrays/_METADATA").unlink()
    program(monkeypatch, "--output=model", "--resume")
    shown = capsys.readouterr().out
    assert "WARNING: model/run/12 is damaged (ValueError: arrays/_METADATA is missing)" in shown
    assert "resumed at step 10 of 12" in shown


def test_overwriting_starts_the_run_over(finished, corpus, monkeypatch, capsys):
    program(monkeypatch, *arguments(corpus, "--output=model", "--overwrite", "--steps=3"))
    assert "checkpoint of step 3 written to model" in capsys.readouterr().out
    assert sorted(path.name for path in (finished / "run").iterdir()) == ["0", "3"]
    assert {report["step"] for report in read_metrics(finished / "metrics.jsonl")} == {3}


@pytest.fixture
def begun(corpus, monkeypatch, capsys):
    """A run at model that ended as it compiled its steps."""
    interrupted = mock.patch.object(train.loop, "_compile_steps", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        program(monkeypatch, *arguments(corpus, "--output=model"))
    capsys.readouterr()
    assert [path.name for path in Path("model").iterdir()] == ["settings.yaml"]
    return Path("model")


def test_a_run_that_ended_before_its_first_checkpoint_is_started_again(
    begun, corpus, monkeypatch, capsys
):
    (begun / "run/0.orbax-checkpoint-tmp-1").mkdir(parents=True)
    (begun / "metrics.jsonl").write_text('{"step": 5, "loss": 5.5}\n')
    line = refusal(monkeypatch, capsys, "--output=model", "--resume")
    assert line == "error: model/run: holds no checkpoint of a run; start one without resume"
    with locked(begun):
        line = refusal(monkeypatch, capsys, *arguments(corpus, "--output=model"))
    assert line.startswith("error: model: another process is training this run")
    program(monkeypatch, *arguments(corpus, "--output=model"))
    assert "checkpoint of step 12 written to model" in capsys.readouterr().out
    assert sorted(path.name for path in (begun / "run").iterdir()) == ["0", "12"]
    assert {report["step"] for report in read_metrics(begun / "metrics.jsonl")} == {10, 12}


@pytest.mark.parametrize("kept", ["run/4/arrays", "run/damaged/4", "notes", "model.safetensors"])
def test_a_directory_with_more_than_a_beginning_is_kept(begun, corpus, monkeypatch, capsys, kept):
    (begun / kept).mkdir(parents=True)
    line = refusal(monkeypatch, capsys, *arguments(corpus, "--output=model"))
    assert "model: exists already; name another output, overwrite it, or resume" in line
    line = refusal(monkeypatch, capsys, *arguments(corpus, "--output=model", "--overwrite"))
    assert line.endswith("is not overwritten; name another output, or delete it")


def test_evaluations_without_a_checkpoint_are_replaced_by_who_says_so(
    begun, corpus, monkeypatch, capsys
):
    (begun / "metrics.jsonl").write_text('{"step": 10, "validation_loss": 5.5}\n')
    line = refusal(monkeypatch, capsys, *arguments(corpus, "--output=model"))
    assert "model: exists already; name another output, overwrite it" in line
    output.check_output(begun, overwrite=True)


def test_a_run_that_a_signal_stops_leaves_with_its_code_and_can_go_on(corpus, tmp_path):
    command = [sys.executable, ROOT / "train.py"]
    options = ["--output=model", "--steps=100000", "--evaluation-interval=1000"]
    with subprocess.Popen(
        [*command, *arguments(corpus, *options)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert any("batch shapes compiled" in line for line in iter(process.stdout.readline, ""))
        while not (tmp_path / "model/metrics.jsonl").exists():
            assert process.poll() is None
        process.terminate()
        shown = process.stdout.read()
    assert process.returncode == 143
    (step,) = re.findall(r"stopped by SIGTERM: step ([\d,]+) is saved in model; resume", shown)
    assert not (tmp_path / "model/config.json").exists()
    steps = int(step.replace(",", "")) + 2
    done = subprocess.run(
        [*command, "--output=model", "--resume", f"--steps={steps}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"resumed at step {step} of {steps:,}" in done.stdout
    assert load(tmp_path / "model").config.d_model == 8
