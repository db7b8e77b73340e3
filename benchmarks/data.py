"""Padding, shapes and speed of the batches of a corpus: python -m benchmarks.data.

Of both modes at several token budgets, in the first epoch. Beside them, how fast a training step
is in each mode, and what part of it the check of its token ids takes.
"""

import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jax_transformer import TransformerConfig
from jax_transformer.checks import check_ids
from jax_transformer.data.batches import (
    EncodedCorpus,
    encode_corpus,
    make_batch,
    padding_share,
    plan_epoch,
    training_batches,
)
from jax_transformer.data.corpus import read_parallel
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, train_step

TOKEN_BUDGETS = (4096, 8192)
TIMED_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure how the pairs of two line-aligned files become batches."""

    source: Path
    """Training text, one sentence a line, plain or gzip."""

    target: Path
    """Its translation, line beside line."""

    vocab_size: int = 10_000
    """Entries of the byte-pair encoding that both languages share."""

    max_length: int = 128
    """Most tokens of a sentence; a pair with a longer one is dropped and counted."""


def batches_row(encoded: EncodedCorpus, settings: TrainingConfig) -> list[str]:
    """Return what the first epoch's batches are like, and how fast they are planned and made."""
    start = time.perf_counter()
    plan = plan_epoch(encoded, settings, epoch=0)
    planned = time.perf_counter()
    made = sum(1 for _ in training_batches(encoded, plan))
    seconds = time.perf_counter() - planned
    return [
        settings.batching,
        f"{settings.token_budget:,}",
        f"{made:,}",
        str(len({(batch.rows, batch.length) for batch in plan})),
        f"{padding_share(encoded, plan):.2%}",
        f"{planned - start:.2f}",
        f"{encoded.tokens / seconds:,.0f}",
    ]


def step_line(encoded: EncodedCorpus, settings: TrainingConfig, config: TransformerConfig) -> str:
    """Return how fast a training step is, and what part of it the check of its ids would be."""
    batch = make_batch(encoded, plan_epoch(encoded, settings, epoch=0)[0])
    state = init_state(config, settings)
    step = train_step.lower(state, batch, config, settings).compile()
    state, _ = jax.block_until_ready(step(state, batch))
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    stepped = time.perf_counter()
    for _ in range(TIMED_STEPS):
        for name in ("src", "tgt_in", "tgt_out"):
            check_ids(name, getattr(batch, name), encoded.vocab_size)
    checked = time.perf_counter()
    seconds, check = (stepped - start) / TIMED_STEPS, (checked - stepped) / TIMED_STEPS
    tokens = np.count_nonzero(batch.src) + np.count_nonzero(batch.tgt_out)
    return (
        f"{settings.batching}: a training step of {' x '.join(map(str, batch.src.shape))} takes "
        f"{1e3 * seconds:.0f} ms, {tokens / seconds:,.0f} tokens/s; checking its ids "
        f"{1e6 * check:.0f} µs, {check / seconds:.4%}"
    )


def main(arguments: Arguments) -> None:
    """Print a row for each mode and budget, and a line about a step of each mode."""
    console = Console()
    corpus = read_parallel(arguments.source, arguments.target)
    tokenizer = Tokenizer.train(corpus.sources + corpus.targets, arguments.vocab_size)
    encoded = encode_corpus(corpus, tokenizer, arguments.max_length)
    console.print(f"{corpus.report()}; {encoded.report()}")
    table = Table("batching", "token budget", "batches", "shapes", "padding", "planned in s")
    table.add_column("tokens/s")
    modes = [
        TrainingConfig(batching=batching, token_budget=budget)
        for budget in TOKEN_BUDGETS
        for batching in ("buckets", "packed")
    ]
    for settings in modes:
        table.add_row(*batches_row(encoded, settings))
    console.print(table)

    config = TransformerConfig.preset(
        "vaswani2017",
        src_vocab_size=tokenizer.vocab_size,
        tgt_vocab_size=tokenizer.vocab_size,
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=4,
        num_decoder_layers=4,
        max_length=arguments.max_length,
    )
    console.print("width 128, 4 + 4 layers:")
    for settings in modes[:2]:
        console.print(step_line(encoded, settings, config))


if __name__ == "__main__":
    main(tyro.cli(Arguments))
