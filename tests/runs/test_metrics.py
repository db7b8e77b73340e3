"""The log of a run: what is written, what a resumed run drops, what TensorBoard sees; curves."""

import itertools
import json
import time

import pytest

from jax_transformer import InputError
from jax_transformer.runs.evaluation import draw_curves
from jax_transformer.runs.metrics import EVENTS, METRICS_FILE, MetricsLog, read_metrics

LOSSES = [0.1 + 0.2, 1e-300, 3.0, 2.5]


def write(directory, steps, **options):
    log = MetricsLog(directory, **options)
    for step in steps:
        log.write(step, {"loss": LOSSES[step - 1], "learning_rate": step / 7})
    log.close()


def is_damaged(directory, step):
    """Return whether a run that goes on after this step finds its log damaged."""
    log = MetricsLog(directory, step=step)
    log.close()
    return log.is_damaged


def test_a_report_is_a_line_that_is_there_at_once_and_reads_back_exactly(tmp_path):
    log = MetricsLog(tmp_path)
    log.write(5, {"loss": 0.1 + 0.2, "target_tokens": 3_000_000_000})
    expected = {"step": 5, "loss": 0.1 + 0.2, "target_tokens": 3_000_000_000}
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == expected
    assert read_metrics(tmp_path / METRICS_FILE) == [expected]
    log.close()


def test_a_resumed_run_tells_of_each_step_once(tmp_path):
    write(tmp_path, [1, 2, 3])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')  # a process was killed here
    write(tmp_path, [2, 3], step=1)
    reports = read_metrics(tmp_path / METRICS_FILE)
    assert [report["step"] for report in reports] == [1, 2, 3]
    assert [report["loss"] for report in reports] == LOSSES[:3]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_lines_that_cannot_be_read_are_left_out_and_told(tmp_path):
    path = tmp_path / METRICS_FILE
    for damaged in (b"\xff\xfe", b"[1]", b'{"step": "1"}', b"[" * 10**5, b'{"loss": 1}', b""):
        write(tmp_path, [1, 2, 3])
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([lines[0], damaged, lines[2], b""]))
        assert [report["step"] for report in read_metrics(path)] == [1, 3]
        assert is_damaged(tmp_path, 3)
        assert not is_damaged(tmp_path, 3)
        path.unlink()


@pytest.mark.parametrize("content", [None, "", '{"step": 2}\n{"step": 9}\n'])
def test_a_log_that_was_lost_is_told(tmp_path, content):
    if content is not None:
        (tmp_path / METRICS_FILE).write_text(content)
    assert is_damaged(tmp_path, 5)


def test_a_log_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)
    monkeypatch.setattr(log, "_file", open("/dev/full", "w"))  # noqa: SIM115
    with pytest.raises(InputError, match=r"metrics\.jsonl cannot be written .*No space left"):
        log.write(1, {"loss": 0.5})
    log.close()


def test_without_a_report_there_are_no_curves(tmp_path):
    for reports in ([], [{"step": 3}]):
        with pytest.raises(InputError, match="there is no report of a loss"):
            draw_curves(tmp_path / "curves.svg", reports)
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_the_same_numbers_whatever_the_clock_says(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboardX").proto.event_pb2
    record = pytest.importorskip("tensorboardX.record_writer")
    now = time.time()
    write(tmp_path, [1, 2, 3], tensorboard=True)
    # A resumed run whose clock was set back in between, and goes back by weeks while it writes.
    clock = itertools.count(now - 1e6, -3e6)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    write(tmp_path, [3, 4], step=2, tensorboard=True)
    found = []
    for number, path in enumerate(sorted((tmp_path / EVENTS).iterdir())):
        data = path.read_bytes()
        while data:  # records: length, its checksum, the event, its checksum
            (size,) = record.struct.unpack_from("<Q", data)
            event = events.Event.FromString(data[12 : 12 + size])
            if event.HasField("session_log"):  # TensorBoard drops the steps from here on
                assert event.step == (1, 3)[number]
                found = [each for each in found if each[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + size :]
    expected = [
        pair
        for step in (1, 2, 3, 4)
        for pair in ((step, "loss", LOSSES[step - 1]), (step, "learning_rate", step / 7))
    ]
    assert [pair[:2] for pair in found] == [pair[:2] for pair in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[2] == pytest.approx(other[2], rel=1e-6, abs=1e-38)


def test_a_loss_of_any_size_is_read_on_its_axis(tmp_path):
    for name, losses in {"demo": (4.0, 0.5, 0.002), "text": (8.7, 4.0, 2.7)}.items():
        reports = [{"step": 10 * n, "loss": loss} for n, loss in enumerate(losses, start=1)]
        draw_curves(tmp_path / f"{name}.svg", reports)
    demo, text = ((tmp_path / f"{name}.svg").read_text() for name in ("demo", "text"))
    assert all(f"<!-- {label} -->" in demo for label in ("1", "0.1", "0.01"))
    assert all(f"<!-- {label} -->" in text for label in ("3", "4", "6"))


def test_the_curves_show_what_there_is(tmp_path):
    reports = [{"step": 10 * n, "loss": 5 / n, "learning_rate": 1e-3 * n} for n in range(1, 5)]
    draw_curves(tmp_path / "plain.svg", reports)
    evaluated = [{"step": 20, "validation_loss": 3.0, "validation_bleu": 12.5}]
    draw_curves(tmp_path / "curves.svg", reports + evaluated)
    draw_curves(tmp_path / "curves.svg", reports + evaluated)  # a resumed run draws it again
    plain, whole = ((tmp_path / f"{name}.svg").read_text() for name in ("plain", "curves"))
    assert "<!-- learning rate -->" in plain
    assert "BLEU" not in plain
    assert "<!-- BLEU of the validation text -->" in whole
    assert "<!-- validation -->" in whole  # words, and not the names in the log
    assert "validation_loss" not in whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.svg", "plain.svg"]
