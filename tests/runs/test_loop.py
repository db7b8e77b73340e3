"""The loop on a tiny corpus: what it compiles, shows, keeps and refuses."""

import contextlib
import dataclasses
import io
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jax_transformer import InputError
from jax_transformer.runs import loop
from jax_transformer.runs import metrics as run_metrics
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics
from jax_transformer.runs.state import Position, RunCheckpoint, RunProgress
from jax_transformer.text import plan as planning
from jax_transformer.text.plan import epoch_layout, plan_epoch
from jax_transformer.training import step
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import Metrics
from tests.models import unchecked
from tests.runs.kill_resume import Task, tiny_task
from tests.runs.runs import spoil_steps

SETTINGS = TrainingConfig(
    steps=20,
    warmup_steps=10,
    learning_rate_factor=1.0,
    label_smoothing=0.0,
    max_tokens=512,
    bucket_count=2,
    evaluation_interval=8,
)


@pytest.fixture
def train(tmp_path):
    """The loop as a function of settings and console; each call is a run in its own directory."""
    numbers = itertools.count()

    def call(settings, shown):
        parts, *corpora = tiny_task(Task(settings.steps))
        run = loop.Run(tmp_path / str(next(numbers)), parts._replace(training_config=settings))
        return loop.train(run, *corpora, shown)

    return call


def of_step(loss=2.0, tokens=5, **changes):
    """Return the metrics of a step that is accepted, unless changes say otherwise."""
    metrics = Metrics(np.float32(loss), np.int32(tokens), np.float32(0.1), np.bool_(True))
    return metrics._replace(**changes)


def console(**options):
    return Console(file=io.StringIO(), width=120, markup=False, highlight=False, **options)


def scripted_losses(monkeypatch, losses):
    """Give the evaluations these losses; return the list that their parameters are added to."""
    seen, script = [], iter(losses)

    def scripted(params, *_):
        seen.append(jax.tree.map(jnp.copy, params))
        return next(script)

    monkeypatch.setattr(loop, "_mean_loss", scripted)
    return seen


@pytest.mark.usefixtures("fresh_caches")
def test_learns_shows_its_progress_and_compiles_once_a_bucket(train, monkeypatch, compiled_steps):
    parts, training, _ = tiny_task(Task(SETTINGS.steps))
    traced = []
    original = step.batch_loss

    def counted(params, batch, config, label_smoothing, dropout_key=None, *others, **options):
        kind = "validation" if dropout_key is None else "training"
        traced.append((kind, batch.src.shape))
        return original(params, batch, config, label_smoothing, dropout_key, *others, **options)

    monkeypatch.setattr(step, "batch_loss", counted)
    compiled_steps.clear()
    monkeypatch.setattr(run_metrics, "SECONDS_PER_LINE", 0)
    lines = console()
    best = train(SETTINGS, lines)
    shown = lines.file.getvalue()

    plan = plan_epoch(training, SETTINGS, epoch=0)
    assert SETTINGS.steps > 2 * len(plan)
    shapes = {(planned.rows, planned.length) for planned in plan}
    assert len(shapes) == 2
    assert sorted(shape for kind, shape in traced if kind == "training") == sorted(shapes)
    assert len(traced) <= 4

    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", shown)]
    assert losses[-1] < losses[0] < np.log(parts.config.tgt_vocab_size)
    assert best.step == 20
    assert best.score == pytest.approx(losses[-1], abs=1e-3)
    said = r"compiling the training step for 2 batch shapes\ncompiled in \d+\.\d s\n"
    assert re.search(said, shown)  # also where there is no terminal
    measures = r"loss \d\.\d{3}  learning rate \d\.\d\de-0\d  [\d,]+ tokens/s  0:00:0\d left"
    steps_made = re.findall(rf"step (\d+)/20  {measures}", shown)
    assert steps_made == ["8", "16", "20"]
    assert re.search(r"trained for 0\.\d minutes, at [\d,]+ target tokens/s", shown)


@pytest.mark.exhaustive
def test_a_terminal_shows_it_live(train):
    live = console(force_terminal=True)
    train(SETTINGS, live)
    shown = live.file.getvalue()
    assert "\x1b[2K" in shown  # a line is drawn anew
    assert re.search(r"step 20/20  loss .* left", shown)


def test_a_small_loss_has_digits_that_say_something(monkeypatch):
    monkeypatch.setattr(run_metrics, "SECONDS_PER_LINE", 0)
    lines = console()
    with run_metrics.Progress(lines, first=0, steps=20) as bar:
        bar.report(2, [of_step(0.00021234)])
        for loss in (0.000021234, 0.21234, 2.1):
            bar.report_validation(2, {"": loss})
    found = re.findall(r"loss (\S+)", lines.file.getvalue())
    assert found == ["0.0002123", "2.123e-05", "0.2123", "2.100"]


def test_the_best_parameters_are_kept(train, monkeypatch):
    seen = scripted_losses(monkeypatch, [3.0, 1.0, 2.0])
    best = train(SETTINGS, console())
    assert (best.step, best.score) == (16, 1.0)
    kept, second, third = map(jax.tree.leaves, (best.params, seen[1], seen[2]))
    assert all(map(np.array_equal, kept, second))
    assert not all(map(np.array_equal, kept, third))


def test_as_many_evaluations_without_a_better_one_as_patience_says_end_the_run(train, monkeypatch):
    seen = scripted_losses(monkeypatch, [2.0, 1.0, 1.5, *[0.5] * 7])
    settings = dataclasses.replace(SETTINGS, patience=1, evaluation_interval=2)
    assert train(settings, console()).step == 4
    assert len(seen) == 3


def test_a_loss_that_is_not_finite_ends_the_run_with_the_best_before(train, monkeypatch):
    seen = scripted_losses(monkeypatch, [1.0, float("nan"), 0.5])
    shown = console(soft_wrap=True)
    best = train(SETTINGS, shown)
    assert best.step == 8
    assert len(seen) == 2
    assert (
        "WARNING: step 16: the validation loss is not finite, which ends the run early; the best "
        "earlier parameters, of step 8, are kept; to train for longer, lower the learning rate"
    ) in shown.file.getvalue()


def scripted_steps(monkeypatch, bad):
    """Let the steps of these numbers, from 1, find a loss that is not finite."""
    number = itertools.count(1)

    def spoil(make):
        def run(state, batch):
            state, metrics = make(state, batch)
            fine = next(number) not in bad
            nan = np.float32("nan")
            return state, metrics._replace(finite=fine, loss=metrics.loss if fine else nan)

        return run

    spoil_steps(monkeypatch, spoil)


def test_steps_left_out_are_told_and_count_in_no_mean_and_ten_in_a_row_end_the_run(
    train, monkeypatch
):
    monkeypatch.setattr(run_metrics, "SECONDS_PER_LINE", 0)
    scripted_steps(monkeypatch, bad={3, 5, 8, *range(11, 100)})
    shown = console()
    settings = dataclasses.replace(SETTINGS, evaluation_interval=20)
    with pytest.raises(InputError, match=r"step 20: 10 steps in a row were not finite; .* skips"):
        train(settings, shown)
    assert "step 10: 3 of the last 10 steps rejected" in shown.file.getvalue()
    assert "loss nan" not in shown.file.getvalue()


def test_a_loss_that_never_was_finite_is_an_error_with_a_remedy(train, monkeypatch):
    scripted_losses(monkeypatch, [float("inf")])
    with pytest.raises(InputError, match=r"step 8: .* not finite, and no .* warmup_steps=10"):
        train(SETTINGS, console())


def test_more_tokens_than_an_int32_holds_are_counted():
    shown = console()
    with run_metrics.Progress(shown, first=0, steps=20) as bar:
        told = bar.report(10, [of_step(tokens=2**31 - 1)] * 10)
    assert told["loss"] == 2.0
    assert told["tokens_per_second"] > 0
    assert int(re.search(r"at ([\d,]+) target", shown.file.getvalue())[1].replace(",", "")) > 0


def test_rejected_steps_are_told_and_count_in_no_mean(monkeypatch):
    monkeypatch.setattr(run_metrics, "SECONDS_PER_LINE", 0)
    spike = of_step(90.0, spike=np.bool_(True))
    bad = of_step("nan", finite=np.bool_(False))
    lines = console(soft_wrap=True)
    with run_metrics.Progress(lines, first=0, steps=20) as bar:
        some, none = bar.report(2, [of_step(), spike]), bar.report(5, [bad, bad, spike])
    assert (some["loss"], some["rejected"]) == (2.0, 1)
    assert ("loss" in none, none["rejected"]) == (False, 3)
    first, _, second, last, _ = lines.file.getvalue().splitlines()
    reasons = "loss or gradient not finite (0), spike of the loss (1)"
    assert first == f"step 2: 1 of the last 2 steps rejected: {reasons}"
    assert second.endswith("not finite (2), spike of the loss (1)")
    assert last.startswith("step 5/20  loss unknown (all steps rejected)  learning rate")


@pytest.mark.parametrize("jump", [0, -1000, 10**15], ids=["still", "back", "ahead"])
def test_a_clock_that_jumps_gives_finite_numbers(monkeypatch, jump):
    now = itertools.count(2 * 10**15, jump)
    monkeypatch.setattr(run_metrics.time, "monotonic", lambda: float(next(now)))
    lines = console()
    with run_metrics.Progress(lines, 0, 10) as shown:
        values = [shown.report(step, [of_step()]) for step in (1, 2)]
    assert all(0 < one["tokens_per_second"] < 1e8 for one in values)
    line = lines.file.getvalue()
    assert re.search(r"trained for [\d.]+ minutes", line)
    assert ("left" in line) == (jump != 0)  # no line waits for the clock to come back
    assert "-1 day" not in line


def test_a_run_goes_on_after_any_step_of_any_window(monkeypatch):
    """Also after the last batch of a window, and at a skipped one."""
    monkeypatch.setattr(planning, "WINDOW_PAIRS", 70)  # three windows an epoch
    monkeypatch.setattr(planning, "WINDOW_BATCHES", 0)
    settings, training, _ = tiny_task(Task(4))
    run, layout = loop.Run(Path(), settings), epoch_layout(training, settings.training_config)
    assert layout.windows == 3

    def rest(progress, count):
        batches = itertools.islice(loop._batches(training, run, layout, progress), count)
        return [(position, batch.src.tobytes()) for position, batch, _ in batches]

    whole = rest(RunProgress(), 12)
    assert {position[:2] for position, _ in whole} >= {(0, 0), (0, 1), (0, 2), (1, 0)}
    for made, (position, _) in enumerate(whole[:-1], start=1):
        after = RunProgress().after_step(position, of_step())
        assert rest(after, 1) == whole[made : made + 1]
    skipped = RunProgress(nonfinite=(whole[4][0],)).skipping([whole[4][0]])
    assert skipped.nonfinite == ()  # they count no more
    assert rest(skipped, 11) == whole[:4] + whole[5:]


def test_the_log_of_a_run_that_was_stopped_between_two_reports_is_whole(tmp_path):
    settings, _, validation = tiny_task(Task(SETTINGS.steps))
    run = loop.Run(tmp_path, settings)
    progress = RunProgress()
    for number, stopped in enumerate((False, True)):
        shown = console(soft_wrap=True)
        with loop._open_outputs(run, progress, validation, validation, shown) as outputs:
            assert "WARNING" not in shown.file.getvalue()
            for batch in range(3):
                progress = progress.after_step(Position(number, 0, batch), of_step())
            if not stopped:
                progress = loop._report(progress, outputs)
    with loop._open_outputs(run, progress, validation, validation, shown):
        assert "WARNING" not in shown.file.getvalue()
    assert [report["step"] for report in read_metrics(tmp_path / METRICS_FILE)] == [3]


@pytest.mark.parametrize(
    ("select_by", "best"), [("loss", (12, 1.0, 1)), ("bleu", (8, -5.0, 2)), ("chrf", (16, -9.0, 0))]
)
def test_the_lowest_loss_or_the_highest_score_is_the_best(select_by, best):
    settings, *_ = tiny_task(Task(12))
    config = dataclasses.replace(settings.training_config, select_by=select_by)
    losses = {4: 2.0, 8: 3.0, 12: 1.0, 16: 1.0}  # the earlier of two equal ones is kept
    scores = {4: 3.0, 8: 5.0, 12: 4.0, 16: 5.0}
    others = {4: 8.0, 8: 7.0, 12: 6.0, 16: 9.0}
    settings = settings._replace(training_config=config)
    measured = {
        step: {"validation_bleu": scores[step], "validation_chrf": others[step]} for step in scores
    }
    run = loop.Run(Path(), settings, measure=lambda step, _: measured[step])
    names = ("write", "report_validation", "skip_time")
    silent = SimpleNamespace(**dict.fromkeys(names, lambda *_, **__: None))
    watchdog = SimpleNamespace(paused=contextlib.nullcontext)
    checkpoint = RunCheckpoint(RunProgress(), None, None)
    outputs = loop._RunOutputs(
        None, silent, silent, watchdog, lambda params: {"": losses[int(*params)]}
    )
    for number in losses:
        state = SimpleNamespace(eval_params=[jnp.array(number)])
        progress = checkpoint.progress._replace(step=number)
        with unchecked():
            now = RunCheckpoint(progress, state, checkpoint.best_params)
            checkpoint, _ = loop._evaluate(run, now, outputs)
    progress = checkpoint.progress
    found = progress.best_step, progress.best_score, progress.evaluations_since_best
    assert found == best
    assert checkpoint.best_params == [best[0]]
