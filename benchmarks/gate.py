"""The times that no change may raise, of two commits in turn: python -m benchmarks.gate OLD.

A training step, searches, their first calls, and whole commands, on one core. Each round runs both
programs from their own files. Exits with 1 where the median of a ratio is above the limit. Needs
git, and Linux (sched_setaffinity).
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.run import ROOT, extract
from benchmarks.systems import processor, spread

# Prints seconds by name. It may only use what the older commit has, too.
CALLS = """
import json
import time
begun = time.perf_counter()
import jax
import numpy as np
from jax_transformer import TransformerConfig, generate, init_params
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, sharded_train_step
try:
    from jax_transformer import Batch
except ImportError:
    from jax_transformer.text.batches import Batch
seconds = {"imports": time.perf_counter() - begun}
keep_freed_memory()
sizes = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 3)
sizes |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), 8000)
config = TransformerConfig.preset("vaswani2017", d_model=256, num_heads=4, d_ff=1024, **sizes)
ids = np.random.default_rng(0).integers(3, 8000, (32, 32)).astype(np.int32)

def timed(name, calls, call):
    taken = []
    for _ in range(calls):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begun)
    seconds[f"{name}, first call"] = taken[0]
    seconds[name] = float(np.median(taken[2:]))

settings = TrainingConfig()
make_step, state = sharded_train_step(make_mesh(), config, settings), init_state(config, settings)

def step():
    global state
    state, metrics = make_step(state, Batch(ids, ids, ids))
    return metrics

timed("training step", 10, step)
params = init_params(jax.random.key(0), config)
for name, options in (("greedy search", {}), ("beam search", {"beam_size": 4})):
    timed(name, 8, lambda: generate(params, config, ids[:8], max_new_tokens=32, **options))
print(json.dumps(seconds))
"""
TRAINING = (
    "--steps=5 --evaluation-interval=5 --bucket-count=1 --d-model=64 --num-heads=2 --d-ff=128"
)
LINES = "four thousand fifty-six\nnine\n"


@dataclasses.dataclass
class Gate:
    """What is compared.

    Attributes:
        old: A commit.
        new: Another commit; None is the working tree.
        rounds: How often each is measured.
        core: The one core that everything runs on.
        limit: The largest median ratio of new to old that is accepted.
    """

    old: tyro.conf.Positional[str]
    new: str | None = None
    rounds: int = 3
    core: int = 0
    limit: float = 1.03


def measure(folder: Path, scratch: Path) -> dict[str, float]:
    """Return what the program in a folder takes, in seconds; `scratch` is empty."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "JAX_PLATFORMS": "cpu",
    }

    def run(*arguments: str, lines: str = "") -> str:
        command = [sys.executable, *arguments]
        options = {"cwd": folder, "env": environment, "input": lines, "capture_output": True}
        return subprocess.run(command, check=True, text=True, **options).stdout

    seconds = json.loads(run("-c", CALLS))
    command, output = ("-m", "jax_transformer.commands.main"), str(scratch / "run")
    commands = {
        "train, 5 steps": (*command, "train", f"--output={output}", *TRAINING.split()),
        "translate two lines, first call": (*command, "translate", output),
        "translate two lines, second call": (*command, "translate", output),
        "--help": (*command, "--help"),
    }
    for name, arguments in commands.items():
        begun = time.perf_counter()
        run(*arguments, lines=LINES)
        seconds[name] = time.perf_counter() - begun
    return seconds


def show(rounds: list[dict[str, dict[str, float]]], limit: float) -> tuple[Table, list[str]]:
    """Return a table of the seconds and ratios, and the names whose ratio is above the limit."""
    table = Table("seconds", "old", "new", "new / old", title=processor())
    slower = []
    for name in rounds[0]["old"]:
        old, new = (np.array([taken[which][name] for taken in rounds]) for which in ("old", "new"))
        medians = (f"{np.median(column):.3f}" for column in (old, new))
        table.add_row(name, *medians, spread(new / old))
        if np.median(new / old) > limit:
            slower.append(name)
    return table, slower


def main(gate: Gate) -> None:
    """Measure both programs and print the ratios."""
    os.sched_setaffinity(0, {gate.core})
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folders = {"old": extract(gate.old, scratch / "old"), "new": ROOT}
        if gate.new is not None:
            folders["new"] = extract(gate.new, scratch / "new")
        rounds = []
        for number in track(range(gate.rounds), "rounds"):
            taken = {}
            for which in ("old", "new")[:: (-1) ** number]:
                place = scratch / f"{which}-{number}"
                place.mkdir()
                taken[which] = measure(folders[which], place)
            rounds.append(taken)
    table, slower = show(rounds, gate.limit)
    Console().print(table)
    if slower:
        sys.exit(f"above {gate.limit}: {', '.join(slower)}")


if __name__ == "__main__":
    main(tyro.cli(Gate))
