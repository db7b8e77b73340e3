"""`jax-transformer train --resume`: what goes on, what is refused, and what is lost on the way."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from unittest import mock

import jax
import pytest
import yaml

from jax_transformer import InputError
from jax_transformer.commands import train
from jax_transformer.runs import checkpoints, corpora
from jax_transformer.runs.arguments import Arguments, kept_arguments
from jax_transformer.runs.metrics import read_metrics
from jax_transformer.text.store import default_store
from jax_transformer.translation.model_folder import load
from tests.commands.training import arguments, checked, program, refusal


@pytest.mark.usefixtures("no_pictures")
def test_resume_needs_nothing_but_the_directory(finished, capsys):
    capsys.readouterr()
    program("--output=model", "--resume", "--steps=17")
    shown = capsys.readouterr().out
    assert "resumed at step 12 of 17" in shown
    assert re.search(r"(?s)step 15: validation loss .*\nstep 17: validation loss", shown)
    assert re.search(r"model of step 1\d written to model", shown)
    assert load(finished).config.d_model == 8
    steps = [report["step"] for report in read_metrics(finished / "metrics.jsonl")]
    assert steps == sorted(steps)
    assert set(steps) == {5, 10, 12, 15, 17}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.exhaustive
def test_a_finished_run_is_finished_again(finished, capsys):
    before = load(finished)
    program("--output=model", "--resume")
    assert "resumed at step 12 of 12" in capsys.readouterr().out
    for ours, theirs in zip(
        *map(jax.tree.leaves, (before.params, load(finished).params)), strict=True
    ):
        assert (ours == theirs).all()


CONTRADICTIONS = {
    "--d-model=16": "d_model=16 is not the run's, which has 8",
    "--preset=pre_norm": "preset='pre_norm' is not the run's, which has 'vaswani2017'",
    "--activation=gelu": "activation='gelu' is not the run's, which has 'relu'",
    "--norm-placement=pre": "norm_placement='pre' is not the run's, which has 'post'",
    "--dropout=0.2": "dropout=0.2 is not the run's, which has 0.1",
    "--vocab-size=17": "vocab_size=17 is not the run's, which has 16",
    "--seed=1": "0; a resumed run keeps it; for another, start a new run from this one, by --init",
    "--warmup-steps=5": "warmup_steps=5 is not the run's, which has 4",
    "--adam-beta2=0.9": "adam_beta2=0.9 is not the run's, which has 0.98",
    "--source=target": "text's sha256=",
    "--overwrite": "resume=True needs --output, the run's directory, and no --overwrite",
}


def test_what_contradicts_the_run_is_refused(finished, monkeypatch, capsys):
    capsys.readouterr()
    # The text is read only where it differs itself, and is not encoded then.
    monkeypatch.setattr(corpora, "prepared_corpus", lambda *_: pytest.fail("text was encoded"))
    for argument, message in CONTRADICTIONS.items():
        with monkeypatch.context() as patched:
            if not argument.startswith("--source"):
                patched.setattr(train, "read_corpora", lambda *_: pytest.fail("text was read"))
            line = refusal(capsys, "--output=model", "--resume", argument)
        assert message in line, argument
    assert "needs --output" in refusal(capsys, "--resume")
    line = refusal(capsys, "--resume", "--output=other")
    assert line == "error: other/run: holds no checkpoint of a run; start one without resume"


CONTRADICTING_FILES = {
    "model: {d_model: 16}": "d_model=16 is not the run's, which has 8",
    "training: {warmup_steps: 5}": "warmup_steps=5 is not the run's, which has 4",
    "vocab_size: 17": "vocab_size=17 is not the run's, which has 16",
    "preset: pre_norm": "preset='pre_norm' is not the run's, which has 'vaswani2017'",
    "training: {stepps: 3}": "stepps=3 is not a setting; did you mean steps?",
}


def test_a_file_is_compared_with_the_resumed_run_as_flags_are(finished, capsys):
    def contradicts(text, *flags):
        Path("changed.yaml").write_text(text)
        options = ("--config=changed.yaml", "--output=model", "--resume", *flags)
        return refusal(capsys, *options)

    capsys.readouterr()
    for text, message in CONTRADICTING_FILES.items():
        assert message in contradicts(text), text
    Path("changed.yaml").write_text("output: other\ntraining: {steps: 14}")
    for steps, flags in ((14, ()), (15, ("--steps=15",))):
        checked("--config=changed.yaml", "--output=model", "--resume", *flags)
        assert f"resumed at step 12 of {steps}" in capsys.readouterr().out
        written = yaml.safe_load((finished / "settings.yaml").read_text())
        assert (written["output"], written["training"]["steps"]) == ("model", steps)
    checked("--config=model/settings.yaml", "--output=model", "--resume")  # its own file
    checked("--output=model", "--resume", "--bleu-tokenization=char")  # which selects no model


def test_a_resumed_run_keeps_the_folder_of_its_encoded_text(finished, monkeypatch):
    def resumed(named, *flags):
        """Return the folder of a run that was started with one, and is resumed with flags."""
        arguments = dataclasses.replace(Arguments(), prepared=named)
        kept = json.loads(json.dumps(kept_arguments(arguments)))
        monkeypatch.setattr(checkpoints, "settings_from_json", with_arguments(kept))
        with pytest.raises(SystemExit, match="enough"):
            program("--output=model", "--resume", *flags)
        return store.call_args.args[0].store

    def with_arguments(kept):
        return lambda *read: settings_from_json(*read)._replace(arguments=kept)

    settings_from_json = checkpoints.settings_from_json
    store = mock.Mock(side_effect=InputError("enough"))
    monkeypatch.setattr(train, "read_corpora", store)
    assert resumed(Path("kept")) == Path("kept").absolute()
    assert resumed(Path("kept"), "--prepared=other") == Path("other")
    usual = default_store()
    assert resumed(None) == usual
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("another user").absolute()))
    assert resumed(None) == default_store() != usual


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.exhaustive
def test_bleu_that_selects_stays_as_it_is(corpus, capsys):
    program(*arguments(corpus, "--output=model", "--select-by=bleu", "--steps=1"))
    capsys.readouterr()
    line = refusal(capsys, "--output=model", "--resume", "--bleu-tokenization=char")
    assert "bleu_tokenization='char' is not the run's, which has '13a'" in line


@pytest.mark.exhaustive
def test_a_lost_log_is_a_warning_and_the_model_is_written(finished, capsys):
    (finished / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    (finished / "curves.png").unlink()
    (finished / "model" / "config.json").unlink()
    program("--output=model", "--resume")
    shown = capsys.readouterr().out
    assert "WARNING: model/metrics.jsonl: reports up to step 12 are missing or damaged" in shown
    assert "WARNING: model/curves.png is not drawn (there is no report of a loss)" in shown
    assert "drawn: model/attention.png" in shown
    assert load(finished).config.d_model == 8


@pytest.mark.exhaustive
def test_of_an_output_that_is_deleted_during_the_run_the_rest_is_written(
    corpus, monkeypatch, capsys
):
    mean_loss, losses = train.loop._mean_loss, []

    def deleting(*arguments):
        if losses:
            while not Path("model/run/8").exists():  # it is being written
                time.sleep(0.01)
            shutil.rmtree("model")
        losses.append(mean_loss(*arguments))
        return losses[-1]

    monkeypatch.setattr(train.loop, "_mean_loss", deleting)
    program(*arguments(corpus, "--output=model", "--evaluation-interval=8"))
    assert len(losses) == 2
    assert "WARNING: model/curves.png is not drawn" in capsys.readouterr().out
    assert load(Path("model")).config.d_model == 8
    assert sorted(path.name for path in Path("model/run").iterdir()) == ["12", "start"]
