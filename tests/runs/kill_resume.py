"""Kill training runs and resume them: python -m tests.runs.kill_resume --kills 50.

A small model learns the embedded number words, with a checkpoint every few steps; the moments are
random, and many lie within a save. After each kill the newest checkpoint must hold the bits that
the run without kills has at that step. At the end all of a run must be the same, its log included,
and each epoch must have seen every pair once.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import tyro
from rich.console import Console

from jax_transformer import TransformerConfig
from jax_transformer.runs import loop
from jax_transformer.runs import mesh as training_mesh
from jax_transformer.runs.checkpoints import (
    HALF_WRITTEN,
    named_leaves,
    read_step,
    restore,
    steps_in,
)
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics
from jax_transformer.runs.model_settings import model_config, undecided_fields
from jax_transformer.runs.signals import Stopped, stop_requests
from jax_transformer.runs.state import RunCheckpoint, RunSettings, progress_to_json
from jax_transformer.runtime import distributed
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.text import number_words
from jax_transformer.text.batches import Batch, NumberedBatch, epoch_batches
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.denoising import MODE_TOKENS, OBJECTIVES, SENTINEL, Objective
from jax_transformer.text.encoding import encode_text, special_ids
from jax_transformer.text.parallel_text import Text
from jax_transformer.tokenizers import BYTE_PAIR_IDS, train_byte_pair, train_unigram
from jax_transformer.training.config import TrainingConfig

ROOT = Path(__file__).parents[2]
PAIRS, HELD_OUT = 200, 20
KEEP = 3
SEEN_FILE = "seen.jsonl"  # a line for each step tried, from each process


class Task(NamedTuple):
    """Which of the tiny runs.

    Attributes:
        steps: Its length.
        seed: Its randomness.
        keep: Checkpoints kept.
        batching: "buckets" or "packed".
        objective: "translation", or that of a plain text.
    """

    steps: int
    seed: int = 0
    keep: int = KEEP
    batching: str = "buckets"
    objective: str = "translation"


def tiny_task(task: Task) -> tuple[RunSettings, Corpus, Corpus]:
    """Return settings, training pairs and held-out pairs of a run with steps of milliseconds."""
    training, held_out = (
        Text(corpus.sources[:count], corpus.targets[:count])
        for corpus, count in zip(number_words.corpus(0), (PAIRS, HELD_OUT), strict=True)
    )
    tokenizer = train_byte_pair(training.sources + training.targets, vocab_size=60)
    config = TransformerConfig.preset(
        "vaswani2017",
        src_vocab_size=tokenizer.src_vocab_size,
        tgt_vocab_size=tokenizer.src_vocab_size,
        d_model=16,
        num_heads=2,
        d_ff=32,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout=0.1,
        max_length=64,
    )
    settings = TrainingConfig(
        steps=task.steps,
        warmup_steps=20,
        learning_rate_factor=0.1,
        batching=task.batching,
        max_tokens=512,
        bucket_count=2,
        pack_length=65,  # five batches an epoch, as in buckets: most checkpoints lie within one
        evaluation_interval=4,
        keep_checkpoints=task.keep,
        seed=task.seed,
        objective=task.objective,
    )
    if task.objective != "translation":
        return plain_task(config, settings, training.sources, held_out.sources)
    pairs = [encode_text(corpus, tokenizer, config.max_length) for corpus in (training, held_out)]
    return RunSettings(config, settings, tokenizer, "0" * 64, {}), *pairs


def plain_task(
    config: TransformerConfig, settings: TrainingConfig, *texts: tuple[str, ...]
) -> tuple[RunSettings, Corpus, Corpus]:
    """Return settings, training texts and held-out texts of a run that restores them."""
    special = [*(SENTINEL.format(number) for number in range(20)), *MODE_TOKENS]
    tokenizer = train_unigram(texts[0], 100, special_tokens=special)
    config = model_config(undecided_fields(config.to_dict()), tokenizer)
    chosen = OBJECTIVES[settings.objective]
    prefixes = tuple(map(tuple, tokenizer.encode_text([each.prefix for each in chosen])))
    special_tokens = special_ids(tokenizer, settings.objective, chosen)
    longest = config.max_length
    objective = Objective(chosen, prefixes, special_tokens, longest, settings.seed)
    encoded = (encode_text(Text(lines), tokenizer, longest) for lines in texts)
    corpora = (corpus.with_objective(objective) for corpus in encoded)
    return RunSettings(config, settings, tokenizer, "0" * 64, {}), *corpora


def named_arrays(checkpoint: RunCheckpoint) -> dict[str, np.ndarray]:
    """Return copies of a checkpoint's whole arrays by their paths; a random key as its words."""
    state = checkpoint.state._replace(key=jax.random.key_data(checkpoint.state.key))
    leaves = named_leaves(checkpoint._replace(state=state))
    return {name: distributed.to_host(leaf) for name, leaf in leaves.items()}


def train_or_resume(directory: Path, task: Task, mesh: str | None = None) -> None:
    """Train the tiny task in a directory, or go on with the run there, and note each pair seen.

    Several processes may share the directory; each notes what it has made.
    """
    settings, training, held_out = tiny_task(task)
    console = Console(file=sys.stderr, soft_wrap=True)
    directory.mkdir(parents=True, exist_ok=True)
    saved = None
    if steps_in(directory / loop.CHECKPOINTS):
        saved = restore(directory / loop.CHECKPOINTS, console)
    first = saved.progress.step if saved else 0

    def noted(*arguments: Any) -> Iterator[NumberedBatch]:
        nonlocal first
        for numbered in epoch_batches(*arguments):
            first += 1
            process = [jax.process_index(), jax.process_count()]
            pairs = _pairs_of(numbered.batch, training)
            with (directory / SEEN_FILE).open("a") as file:
                file.write(json.dumps([first, *process, pairs]) + "\n")
            yield numbered

    with (
        mock.patch.object(training_mesh, "epoch_batches", noted),
        stop_requests(lambda line: None) as stop,
    ):
        try:
            run = loop.Run(directory, settings, saved, stop, mesh=make_mesh(mesh))
            loop.train(run, training, held_out, console)
        except Stopped as stopped:
            console.print(str(stopped))
            sys.exit(stopped.exit_code)


def _pairs_of(batch: Batch, encoded: Corpus) -> list[int]:
    """Return which pairs a batch really holds, found by their ids; of plain text, checksums."""
    if encoded.has_texts:
        return [zlib.crc32(row.tobytes()) for row in batch.src]
    sides = encoded.read(np.arange(len(encoded))).sides()
    index = {source.astype(np.int32).tobytes(): number for number, (source, _) in enumerate(sides)}
    if len(index) != len(encoded):
        raise ValueError("two pairs have the same source; their numbers cannot be told apart")
    segments = batch.src_segments
    if segments is None:
        segments = (batch.src != BYTE_PAIR_IDS["pad_id"]).astype(np.int32)
    return [
        index[row[numbers == number].tobytes()]
        for row, numbers in zip(batch.src, segments, strict=True)
        for number in range(1, 1 + numbers.max())
    ]


def start(directory: Path, task: Task) -> subprocess.Popen:
    """Start a process that trains, or resumes, in a directory."""
    call = f"train_or_resume(Path({str(directory)!r}), {task})"
    code = f"from pathlib import Path\nfrom tests.runs.kill_resume import *\n{call}"
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=cache | os.environ, stdout=log, stderr=log
        )


def finish(directory: Path, task: Task) -> None:
    """Train or resume to the end."""
    process = start(directory, task)
    if process.wait():
        log = (directory.parent / f"{directory.name}.log").read_text(errors="replace")
        raise subprocess.CalledProcessError(process.returncode, "train_or_resume", log[-2000:])


def state_digest(directory: Path, step: int) -> str:
    """Return the sha256 of all that a run's checkpoint of a step holds.

    One that is damaged raises: the newest never is to be, whenever the process was killed.
    """
    checkpoint = read_step(directory / loop.CHECKPOINTS, step).read()
    digest = hashlib.sha256(json.dumps(progress_to_json(checkpoint.progress)).encode())
    for name, array in named_arrays(checkpoint).items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def losses(directory: Path) -> list[dict]:
    """Return what the log of a run says of each step, without its speed."""
    reports = read_metrics(directory / METRICS_FILE)
    return [
        {name: value for name, value in report.items() if name != "tokens_per_second"}
        for report in reports
    ]


def pairs_seen(directory: Path) -> dict[int, list[int]]:
    """Return the pairs of each step; a step made again after a kill must have had the same."""
    seen, path = {}, directory / SEEN_FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        step, index, count, pairs = json.loads(line)
        if seen.setdefault((step, count, index), pairs) != pairs:
            raise ValueError(f"step {step} was made with other pairs after a kill")
    made = {}
    for step, count in dict.fromkeys(key[:2] for key in seen):
        parts = [seen.get((step, count, index)) for index in range(count)]
        if None in parts:  # killed before all of the processes had come to it
            continue
        pairs = [pair for part in parts for pair in part]
        if made.setdefault(step, pairs) != pairs:
            raise ValueError(f"step {step} was made with other pairs by other processes")
    return made


def epochs_are_exact(seen: dict[int, list[int]], steps: int) -> bool:
    """Return whether each epoch saw each pair once, the last one no pair twice."""
    if sorted(seen) != list(range(1, steps + 1)):
        return False
    order = np.concatenate([seen[step] for step in sorted(seen)])
    epochs = np.split(order, range(PAIRS, len(order), PAIRS))
    whole = all(np.array_equal(np.sort(epoch), np.arange(PAIRS)) for epoch in epochs[:-1])
    return whole and len(np.unique(epochs[-1])) == len(epochs[-1])


def kill_once(process: subprocess.Popen, directory: Path, draw: random.Random) -> bool:
    """Kill a process at a random moment; return whether it was still running.

    Half of the moments lie just after a checkpoint has begun to be written, most others within
    the first seconds of training, some before it.
    """
    kind = draw.choices(["saving", "training", "starting"], [5, 4, 1])[0]
    seen = directory / SEEN_FILE
    size = seen.stat().st_size if seen.exists() else 0
    if kind != "starting":
        while process.poll() is None and not (seen.exists() and seen.stat().st_size > size):
            time.sleep(0.002)
    if kind == "saving":
        old = set(_half_written(directory))
        while process.poll() is None and not set(_half_written(directory)) - old:
            time.sleep(0.0005)
    time.sleep(draw.uniform(0, {"saving": 0.1, "training": 2.0, "starting": 6.0}[kind]))
    process.kill()
    return process.wait() < 0


def _half_written(directory: Path) -> list[str]:
    steps = (directory / loop.CHECKPOINTS).glob("*")
    return [path.name for path in steps if HALF_WRITTEN in path.name]


def survive(directory: Path, kills: int, task: Task) -> dict[str, int]:
    """Kill and resume runs until so many kills are made and each run has ended; return counts.

    Args:
        directory: Where the runs are kept; holds only "unbroken", the run that was never killed,
            with all of its checkpoints.
        kills: Processes to kill.
        task: Which run; its seed is also that of the moments.
    """
    unbroken = directory / "unbroken"
    steps_kept = steps_in(unbroken / loop.CHECKPOINTS)
    expected = {step: state_digest(unbroken, step) for step in steps_kept}
    draw, found, lost, left = random.Random(task.seed), Counter(), [0], [0]
    while found["kills"] < kills:
        run = directory / str(found["runs"])
        while found["kills"] < kills and kill_once(start(run, task), run, draw):
            found["kills"] += 1
            found["kills inside a save"] += bool(_half_written(run))
            newest = max(steps_in(run / loop.CHECKPOINTS), default=None)
            # Where there is none yet the run starts anew, and nothing is lost but time.
            same = newest is None or state_digest(run, newest) == expected[newest]
            found["same bits after the kill"] += same
            lost.append(max(pairs_seen(run), default=0) - (newest or 0))
        finish(run, task)
        found["runs"] += 1
        same_state = state_digest(run, task.steps) == expected[task.steps]
        found["same state and log at the end"] += same_state and losses(run) == losses(unbroken)
        seen = pairs_seen(run)
        is_plain = task.objective != "translation"  # tests/text has the pieces of an epoch
        found["every pair once in each epoch"] += is_plain or epochs_are_exact(seen, task.steps)
        kept = len(steps_in(run / loop.CHECKPOINTS))
        found["most checkpoints left"] = max(found["most checkpoints left"], kept)
        left.append(len(_half_written(run)))
    most = {"most steps lost by a kill": max(lost), "most half-written left": max(left)}
    return dict(found) | most


def main(kills: int = 50, steps: int = 150, objective: str = "translation") -> None:
    """Kill, resume, compare, print the counts; leave with 1 where anything differs.

    Args:
        kills: Processes to kill.
        steps: Steps of a run.
        objective: What is trained; another than "translation" on plain text.
    """
    batching = "buckets" if objective == "translation" else "packed"
    task = Task(steps, batching=batching, objective=objective)
    with tempfile.TemporaryDirectory() as directory:
        finish(Path(directory) / "unbroken", task._replace(keep=steps))
        found = survive(Path(directory), kills, task)
    print(*(f"{name}: {count}" for name, count in found.items()), sep="\n")
    names = ("same state and log at the end", "every pair once in each epoch")
    same = {found[name] for name in names} == {found["runs"]}
    if found["same bits after the kill"] != kills or not same or found["most half-written left"]:
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main)
