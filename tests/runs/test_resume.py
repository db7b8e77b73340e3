"""A stopped run goes on as if it had not been: signals, bad batches, warm-up, patience, errors."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import InputError
from jax_transformer.runs import loop
from jax_transformer.runs.checkpoints import DescribingHandler, restore, steps_in
from jax_transformer.runs.loop import NONFINITE_FILE, read_nonfinite
from jax_transformer.runs.signals import stop_requests
from jax_transformer.runs.state import Position
from jax_transformer.text.batches import make_batch
from jax_transformer.text.bpe_dropout import ResampledCorpus
from jax_transformer.text.plan import plan_epoch
from tests.programs import wait_until
from tests.runs.conftest import STEPS
from tests.runs.kill_resume import (
    ROOT,
    SEEN_FILE,
    Task,
    losses,
    pairs_seen,
    start,
    state_digest,
    tiny_task,
    train_or_resume,
)
from tests.runs.runs import quiet, spoil_steps


def newest(directory):
    return restore(directory / loop.CHECKPOINTS, quiet())


def train(directory, task, resumed=None, **changes):
    """Train a tiny task with some settings changed; return the best evaluation."""
    settings, *corpora = tiny_task(task)
    config = dataclasses.replace(settings.training_config, **changes)
    run = loop.Run(directory, settings._replace(training_config=config), resumed)
    return loop.train(run, *corpora, quiet())


@pytest.mark.exhaustive
def test_signals_save_the_step_they_fall_into(unbroken, tmp_path):
    directory, made = tmp_path / "run", 0
    seen = directory / SEEN_FILE
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start(directory, Task(STEPS))
        wait_until(lambda made=made: seen.exists() and seen.read_text().count("\n") >= made + 6)
        sent = time.monotonic()
        process.send_signal(number)
        assert process.wait(60) == code
        seconds = time.monotonic() - sent
        made = max(pairs_seen(directory))
        assert newest(directory).progress.step == made < STEPS
        log = (tmp_path / "run.log").read_text()
        assert f"stopped by {number.name}: step {made} is saved in {directory}; resume" in log
        assert "Traceback" not in log
        print(f"{number.name}: left after {seconds:.2f} s with {code}, 0 steps lost")
    train_or_resume(directory, Task(STEPS))
    assert state_digest(directory, STEPS) == state_digest(unbroken, STEPS)
    assert losses(directory) == losses(unbroken)


# Within pbkdf2_hmac, as within XLA, the main thread runs no signal handler of Python's.
LONG_WORK = """
import hashlib, time
from jax_transformer.runs.signals import stop_requests

with stop_requests(lambda line: print(line, flush=True)) as stop, stop.during("this evaluation"):
    print("a long evaluation", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
"""


def test_signals_are_answered_at_once_while_the_main_thread_is_busy():
    command = [sys.executable, "-c", LONG_WORK]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "a long evaluation\n"
        time.sleep(0.5)  # until the work has begun
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == (
            "SIGINT: stopping after this evaluation, the run is then saved; press Ctrl-C again to "
            "end at once without saving\n"
        )
        answered = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) in (130, -signal.SIGINT)
    assert answered - sent < 5  # the work takes half a minute
    print(f"answered after {answered - sent:.3f} s, gone {time.monotonic() - answered:.3f} s later")


def test_outside_of_the_loop_signals_do_what_they_did():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    lines = []
    with stop_requests(lines.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: stop.signal == signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        wait_until(lambda: lines)
    assert lines[0].startswith("SIGTERM: stopping after this step, the run is then saved; send SIG")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def poison(monkeypatch, positions):
    """Let the batches of these positions have a loss that is not finite."""
    settings, training, _ = tiny_task(Task(STEPS))
    poisoned = set()
    for epoch, window, batch in positions:
        assert not window
        planned = plan_epoch(training, settings.training_config, epoch)[batch]
        poisoned.add(make_batch(training, planned).src.tobytes())

    def spoil(make):
        def step(state, batch):
            if batch.src.tobytes() not in poisoned:
                return make(state, batch)
            kept = jax.tree.map(jnp.copy, state)
            _, metrics = make(state, batch)
            return kept, metrics._replace(finite=np.bool_(False), loss=np.float32("nan"))

        return step

    spoil_steps(monkeypatch, spoil)


@pytest.mark.exhaustive
def test_a_run_that_batches_have_stopped_goes_on_without_them(tmp_path, monkeypatch):
    bad = tuple(Position(epoch, 0, batch) for epoch in (2, 3) for batch in range(5))  # 11 to 20
    poison(monkeypatch, bad)
    with pytest.raises(InputError, match=r"step 20: 10 steps in a row were not finite; .* skips"):
        train(tmp_path, Task(STEPS), evaluation_interval=10)
    recorded = json.loads((tmp_path / NONFINITE_FILE).read_text())["batches"]
    assert tuple((one["epoch"], one["window"], one["batch"]) for one in recorded) == bad
    settings, training, _ = tiny_task(Task(STEPS))
    for one in recorded:
        planned = plan_epoch(training, settings.training_config, one["epoch"])[one["batch"]]
        assert one["pairs"] == planned.members.tolist()

    before = newest(tmp_path)
    assert before.progress.step == 10
    train(tmp_path, Task(STEPS), before, evaluation_interval=10)
    progress, state, _ = newest(tmp_path).read()
    assert progress.skipped == bad == read_nonfinite(tmp_path)
    assert (progress.step, progress.rejected) == (STEPS, 0)
    assert progress.next == Position(9, 0, 5)  # 10 steps of epochs 0 and 1, 30 from epoch 4 on
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.exhaustive
def test_scattered_bad_steps_are_left_out_and_counted_across_a_resume(tmp_path, monkeypatch):
    poison(monkeypatch, [Position(0, 0, 1), Position(1, 0, 0)])
    train(tmp_path, Task(8))
    assert newest(tmp_path).progress.rejected == 2
    train(tmp_path, Task(12), newest(tmp_path))
    assert newest(tmp_path).progress.rejected == 2
    assert not (tmp_path / NONFINITE_FILE).exists()


@pytest.mark.exhaustive
def test_a_resumed_run_with_bpe_dropout_is_bitwise_the_unbroken_one(tmp_path, monkeypatch):
    """It is stopped within an epoch, which has five or six batches."""
    epochs = []

    def noted(*arguments):
        epochs.append(arguments[-1])
        return ResampledCorpus(*arguments)

    monkeypatch.setattr(loop, "ResampledCorpus", noted)
    unbroken, stopped = (tmp_path / name for name in ("unbroken", "stopped"))
    train(unbroken, Task(12, keep=12), bpe_dropout=0.3)
    train(stopped, Task(8, keep=12), bpe_dropout=0.3)
    saved = newest(stopped)
    place = saved.progress.next
    assert saved.progress.step == 8
    assert place.epoch > 0
    assert place.batch > 0
    train(stopped, Task(12, keep=12), saved, bpe_dropout=0.3)
    assert state_digest(stopped, 12) == state_digest(unbroken, 12)
    assert losses(stopped) == losses(unbroken)
    assert sorted(set(epochs)) == list(range(max(epochs) + 1))
    assert epochs.count(place.epoch) == 3  # of two whole runs, and of the resumed one


def test_a_damaged_record_of_bad_batches_is_refused(tmp_path):
    for content in ("", "[]", '{"batches": [{"epoch": 1}]}', "\xff"):
        (tmp_path / NONFINITE_FILE).write_text(content, "latin-1")
        with pytest.raises(InputError, match="is damaged"):
            read_nonfinite(tmp_path)


@pytest.mark.exhaustive
def test_patience_ends_a_run_and_is_remembered(tmp_path, monkeypatch):
    script = iter([3.0, 1.0, 2.0, 2.0, 1.0, 0.5, 0.6, 0.7])
    monkeypatch.setattr(loop, "_mean_loss", lambda *_: next(script))
    best = train(tmp_path, Task(400), patience=3)
    assert (best.step, best.score) == (8, 1.0)
    assert newest(tmp_path).progress.step == 20  # the evaluations at 12, 16 and 20 found no better

    kept = train(tmp_path, Task(400), newest(tmp_path), patience=3)
    assert (kept.step, kept.score) == (8, 1.0)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (kept.params, best.params))))

    best = train(tmp_path, Task(28), newest(tmp_path), patience=4)
    assert (best.step, best.score) == (24, 0.5)


@pytest.mark.exhaustive
def test_a_save_that_fails_in_the_background_stops_the_run(tmp_path, monkeypatch):
    finalize, calls = DescribingHandler.finalize, []

    def fails_at_the_third(self, directory):
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        finalize(self, directory)

    monkeypatch.setattr(DescribingHandler, "finalize", fails_at_the_third)
    with pytest.raises(InputError, match=r"could not be written .*No space .*; the ones before"):
        train(tmp_path, Task(STEPS))
    seconds = time.monotonic() - calls[2]
    assert steps_in(tmp_path / loop.CHECKPOINTS) == [0, 4]  # 8 failed
    assert losses(tmp_path)[-1]["step"] == 12  # one interval later
    print(f"a background save failed: the run stopped {seconds:.2f} s and one interval later")


@pytest.mark.exhaustive
def test_no_evaluation_is_in_the_log_before_the_first_checkpoint_is_whole(tmp_path, monkeypatch):
    finalize, logs = DescribingHandler.finalize, []

    def slow(self, directory):
        time.sleep(0 if logs else 5)  # longer than the evaluation takes
        logs.append(losses(tmp_path))
        finalize(self, directory)

    monkeypatch.setattr(DescribingHandler, "finalize", slow)
    train(tmp_path, Task(4))
    assert not any("validation_loss" in report for report in logs[0])
    assert any("validation_loss" in report for report in logs[1])


@pytest.mark.exhaustive
def test_a_directory_with_a_run_is_not_started_over(unbroken):
    with pytest.raises(InputError, match="holds a run already; resume it"):
        train(unbroken, Task(STEPS))
