"""The log of a run: what is written, what a resumed run drops, what TensorBoard sees; curves."""

import json

import pytest

from jax_transformer.training.run.curves import draw_curves
from jax_transformer.training.run.metrics import EVENTS, METRICS_FILE, MetricsLog, read_metrics

LOSSES = [0.1 + 0.2, 1e-300, 3.0]


def write(directory, steps, **options):
    log = MetricsLog(directory, **options)
    for step in steps:
        log.write(step, loss=LOSSES[step - 1], learning_rate=step / 7)
    log.close()


def test_a_report_is_a_line_that_is_there_at_once_and_reads_back_exactly(tmp_path):
    log = MetricsLog(tmp_path)
    log.write(5, loss=0.1 + 0.2, target_tokens=3_000_000_000)
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
    assert [report["loss"] for report in reports] == LOSSES
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    events = pytest.importorskip("tensorboardX").proto.event_pb2
    record = pytest.importorskip("tensorboardX.record_writer")
    write(tmp_path, [1, 2, 3], tensorboard=True)
    (path,) = (tmp_path / EVENTS).iterdir()
    data, found = path.read_bytes(), []
    while data:  # records: length, its checksum, the event, its checksum
        (size,) = record.struct.unpack_from("<Q", data)
        event = events.Event.FromString(data[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    expected = [
        pair
        for step in (1, 2, 3)
        for pair in ((step, "loss", LOSSES[step - 1]), (step, "learning_rate", step / 7))
    ]
    assert [pair[:2] for pair in found] == [pair[:2] for pair in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[2] == pytest.approx(other[2], rel=1e-6, abs=1e-38)


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
    assert "<!-- validation_loss -->" in whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.svg", "plain.svg"]
