"""`jax-transformer train`: a run on real files, on the embedded task, and every bad input."""

import importlib.util
import io
import itertools
import re
import shutil
import signal
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from unittest import mock

import jax
import pytest
import yaml

from jax_transformer import InputError, TransformerConfig
from jax_transformer.commands import main as cli
from jax_transformer.commands import train
from jax_transformer.commands.train_arguments import named_settings
from jax_transformer.config.declared import declarations
from jax_transformer.kernels.attention_backend import choose_for
from jax_transformer.runs import evaluation, output
from jax_transformer.runs.arguments import Arguments
from jax_transformer.runs.checkpoints import locked
from jax_transformer.runs.metrics import read_metrics
from jax_transformer.runs.model_settings import DECIDED
from jax_transformer.text import number_words, store
from jax_transformer.training.config import TrainingConfig
from jax_transformer.translation.model_folder import load
from tests.commands.training import SMALL, TEXT, arguments, checked, program, refusal

pytestmark = pytest.mark.usefixtures("no_pictures")

ROOT = Path(__file__).parents[2]


def test_files_to_checkpoint_to_translations(first_run, monkeypatch, capsysbinary):
    directory, shown = first_run
    assert "training: 6 pairs read; 6 pairs of " in shown
    settings = shown.partition("mesh: ")[0].splitlines()[2:]
    assert settings == [
        "model: preset vaswani2017, d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1, "
        "num_decoder_layers=1, max_length=128, dropout=0.1, 16 tokens",
        "training: steps=12, schedule=noam, warmup_steps=4, compute_dtype=float32, max_tokens=60, "
        "bucket_count=1, evaluation_interval=5, seed=0",
        "all settings: model/settings.yaml",
    ]
    assert (
        f"\n{choose_for(jax.devices()[0], 'float32', TransformerConfig(d_kv=4), False)}\n" in shown
    )
    assert "compiling the training step for 1 batch shape\ncompiled in " in shown
    evaluated = r"step (\d+): validation loss \d\.\d{3} nats a token\nBLEU = .*\nchrF2 = .*\n"
    assert re.findall(evaluated, shown)[-1] == "12"  # nothing stands between them in a log
    sample = r"  source:      ab\n  translation: .*\n  reference:   AB\n"
    assert len(re.findall(sample, shown)) == 1  # at the end, and not at each evaluation
    assert re.search(r"BLEU = \d+\.\d\d .*nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp", shown)
    assert re.search(r"wall time, compilation included: \d+ s", shown)
    assert shown.endswith(
        "to translate: jax-transformer translate model < FILE\n"
        "to score: jax-transformer translate model < FILE | sacrebleu REFERENCE --tokenize 13a\n"
    )
    names = {path.name for path in (directory / "model").iterdir()}
    assert names >= {"metrics.jsonl", "model", "run", "settings.yaml"}
    assert names >= {"attention.png", "curves.png"}
    reports = read_metrics(directory / "model/metrics.jsonl")
    evaluated = [report for report in reports if "validation_loss" in report]
    assert [report["step"] for report in evaluated] == [5, 10, 12]
    assert all(0 <= report["validation_bleu"] <= 100 for report in evaluated)
    assert [report["rejected"] for report in reports if "loss" in report] == [0] * 3
    # What the last evaluation has shown is not shown again.
    (best,) = re.findall(r"model of step (\d+) written to model\n", shown)
    assert shown.count("BLEU = ") == len(evaluated) + (best != "12")
    assert shown.count("chrF2 = ") == shown.count("BLEU = ")
    assert shown.count("reference:   ABBA\n") == 1

    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"ab\n\nb a\n")))
    )
    cli.main(["translate", str(directory / "model")])
    translated = capsysbinary.readouterr().out.decode().split("\n")
    assert len(translated) == 4
    assert translated[1] == translated[3] == ""


def test_help_is_short_and_speaks_of_no_constants_of_the_code(capsys):
    pages = {}
    for flags in (("--help",), ("--source=x", "-h"), ("--source=x", "--help-all")):
        with pytest.raises(SystemExit):
            program(*flags)
        pages[flags[-1]] = shown = " ".join((page := capsys.readouterr().out).split())
        usual = len(page.splitlines()) <= 90
        assert usual == ("--help-all" not in flags)
        assert not re.search("`[A-Z_]+`|None|==SUPPRESS|Posix", shown)
    assert "(default: 200)" in pages["--help"]
    assert "(default: 600)" in pages["-h"]
    assert "(default: x)" in pages["-h"]
    assert "--adam-beta1" not in pages["--help"]
    assert "written as Hugging Face folders later" in pages["--help-all"]
    assert "Layers of the encoder, at most 10,000." in pages["--help-all"]
    fields = {*declarations(TransformerConfig), *declarations(TrainingConfig)} - {*DECIDED}
    for name in fields:
        assert f" --{name.replace('_', '-')} " in pages["--help-all"].replace(",", " "), name


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/tutorials/*.py")), ids=attrgetter("stem"))
def test_the_usual_help_has_the_flags_of_the_tutorials(path, capsys):
    with pytest.raises(SystemExit):
        program("--source=x", "--help")
    shown = capsys.readouterr().out
    commands = re.findall(r"jax-transformer train\b([^)]*)", path.read_text())
    for flag in re.findall("--[a-z-]+", " ".join(commands)):
        assert f"  {flag} " in shown, flag


@pytest.mark.exhaustive
def test_a_file_of_settings_is_as_good_as_flags(first_run, corpus, capsys):
    directory, shown = first_run
    settings = (directory / "model/settings.yaml").read_text()
    of_one_start = {"config", "overwrite", "resume", "coordinator", "num_processes", "process_id"}
    assert of_one_start.isdisjoint(yaml.safe_load(settings))
    Path("mine.yaml").write_text(settings.replace("output: model", "output: null"))
    options = ["--output", "file", "--steps=3", "--bleu-tokenization=none", "--activation=gelu"]
    program("--config=mine.yaml", *options)
    shown = capsys.readouterr().out
    assert "step 3: validation loss" in shown
    assert "tok:none" in shown
    expected = yaml.safe_load(settings)
    expected |= {"output": "file", "bleu_tokenization": "none"}
    expected["training"]["steps"] = 3
    expected["model"]["activation"] = "gelu"
    assert yaml.safe_load(Path("file/settings.yaml").read_text()) == expected
    assert load(Path("file")).config.activation == "gelu"

    Path("mine.yaml").write_text("training: {stepps: 3}")
    message = refusal(capsys, "--config=mine.yaml", "--output=other")
    assert message.endswith("training: stepps=3 is not a setting; did you mean steps?")


@pytest.mark.exhaustive
def test_the_best_model_may_be_that_of_the_highest_bleu(corpus, monkeypatch, capsys):
    scores = iter([3.0, 5.0, 4.0, 1.0])
    score = evaluation.scores.Score
    monkeypatch.setattr(evaluation.scores, "bleu", lambda *_: score(next(scores), "BLEU"))
    options = ("--output=model", "--select-by=bleu", "--steps=3", "--evaluation-interval=1")
    program(*arguments(corpus, *options))
    assert "model of step 2 written to model" in capsys.readouterr().out


def test_without_a_home_the_folder_of_encoded_text_is_asked_for(corpus, monkeypatch, capsys):
    monkeypatch.setattr(store, "user_cache", lambda: None)
    line = refusal(capsys, *arguments(corpus, "--output=model"))
    assert line.startswith("error: there is no home folder to keep encoded text in; name a folder")
    kept = Path("kept")
    assert Arguments(prepared=kept).store == kept


def test_what_cannot_be_logged_is_refused_first(corpus, capsys):
    find_spec = importlib.util.find_spec
    refused = arguments(corpus, "--output=model", "--tensorboard")
    for module, extra in (("tensorboardX", "tensorboard"), ("matplotlib", "train")):

        def without(name, module=module):
            return None if name == module else find_spec(name)

        with mock.patch.object(importlib.util, "find_spec", without):
            line = refusal(capsys, *refused)
        assert line == (
            f"error: jax-transformer train needs {module}, which is not installed: "
            f'pip install "jax-transformer[{extra}]"'
        )


@pytest.mark.exhaustive
def test_without_files_the_task_is_number_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(number_words, "NUMBERS", 500)
    monkeypatch.setattr(number_words, "HELD_OUT", 40)
    small = [option for option in SMALL if not option.startswith("--vocab")]
    program(*small, "--steps=2", "--max-tokens=20000", "--max-length=20")
    shown = capsys.readouterr().out
    assert "training: 460 pairs read" in shown
    assert re.search(r"exact match on 40 held-out numbers: \d+\.\d\d%", shown)
    assert shown.endswith("to translate: jax-transformer translate runs/0 < FILE\n")
    assert load(Path("runs/0")).tokenizer.src_vocab_size == 90
    assert train.first_free_run() == Path("runs/1")


@pytest.mark.exhaustive
def test_without_validation_files_pairs_are_held_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{'ab'[n % 2]} {'ab'[n // 2 % 2]}{'ab' * (n % 3)} {n}" for n in range(60)]
    lines[7] = "ab " * 200
    Path("source").write_text("\n".join([*lines, ""]) + "\n")
    Path("target").write_text("\n".join([*lines, ""]).upper() + "\n")
    small = [option for option in SMALL if not option.startswith(("--vocab", "--steps"))]
    options = ["--source=source", "--target=target", "--vocab-size=40", *small, "--output=model"]
    program(*options, "--steps=2", "--valid-pairs=30")
    shown = capsys.readouterr().out
    read = "61 pairs read, 1 dropped for an empty side, "
    assert f"training: {read}" in shown
    assert "30 held out for validation; " in shown
    assert "validation: 30 pairs of the training text, chosen by the seed; " in shown
    kept = [int(pairs) for pairs in re.findall(r"(\d+) pairs of [\d,]+ tokens kept", shown)]
    assert sorted(kept) == [29, 30]  # the overlong pair is in one of them
    program("--output=model", "--resume", "--steps=3")
    assert "resumed at step 2 of 3" in capsys.readouterr().out
    for other, message in {
        "--valid-pairs=29": "valid_pairs=29 is not the run's, which has 30",
        "--seed=1": "seed=1 is not the run's, which has 0",
    }.items():
        assert message in refusal(capsys, "--output=model", "--resume", other)


@pytest.mark.exhaustive
def test_a_run_without_a_usable_evaluation_leaves_with_code_1(corpus, monkeypatch):
    monkeypatch.setattr(train.loop, "_mean_loss", lambda *_: float("nan"))
    with pytest.raises(SystemExit) as left:
        program(*arguments(corpus, "--output=model"))
    assert left.value.code.startswith("error: step 12: the validation loss is not finite, and no")
    assert not Path("model/config.json").exists()


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
def test_bad_files_are_refused(corpus, capsys, contents, message):
    for name, content in contents.items():
        Path(name).write_bytes(content)
    assert message in refusal(capsys, *arguments(corpus))


@pytest.mark.parametrize("named", [*itertools.product((False, True), repeat=4)])
def test_files_come_in_pairs(corpus, capsys, named):
    files = {name: path for (name, path), kept in zip(corpus.items(), named, strict=True) if kept}
    if named[0] == named[1] and named[2] == named[3] and named[0] >= named[2]:
        checked(*arguments(files, "--vocab-size=90", "--max-length=200"))
        return
    line = refusal(capsys, *arguments(files))
    assert re.match(r"error: \w+=None: name the (file|training text) beside ", line)


def test_overlong_and_empty_training_pairs_are_dropped_and_counted(corpus, capsys):
    Path("source").write_text("ab\n\nab\n" + "ab " * 200 + "\nab\n")
    Path("target").write_text("AB\nAB\n \nAB\nAB\n")
    checked(*arguments(corpus, "--output=model"))
    shown = capsys.readouterr().out
    read = "training: 5 pairs read, 1 dropped as too long, 2 dropped for an empty side; 2 pairs"
    assert read in shown


def test_the_program_leaves_with_code_1_and_one_line(tmp_path):
    command = [sys.executable, ROOT / "train.py", "--source=missing", "--target=missing"]
    command += ["--valid-source=missing", "--valid-target=missing"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: missing is no readable text; .*\n", done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_overwriting_starts_the_run_over(finished, corpus, capsys):
    program(*arguments(corpus, "--output=model", "--overwrite", "--steps=3"))
    assert "model of step 3 written to model" in capsys.readouterr().out
    assert sorted(path.name for path in (finished / "run").iterdir()) == ["0", "3", "start"]
    assert {report["step"] for report in read_metrics(finished / "metrics.jsonl")} == {3}


@pytest.fixture
def begun(corpus, monkeypatch, capsys):
    """A run at model that ended as it compiled its steps."""
    interrupted = mock.patch.object(train.loop, "sharded_train_step", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        program(*arguments(corpus, "--output=model"))
    capsys.readouterr()
    assert [path.name for path in Path("model").iterdir()] == ["settings.yaml"]
    return Path("model")


@pytest.mark.exhaustive
def test_a_run_that_ended_before_its_first_checkpoint_is_started_again(begun, corpus, capsys):
    (begun / "run/0.orbax-checkpoint-tmp-1").mkdir(parents=True)
    (begun / "metrics.jsonl").write_text('{"step": 5, "loss": 5.5}\n')
    line = refusal(capsys, "--output=model", "--resume")
    assert line == "error: model/run: holds no checkpoint of a run; start one without resume"
    with locked(begun):
        line = refusal(capsys, *arguments(corpus, "--output=model"))
    assert line.startswith("error: model: another process is training this run")
    program(*arguments(corpus, "--output=model"))
    assert "model of step 12 written to model" in capsys.readouterr().out
    assert sorted(path.name for path in (begun / "run").iterdir()) == ["0", "12", "start"]
    assert {report["step"] for report in read_metrics(begun / "metrics.jsonl")} == {10, 12}


def test_a_directory_with_more_than_a_beginning_is_kept(begun, corpus, capsys):
    for kept in ("run/4/arrays", "run/damaged/4", "notes", "model.safetensors"):
        (begun / kept).mkdir(parents=True)
        line = refusal(capsys, *arguments(corpus, "--output=model"))
        assert "model: exists already; name another output, or --resume its run" in line, kept
        line = refusal(capsys, *arguments(corpus, "--output=model", "--overwrite"))
        assert line.endswith("is not overwritten; name another output, or delete it"), kept
        shutil.rmtree(begun / Path(kept).parts[0])
    # Evaluations without a checkpoint are replaced by who says so.
    (begun / "metrics.jsonl").write_text('{"step": 10, "validation_loss": 5.5}\n')
    line = refusal(capsys, *arguments(corpus, "--output=model"))
    assert "model: exists already; name another output, overwrite it" in line
    output.check_output(begun, overwrite=True)


@pytest.mark.exhaustive
def test_a_signal_after_the_last_step_stops_the_run_before_its_model_is_written(corpus, capsys):
    trained = train.loop.train

    def interrupted(run, *others):
        best = trained(run, *others)
        run.stop.signal = signal.SIGINT
        return best

    with mock.patch.object(train.loop, "train", interrupted), pytest.raises(SystemExit) as left:
        program(*arguments(corpus, "--output=model"))
    assert left.value.code == 130
    assert "stopped by SIGINT: the run in model is saved, and its model" in capsys.readouterr().out
    assert not Path("model/config.json").exists()
    assert Path("model/run/12").is_dir()


def test_a_run_that_is_refused_leaves_no_folder(corpus, monkeypatch):
    refused = mock.Mock(side_effect=InputError("refused"))
    monkeypatch.setattr(train.loop, "train", refused)
    for existing in (False, True):
        with pytest.raises(SystemExit, match="error: refused"):
            program(*arguments(corpus, "--output=new/model"))
        assert Path("new").exists() is existing
        Path("new/model").mkdir(parents=True, exist_ok=True)
        Path("new/model/settings.yaml").write_text("")  # of an earlier run


RESUMED = ["--output=base", "--resume", "--steps=17"]


@pytest.mark.parametrize(
    ("copied", "place", "options", "message"),
    [
        ("base", "model", [*TEXT, *SMALL, "--output=model"], "model: exists already"),
        ("base/run/12", "base/run/15", RESUMED, "base: another process went on with it; resume"),
    ],
    ids=["begun", "resumed"],
)
def test_an_output_that_another_process_has_taken_in_the_meantime_is_kept(
    base, monkeypatch, copied, place, options, message
):
    read = train.read_and_encode_text

    def overtaken(*read_of):
        shutil.copytree(copied, place)
        return read(*read_of)

    monkeypatch.setattr(train, "read_and_encode_text", overtaken)
    with pytest.raises(SystemExit, match=message):
        program(*options)
    assert Path(place).is_dir()


def test_two_runs_that_start_at_once_without_an_output_take_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [train.first_free_run() for _ in range(2)] == [Path("runs/0"), Path("runs/1")]


@pytest.mark.exhaustive
def test_a_run_that_a_signal_stops_leaves_with_its_code_and_can_go_on(corpus, tmp_path, capsys):
    command = [sys.executable, ROOT / "train.py"]
    options = ["--output=model", "--steps=100000", "--evaluation-interval=1000"]
    with subprocess.Popen(
        [*command, *arguments(corpus, *options)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert any("compiled in " in line for line in iter(process.stdout.readline, ""))
        while not (tmp_path / "model/metrics.jsonl").exists():
            assert process.poll() is None
        process.terminate()
        shown = process.stdout.read()
    assert process.returncode == 143
    assert "SIGTERM: stopping after this step, the run is then saved; send SIGTERM again" in shown
    (step,) = re.findall(r"stopped by SIGTERM: step ([\d,]+) is saved in model; resume", shown)
    assert not (tmp_path / "model/config.json").exists()
    steps = int(step.replace(",", "")) + 2
    program("--output=model", "--resume", f"--steps={steps}")
    assert f"resumed at step {step} of {steps:,}" in capsys.readouterr().out
    assert load(tmp_path / "model").config.d_model == 8


def test_what_the_task_chose_for_its_own_schedule_is_no_fault_of_another():
    rate = ["--schedule=constant", "--learning-rate=0.01"]
    training = named_settings(rate).arguments().training
    assert (training.schedule, training.learning_rate) == ("constant", 0.01)
    with pytest.raises(
        InputError, match=r"^learning_rate=0\.01 has no effect with schedule='noam'"
    ):
        named_settings(rate[1:]).arguments()
