"""Rows and speeds of plain text: python -m benchmarks.plain_text --source FILE --target FILE.

The same lines as pairs and by each objective, packed. Plans and reads one epoch, then trains a
small model on its first batches, objective beside objective; prints the tokens a second of both,
without padding, and the share of padding. Seconds are CPU time of one thread.
"""

import dataclasses
import importlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tyro

from benchmarks.systems import processor, spread
from jax_transformer import TransformerConfig
from jax_transformer.runs.model_settings import model_config, preset_fields
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.text.batches import Batch, make_batch, padding_share
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.denoising import (
    MODE_TOKENS,
    OBJECTIVES,
    SENTINEL,
    Objective,
)
from jax_transformer.text.encoding import encode_text, special_ids
from jax_transformer.text.parallel_text import Text, TextFiles
from jax_transformer.text.plan import epoch_layout, plan_window
from jax_transformer.tokenizers import train_unigram
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import TrainState, init_state, sharded_train_step

SPECIAL = [*(SENTINEL.format(number) for number in range(100)), *MODE_TOKENS]
SIZES = {"d_model": 128, "num_heads": 4, "d_ff": 256}
SIZES |= {"num_encoder_layers": 2, "num_decoder_layers": 2}
STEPS = 3  # of a timed block


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Which text.

    Attributes:
        source: Lines.
        target: Their translations.
        pairs: How many of them.
        vocab_size: Entries of the tokenizer.
        lengths: Tokens of the rows.
        rounds: Timed blocks of steps of each objective.
    """

    source: Path
    target: Path
    pairs: int = 8000
    vocab_size: int = 3000
    lengths: tuple[int, ...] = (128, 512)
    rounds: int = 5


class Training(NamedTuple):
    """A training that is timed."""

    state: TrainState
    step: jax.stages.Compiled
    batches: Iterator[Batch]
    planning: float  # seconds for each token of an epoch


def tokens_of(batch: Batch) -> int:
    """Return the tokens of source and target, without padding."""
    return int(np.count_nonzero(batch.src) + np.count_nonzero(batch.tgt_out))


def start(corpus: Corpus, config: TransformerConfig, settings: TrainingConfig) -> Training:
    """Print how a corpus becomes rows, and return its training."""
    layout = epoch_layout(corpus, settings)  # once a run
    begun = time.process_time()
    plan = [
        batch
        for i in range(layout.windows)
        for batch in plan_window(corpus, settings, layout, 0, i)
    ]
    planned = time.process_time() - begun
    tokens = sum(tokens_of(make_batch(corpus, batch)) for batch in plan)
    read = time.process_time() - begun
    print(f"{tokens / read:,.0f} tokens/s read, {padding_share(corpus, plan[:-1]):.2%} padding")
    batches = (make_batch(corpus, batch) for batch in itertools.cycle(plan[:-1]))
    state = init_state(config, settings)
    step = sharded_train_step(make_mesh(), config, settings).lower(state, next(batches)).compile()
    return Training(state, step, batches, planned / tokens)


def block(training: Training) -> tuple[Training, float]:
    """Make some steps; return the training after them, and its tokens a second."""
    state, _ = jax.block_until_ready(training.step(training.state, next(training.batches)))
    tokens, begun = 0, time.process_time()
    for batch in itertools.islice(training.batches, STEPS):
        state, _ = jax.block_until_ready(training.step(state, batch))
        tokens += tokens_of(batch)
    seconds = time.process_time() - begun + training.planning * tokens
    return training._replace(state=state), tokens / seconds


def main(arguments: Arguments) -> None:
    """Measure and print."""
    print(processor())
    importlib.import_module("grain.experimental")  # plans import it late; that is not timed
    text = TextFiles((arguments.source,), (arguments.target,)).read()
    sources, targets = (side[: arguments.pairs] for side in (text.sources, text.targets))
    tokenizer = train_unigram([*sources, *targets], arguments.vocab_size, special_tokens=SPECIAL)
    config = model_config(preset_fields("pre_norm", SIZES), tokenizer)
    for length in arguments.lengths:
        settings = TrainingConfig(
            batching="packed", pack_length=length, max_tokens=4096, scan_layers=True
        )
        corpora = {"translation": encode_text(Text(sources, targets), tokenizer, length)}
        for name, denoisers in OBJECTIVES.items():
            prefixes = tokenizer.encode_text([denoiser.prefix for denoiser in denoisers])
            special = special_ids(tokenizer, name, denoisers)
            objective = Objective(denoisers, tuple(map(tuple, prefixes)), special, length, 0)
            plain = encode_text(Text(sources + targets), tokenizer, length)
            corpora[name] = plain.with_objective(objective)
        trainings = {}
        for name, corpus in corpora.items():
            print(f"rows of {length}, {name}", end=": ")
            trainings[name] = start(corpus, config, settings)
        speeds = {name: [] for name in corpora}
        for _, name in itertools.product(range(arguments.rounds), corpora):
            trainings[name], speed = block(trainings[name])
            speeds[name].append(speed)
        for name, found in speeds.items():
            ratio = spread(np.divide(found, speeds["translation"]))
            print(f"rows of {length}, {name}: {np.median(found):,.0f} tokens/s trained, / {ratio}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
