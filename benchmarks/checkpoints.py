"""What a run's checkpoint takes: python -m benchmarks.checkpoints.

Files and seconds of a save, for the model of the number words and for the base model of Vaswani et
al. 2017; then four processes on this machine save a state that is divided among them and restore
it, and say how much memory that took, above what they had before. Needs Linux (/proc).
"""

import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import tyro
from rich.console import Console

from jax_transformer import TransformerConfig
from jax_transformer.runs.checkpoints import RunCheckpoints, named_leaves, restore
from jax_transformer.runs.state import RunCheckpoint, RunProgress, RunSettings
from jax_transformer.runtime import distributed
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import sharded_init_state

PROCESSES = 4
MEGABYTE = 1e6
RESULT = "result:"  # before the line that a process prints
WORDS = {"d_model": 128, "num_heads": 4, "d_ff": 512}
WORDS |= {"num_encoder_layers": 2, "num_decoder_layers": 2}


def settings_of(vocab_size: int, **fields: int) -> RunSettings:
    """Return the settings of a run of a model of these sizes."""
    tokenizer = train_byte_pair(["a b c", "c b a"], 8)
    sizes = dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), vocab_size)
    config = TransformerConfig.preset("vaswani2017", **sizes | fields)
    return RunSettings(config, TrainingConfig(), tokenizer, "0" * 64, {})


def save_once(directory: Path, settings: RunSettings, rounds: int) -> tuple[int, list[float]]:
    """Save steps of a run; return the files of one, and the seconds of each without the first."""
    state = sharded_init_state(make_mesh(), settings.config, settings.training_config)
    jax.block_until_ready(state)
    seconds = []
    with RunCheckpoints(directory, settings) as checkpoints:
        for step in range(rounds + 1):
            started = time.perf_counter()
            checkpoints.save(RunCheckpoint(RunProgress(step=step), state, None))
            checkpoints.wait()
            seconds.append(time.perf_counter() - started)
    files = sum(path.is_file() for path in (directory / str(rounds)).rglob("*"))
    return files, seconds[1:]


def peak() -> int:
    """Return the most bytes that were resident in this process."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def work(directory: Path, port: int, index: int, d_model: int, saving: bool) -> None:
    """Be one of the processes: save a divided state, or restore it and print the memory."""
    distributed.initialize(f"localhost:{port}", PROCESSES, index)
    distributed.check_agreement({"width": str(d_model)})  # connects them before they compile
    mesh = make_mesh(f"fsdp={PROCESSES}")
    settings = settings_of(32_000, d_model=d_model, num_heads=d_model // 64, d_ff=4 * d_model)
    if saving:
        state = sharded_init_state(mesh, settings.config, settings.training_config)
        with RunCheckpoints(directory, settings) as checkpoints:
            checkpoints.save(RunCheckpoint(RunProgress(), state, None))
        return
    saved = restore(directory, Console(file=io.StringIO()))
    before = peak()
    arrays = jax.block_until_ready([*named_leaves(saved.read(mesh)).values()])
    part = sum(shard.data.nbytes for leaf in arrays for shard in leaf.addressable_shards)
    sizes = [leaf.nbytes for leaf in arrays]
    print(RESULT, json.dumps([sum(sizes), part, max(sizes), peak() - before]), flush=True)


def in_processes(directory: Path, d_model: int, saving: bool) -> list[list[float]]:
    """Start the processes and return what they print."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    program = "import sys; from pathlib import Path; from benchmarks.checkpoints import work; "
    program += f"work(Path(sys.argv[1]), {port}, int(sys.argv[2]), {d_model}, {saving})"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(directory), str(index)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(PROCESSES)
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process has failed")
    lines = [line for text in printed for line in text.splitlines() if line.startswith(RESULT)]
    return [json.loads(line.removeprefix(RESULT)) for line in lines]


def main(rounds: int = 5, d_model: int = 1024) -> None:
    """Measure and print.

    Args:
        rounds: Saves that are timed, after one that is not.
        d_model: Width of the model that is divided among the processes.
    """
    models = {"number words": settings_of(128, **WORDS), "base": settings_of(37_000)}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in models.items():
            files, seconds = save_once(Path(folder) / name, settings, rounds)
            shown = (min(seconds), statistics.median(seconds), max(seconds))
            print(f"{name}: {files} files; seconds {', '.join(f'{one:.3f}' for one in shown)}")
        divided = Path(folder) / "divided"
        in_processes(divided, d_model, saving=True)
        for sizes in in_processes(divided, d_model, saving=False):
            whole, part, largest, grown = (f"{size / MEGABYTE:,.0f} MB" for size in sizes)
            print(f"state {whole}, of a process {part}, largest array {largest}: took {grown}")


if __name__ == "__main__":
    tyro.cli(main)
