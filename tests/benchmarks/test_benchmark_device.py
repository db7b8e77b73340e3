"""The benchmark of a device, on a CPU: all systems run, do the same work, are counted alike."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest

torch = pytest.importorskip("torch")

from benchmarks import device  # noqa: E402
from jax_transformer.runtime.topologies import DEVICES, topology_devices  # noqa: E402

pytestmark = pytest.mark.exhaustive


ROOT = Path(__file__).parents[2]
ROWS, LENGTH, BEAM = 4, 8, 2
PEAK = 1e9  # FLOP/s
BFLOAT16_LOSS = 5e-3  # of a loss of some 4.5, in 8 bits of mantissa


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return what the command prints, and what it writes.

    torch.compile traces the step and its gradient, but generates no C++: its compilation takes half
    a minute, and on a GPU, which the command is for, other code is generated.
    """
    written = tmp_path_factory.mktemp("device") / "device.json"
    flags = f"--device cpu --size tiny --dropout 0 --rows {ROWS} --length {LENGTH} --rounds 1"
    flags += f" --beams {BEAM}"
    flags += f" --peak-tflops {PEAK / 1e12} --compile-backend aot_eager --json-file {written}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device", *flags.split()],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout, json.loads(written.read_text())


def test_every_system_is_timed_and_loses_the_same(measured):
    _, record = measured
    (result,) = record["results"]
    assert list(result["seconds"]) == list(result["losses"]) == ["ours", "torch", "torch.compile"]
    ours = result["losses"]["ours"]
    for name, loss in result["losses"].items():
        print(name, loss)
        assert loss == pytest.approx(ours, abs=BFLOAT16_LOSS)
        (seconds,) = result["seconds"][name]
        assert 0 < seconds < 60


def test_utilisation_is_the_products_flops_of_a_step_over_time_and_peak(measured):
    shown, record = measured
    (result,) = record["results"]
    d_model, d_ff, vocab_size = 32, 64, 64
    encoder = 4 * d_model**2 + 2 * LENGTH * d_model + 2 * d_model * d_ff
    decoder = 8 * d_model**2 + 4 * LENGTH * d_model + 2 * d_model * d_ff
    flops = 3 * 2 * (encoder + decoder + d_model * vocab_size) * ROWS * LENGTH
    assert (result["flops"], record["peak_flops"]) == (flops, PEAK)
    assert ROWS * LENGTH * 7 / 8 <= result["target_tokens"] < ROWS * LENGTH
    for name, (seconds,) in result["seconds"].items():
        (row,) = (line for line in shown.splitlines() if line.startswith(f"│ {name} "))
        assert f" {flops / seconds / PEAK:.1%} " in row
        assert f" {result['target_tokens'] / seconds:,.0f} " in row
    assert "ours, d_model 32, dropout 0.0: attention: " in shown


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_peak_is_taken_from_the_data_sheet_of_that_very_device(name, tera):
    assert device.data_sheet_peak(name) == (tera and tera * 1e12)


def test_compilation_is_what_the_first_call_takes_longer(measured):
    shown, record = measured
    (result,) = record["results"]
    assert list(result["compilation"]) == list(result["seconds"])
    assert 0 < result["compilation"]["ours"] < 120
    assert f" {result['compilation']['ours']:.1f} s " in shown
    readings = {"ours": {"first": 9.0, "memory": 5}, "torch": {"first": 1.0, "memory": None}}
    seconds = {"ours": [2.0, 3.0, 7.0], "torch": [1.5]}
    assert device.start_and_memory(readings, seconds) == {
        "compilation": {"ours": 6.0, "torch": 0.0},
        "memory": {"ours": 5, "torch": None},
    }


def test_memory_is_the_devices_own_count(monkeypatch):
    counted = Mock(jax.Device, memory_stats=lambda: {"peak_bytes_in_use": 2_340_000_000})
    monkeypatch.setattr(jax, "devices", lambda: [counted])
    assert device.gigabytes(device._our_memory()) == "2.34 GB"
    counted.memory_stats = lambda: None  # as on a CPU
    assert device.gigabytes(device._our_memory()) == "-"


def test_generation_is_timed_with_full_rows(measured):
    shown, record = measured
    (result,) = record["generation"]
    assert (result["beam"], result["tokens"]) == (BEAM, ROWS * LENGTH)
    (seconds,) = result["seconds"]
    (row,) = (line for line in shown.splitlines() if line.startswith(f"│ tiny, beam {BEAM} "))
    assert f" {result['tokens'] / seconds:,.0f} " in row


@pytest.mark.parametrize(("name", "chip"), [("v5p:2x2x1", "TPU-v5p"), ("v6e:1x1", "TPU-v6e")])
def test_a_tpu_is_known_by_what_libtpu_calls_it(name, chip):
    pytest.importorskip("libtpu")
    kind = topology_devices(name)[0].device_kind
    assert device.data_sheet_peak(kind) == DEVICES[chip].flops


def test_where_there_is_no_such_device_the_command_says_so_in_a_line():
    with pytest.raises(SystemExit) as stopped:
        device.device_name("gpu")
    assert re.fullmatch(
        r"error: device='gpu': JAX finds none \(.+\); try --device cpu --size tiny",
        str(stopped.value),
    )


def test_pytorch_stands_beside_it_where_pytorch_finds_the_device(monkeypatch):
    assert list(device.loaders_for("tpu")) == ["ours"]
    for found, systems in ((False, ["ours"]), (True, ["ours", "torch", "torch.compile"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert list(device.loaders_for("gpu")) == systems
