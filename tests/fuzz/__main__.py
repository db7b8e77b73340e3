"""Attack the library by the hour: python -m tests.fuzz --seed 7 --minutes 60.

Each round is a process of its own, which takes one kind of hostile input and a seed. A fault (an
exception that is no refusal in one line, another result, a crash, a hang, too much memory) is shown
with the smallest example that hypothesis finds, and the line that repeats its round. The exit code
is then 1.
"""

import argparse
import faulthandler
import importlib
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, strategies
from hypothesis.stateful import run_state_machine_as_test

from tests.compilation import QUICKLY
from tests.fuzz.outcomes import Found, memory

KINDS = ("files", "texts", "settings", "folders")
RESULT = "result: "  # before the line that a round prints
SHOWN = 5000  # characters of a fault
SECONDS = 120  # of an example; then the process ends with its stack
GUARD = 6 * 2**30  # bytes of address space beyond those of the start; more is a MemoryError


def run_round(kind: str, seed: int, examples: int) -> dict[str, int]:
    """Try examples of a kind, a module of this folder; return what became of them.

    Raises:
        Exception: A promise is broken; hypothesis has made the example small.
    """
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no image of the memory
    module = importlib.import_module(f"tests.fuzz.{kind}")
    limit = memory("VmSize") + GUARD
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found, stock = Found(), Path(tempfile.mkdtemp())
    chosen = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )

    @hypothesis.seed(seed)
    @chosen
    @hypothesis.given(strategies.data())
    def attempt(data: strategies.DataObject) -> None:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        with tempfile.TemporaryDirectory() as folder:
            found.judge(*module.prepare(data.draw, Path(folder), stock))

    if hasattr(module, "prepare"):
        attempt()
    else:
        faulthandler.dump_traceback_later(SECONDS * examples, exit=True)
        machine = hypothesis.seed(seed)(type("Machine", (module.Machine,), {"found": found}))
        with mock.patch("os.fsync"):  # slow, and no kill loses what the system was told to write
            run_state_machine_as_test(machine, settings=chosen)
    faulthandler.cancel_dump_traceback_later()
    found.outcomes["most MiB"] = found.growth >> 20
    found.outcomes["most milliseconds"] = round(1000 * found.seconds)
    return dict(found.outcomes)


def run_apart(arguments: list[str], folder: Path) -> dict[str, int]:
    """Run a round in a process of its own; return its counts, and print a fault."""
    environment = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder),
    }
    program = [sys.executable, "-m", "tests.fuzz", "--here", *arguments]
    options = {"env": os.environ | environment, "text": True, "errors": "replace"}
    done = subprocess.run(program, capture_output=True, **options)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1].removeprefix(RESULT))
    print(
        f"{done.stdout[-SHOWN:]}{done.stderr[-SHOWN:]}\nexit code {done.returncode}; repeat it by"
    )
    print(f"    python -m tests.fuzz {' '.join(arguments)} --minutes 0")
    return {"faults": 1}


def attack(arguments: argparse.Namespace) -> None:
    """Run rounds, each kind once at least, until the time is over; print what became of them."""
    total = {kind: Counter() for kind in arguments.kinds}
    started, seeds = time.monotonic(), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        for number, kind in enumerate(itertools.cycle(arguments.kinds)):
            minutes = (time.monotonic() - started) / 60
            is_first = number < len(arguments.kinds)
            if not is_first and minutes >= arguments.minutes:
                break
            seed = arguments.seed if is_first else seeds.getrandbits(32)
            flags = [f"--kinds={kind}", f"--seed={seed}", f"--examples={arguments.examples}"]
            found = run_apart(flags, Path(name))
            for outcome, count in found.items():
                before = total[kind][outcome]
                is_most = outcome.startswith("most ")
                total[kind][outcome] = max(before, count) if is_most else before + count
            print(f"{minutes:.1f} min, {kind}, seed {seed}: {found}", flush=True)
    faults = sum(counts["faults"] for counts in total.values())
    print(f"\n{minutes:.1f} minutes, {number} rounds, {faults} of them with a fault")
    for kind, counts in total.items():
        print(f"{kind}: {dict(+counts)}")
    sys.exit(faults > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first round of each kind")
    parser.add_argument("--minutes", type=float, default=1.0, help="no later round begins after")
    parser.add_argument("--examples", type=int, default=100, help="of a round")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--here", action="store_true", help="one round, in this process")
    given = parser.parse_args()
    if not given.here:
        attack(given)
    print(RESULT, json.dumps(run_round(*given.kinds, given.seed, given.examples)), sep="")
