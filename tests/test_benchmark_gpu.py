"""The benchmark of a GPU, on a CPU: all systems run, do the same work, and are counted alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks import gpu  # noqa: E402

ROOT = Path(__file__).parent.parent
ROWS, LENGTH = 4, 8
PEAK = 1e9  # FLOP/s
BFLOAT16_LOSS = 5e-3  # of a loss of some 4.5, in 8 bits of mantissa


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return what the command prints, and what it writes.

    torch.compile traces the step and its gradient, but generates no C++: its compilation takes half
    a minute, and on a GPU, which the command is for, other code is generated.
    """
    written = tmp_path_factory.mktemp("gpu") / "gpu.json"
    flags = f"--device cpu --size tiny --dropout 0 --rows {ROWS} --length {LENGTH} --rounds 1"
    flags += f" --peak-tflops {PEAK / 1e12} --compile-backend aot_eager --json-file {written}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *flags.split()],
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
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_peak_is_taken_from_the_data_sheet_of_that_very_device(name, tera):
    assert gpu.data_sheet_peak(name) == (tera and tera * 1e12)


def test_without_a_gpu_the_command_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is none; try --device cpu"):
        gpu.device_name("cuda")


def test_the_models_are_the_papers():
    assert gpu.shape("base", 3, 5) == (512, 8, 2048, 6, 37_000, 3, 5)
    assert gpu.shape("big", 3, 5) == (1024, 16, 4096, 6, 37_000, 3, 5)
