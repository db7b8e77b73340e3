"""Devices of TPU slices on a machine without a TPU."""

import importlib.util

import pytest

from jax_transformer.errors import InputError
from jax_transformer.runtime.topologies import DEVICES, ENVIRONMENT, data_sheet, topology_devices
from tests.programs import run_python

SLICES = {
    "v4:2x2x1": (4, "TPU v4"),
    "v5e:1x1": (1, "TPU v5 lite"),
    "v5e:2x4": (8, "TPU v5 lite"),
    "v5e:16x16": (256, "TPU v5 lite"),
    "v5p:2x2x1": (4, "TPU v5"),
    "v6e:2x4": (8, "TPU v6 lite"),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_has_one_device_for_each_chip(name):
    pytest.importorskip("libtpu")
    devices = topology_devices(name)
    assert (len(devices), devices[0].device_kind) == SLICES[name]
    assert {device.platform for device in devices} == {"tpu"}


def test_variables_that_the_user_has_set_stay(monkeypatch):
    pytest.importorskip("libtpu")
    code = (
        "import os; from jax_transformer.runtime.topologies import topology_devices;"
        "topology_devices('v5e:1x1');"
        "print(*(os.environ[name] for name in ('TPU_WORKER_HOSTNAMES', 'TPU_SKIP_MDS_QUERY')))"
    )
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    done = run_python("-c", code, environment={"TPU_WORKER_HOSTNAMES": "127.0.0.1"})
    assert done.stdout == "127.0.0.1 1\n"
    assert done.stderr == ""  # libtpu is quiet


def test_a_slice_that_libtpu_cannot_cut_is_refused_in_one_line():
    pytest.importorskip("libtpu")
    with pytest.raises(InputError) as refused:
        topology_devices("v5e:3x5")
    assert str(refused.value).startswith("topology='v5e:3x5' cannot be made (INVALID_ARGUMENT")
    assert "\n" not in str(refused.value)


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install \"jax-transformer\[tpu-compile\]\""):
        topology_devices("v5e:1x1")


def test_the_clock_times_the_matrix_units_is_the_peak():
    units = {"v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2, "v6e": 4 * 256**2}
    for generation, multipliers in units.items():
        device = DEVICES[f"TPU-{generation}"]
        assert device.flops / device.clock == pytest.approx(2 * multipliers, rel=3e-3)


def test_a_slice_has_the_data_sheet_of_its_generation():
    assert data_sheet("v5p:2x2x1") == DEVICES["TPU-v5p"]
