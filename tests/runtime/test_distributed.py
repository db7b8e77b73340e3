"""Two processes on this machine, and what becomes of one when the other is gone."""

import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.runtime import distributed
from tests.programs import ROOT, TwoPrograms, free_port
from tests.tiers import tiered

LOST_AFTER = 3  # seconds
BOUND = LOST_AFTER + distributed.GRACE + 10  # heartbeat + 10 s

# Joins, agrees, and takes steps that need the other process until a signal comes.
WORKER = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax_transformer.runtime import distributed
from jax_transformer.runs.signals import stop_requests

port, index, fact, lost_after = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
named = (f"localhost:{port}", 2, index) if int(port) else (None, None, None)
try:
    distributed.initialize(*named, start_timeout=20, lost_after=lost_after)
    distributed.check_agreement({"version": "1", "vocabulary": fact, "text": "t"})
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("data"))
    whole = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows = jax.make_array_from_callback(whole.shape, spread, whole.__getitem__)
    on_host = distributed.to_host(rows)
    assert not rows.is_fully_addressable and np.array_equal(on_host, whole)
    secret = np.array([-0.0, np.nan, 1e-45], np.float32).tobytes()
    assert distributed.from_main(secret if index == 0 else None) == secret
    assert distributed.is_main() == (index == 0)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    step, stopped = 0, None
    silent = stop_requests(lambda line: None)
    with silent as stop, distributed.step_watchdog(lost_after) as watchdog:
        while stopped is None:
            assert float(total(rows)) == 15
            step += 1
            watchdog.alive()
            print(f"step {step}", flush=True)
            stopped = distributed.agreed_signal(stop.signal)
    print(f"stopped by {stopped.name} after step {step}", flush=True)
except Exception as error:
    distributed.fail(error)
"""


class Workers(TwoPrograms):
    """Two workers that join each other."""

    def __init__(self, directory, facts=("a", "a"), lost_after=LOST_AFTER, cluster=None):
        """Start them; `cluster` is what a cluster's variables hold, by the process's index."""
        port = 0 if cluster else free_port()
        super().__init__(
            directory,
            WORKER,
            arguments=lambda index: (port, index, facts[index], lost_after),
            environment=cluster or (lambda index: {}),
        )

    def wait_for_steps(self):
        deadline = time.monotonic() + 40
        while not all("step 3" in self.text(index) for index in range(2)):
            assert time.monotonic() < deadline, [self.text(index) for index in range(2)]
            time.sleep(0.05)


@pytest.mark.parametrize("lost", tiered([0, 1], [0]), ids=["main", "other"])
@pytest.mark.parametrize(
    "number", tiered([signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL]), ids=["killed", "stopped"]
)
def test_a_process_that_is_lost_ends_the_other_with_one_line(tmp_path, lost, number):
    with Workers(tmp_path) as pair:
        pair.wait_for_steps()
        pair.processes[lost].send_signal(number)
        sent = time.monotonic()
        code = pair.processes[1 - lost].wait(timeout=BOUND)
        seconds = time.monotonic() - sent
        said = [line for line in pair.text(1 - lost).splitlines() if line.startswith("error:")]
        print(f"process {lost} sent {number.name}: the other left with {code} in {seconds:.1f} s")
        print(*said)
        if lost == 0 and number == signal.SIGKILL and not said:
            # JAX's own thread, which was connected to process 0, may be the first to notice.
            assert code == -signal.SIGABRT
            assert "another task died" in pair.text(1)
        else:
            assert code == 1
            assert len(said) == 1
            assert f"process {1 - lost} of 2" in said[0]
            assert "--resume" in said[0]
        assert seconds < BOUND


def slurm(index):
    """Return what `srun --ntasks=2` on one node tells a task."""
    return {
        "SLURM_JOB_ID": "71",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def open_mpi(index):
    """Return what `mpirun -n 2` of Open MPI 4 tells a process."""
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
    }


@pytest.mark.parametrize(
    ("told", "signalled"), [pytest.param(slurm, 1, marks=pytest.mark.exhaustive), (open_mpi, 0)]
)
def test_processes_of_a_cluster_join_and_stop_after_the_same_step(tmp_path, told, signalled):
    port = {"JAX_COORDINATOR_PORT": str(free_port())}
    with Workers(tmp_path, lost_after=60, cluster=lambda index: told(index) | port) as pair:
        pair.wait_for_steps()
        pair.processes[signalled].send_signal(signal.SIGTERM)  # only one of them receives it
        codes = [process.wait(timeout=20) for process in pair.processes]
        ends = [pair.text(index).splitlines()[-1] for index in range(2)]
        print(ends)
        assert codes == [0, 0], [pair.text(index) for index in range(2)]
        assert ends[0] == ends[1]
        assert re.fullmatch(r"stopped by SIGTERM after step \d+", ends[0])


def test_both_processes_refuse_to_start_when_a_fact_differs(tmp_path):
    with Workers(tmp_path, facts=("a", "b")) as pair:
        codes = [process.wait(timeout=40) for process in pair.processes]
        assert codes == [1, 1]
        for index in range(2):
            text = pair.text(index)
            assert f"error: process {index} of 2: not the same as on process 0: " in text
            assert "vocabulary on process 1; " in text
            assert "version on" not in text
            assert "step 1" not in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_whose_others_never_come_ends_with_one_line(number):
    code = (
        "from jax_transformer.runtime import distributed\n"
        f"distributed.initialize('localhost:{free_port()}', 2, {number}, start_timeout=2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=40
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: not all processes have come together at coordinator=localhost:\d+ within "
        r"\d s; start each once, all with the same num_processes\n",
        done.stderr.decode(),
    )


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"localhost:{port}: the port cannot be used"):
            distributed.initialize(f"localhost:{port}", 2, 0)


def test_an_address_of_another_host_is_refused_on_process_0():
    with pytest.raises(InputError, match="does not lead to process 0"):
        distributed.initialize(f"no-such-host.invalid:{free_port()}", 2, 0)


def test_a_single_process_needs_nothing(monkeypatch):
    for name in (*distributed.LAUNCHERS, distributed.TPU_HOSTS):
        monkeypatch.delenv(name, raising=False)
    distributed.initialize(None, None, None)
    distributed.initialize("anything:1", 1, 0)
    distributed.check_agreement({"a": "b"})
    array = np.arange(3)
    assert distributed.is_main()
    assert distributed.from_main(b"x") == b"x"
    assert distributed.agreed_signal(None) is None
    assert distributed.agreed_signal(signal.SIGINT) is signal.SIGINT
    copied = distributed.to_host(array)
    assert np.array_equal(copied, array)
    assert not np.shares_memory(copied, array)
    with pytest.raises(SystemExit, match="error: told"):
        distributed.fail(InputError("told"))
    with pytest.raises(KeyError):
        distributed.fail(KeyError("a fault"))
