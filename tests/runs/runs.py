"""Runs for tests: a tiny model's settings, and checkpoints with other numbers at each step."""

import io
from types import SimpleNamespace

import jax
import numpy as np
from rich.console import Console

from jax_transformer.convert.origin import Origin
from jax_transformer.runs import loop
from jax_transformer.runs.checkpoints import CheckpointWriter
from jax_transformer.runs.state import Position, RunCheckpoint, RunProgress, RunSettings
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import Metrics, init_state
from tests.models import one_layer
from tests.runs.kill_resume import named_arrays

GENERATION = {"beam_size": 4, "length_penalty": 1.0, "banned_tokens": (3,)}
ORIGIN = Origin("toy", {"width": 4, "tied": True}, {"README.md": b"# toy\n", "x.txt": bytes([255])})
WORDS = ("ab", "ba", "abba", "baab", "a b", "b a")


def make_settings(ema_decay=0.9, d_ff=3):
    tokenizer = train_byte_pair(WORDS, vocab_size=8)
    config = one_layer(
        "vaswani2017", vocab_size=8, d_model=4, num_heads=2, d_ff=d_ff, max_length=16
    )
    training_config = TrainingConfig(steps=40, ema_decay=ema_decay)
    arguments = {"source": None, "vocab_size": 8}
    digest = "0" * 64
    return RunSettings(config, training_config, tokenizer, digest, arguments, GENERATION, ORIGIN)


def make_checkpoint(settings, step):
    """Return a checkpoint with other numbers in every array than any other step's."""
    random = np.random.default_rng(step)

    def draw(leaf):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(step)
        if leaf.dtype == np.int32:
            return np.int32(step)
        return random.normal(size=leaf.shape).astype(leaf.dtype)

    state = jax.eval_shape(lambda: init_state(settings.config, settings.training_config))
    best = jax.tree.map(draw, state.params) if step else None
    metrics = Metrics(
        np.float32(0.1), np.int32(7), np.float32(1e-5), np.bool_(True), task_counts=(step, 3)
    )
    bad = metrics._replace(loss=np.float32("nan"), finite=np.bool_(False))
    progress = RunProgress(
        step=step,
        next=Position(1, 0, step),
        rejected=3,
        nonfinite=(Position(1, 0, 2),),
        skipped=(Position(0, 0, 5), Position(0, 0, 6)),
        window=((Position(1, 0, 1), metrics), (Position(1, 0, 2), bad)),
        best_score=0.1 + 0.2 if step else None,
        best_step=step or None,
        evaluations_since_best=2,
    )
    return RunCheckpoint(progress, jax.tree.map(draw, state), best)


def save(directory, settings, steps):
    with CheckpointWriter(directory, settings) as checkpoints:
        for step in steps:
            checkpoints.save(make_checkpoint(settings, step))


def spoil_steps(monkeypatch, spoil):
    """Let `spoil` wrap each step that the loop compiles."""
    honest = loop.sharded_train_step

    def spoilt(*arguments):
        def lower(state, batch):
            lowered = honest(*arguments).lower(state, batch)
            return SimpleNamespace(compile=lambda: spoil(lowered.compile()))

        return SimpleNamespace(lower=lower)

    monkeypatch.setattr(loop, "sharded_train_step", spoilt)


def quiet():
    return Console(file=io.StringIO(), soft_wrap=True)


def same_bits(actual, expected):
    ours, theirs = named_arrays(actual), named_arrays(expected)
    assert ours.keys() == theirs.keys()
    return all(
        (ours[name].dtype, ours[name].tobytes()) == (theirs[name].dtype, theirs[name].tobytes())
        for name in theirs
    )
