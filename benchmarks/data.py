"""Padding, shapes and speed of the batches of a corpus: python -m benchmarks.data.

Of both modes at several token budgets, in the first epoch. Beside them, for two recipes, how fast
the batches of an epoch are made and how fast a training step takes them, in turn on one core; and
what part of the step the check of its token ids would be. Needs Linux (sched_setaffinity).
"""

import json
import os
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.systems import processor, spread
from jax_transformer.commands.train_arguments import named_settings
from jax_transformer.model.checks import check_ids
from jax_transformer.runs.arguments import Arguments
from jax_transformer.runs.model_settings import model_config
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.text.batches import make_batch, padding_share, training_batches
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.encoding import encode_text
from jax_transformer.text.parallel_text import Text, TextFiles
from jax_transformer.text.plan import plan_epoch
from jax_transformer.tokenizers import Tokenizer, train_byte_pair
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, sharded_train_step

RECIPE = Path("configs/multi30k_en_de.yaml")
MODES = ("buckets", "packed")
TOKEN_BUDGETS = (4096, 8192)


def batches_row(encoded: Corpus, settings: TrainingConfig) -> list[str]:
    """Return what the first epoch's batches are like, and how fast they are planned and made."""
    start = time.perf_counter()
    plan = plan_epoch(encoded, settings, epoch=0)
    planned = time.perf_counter() - start
    seconds = make_all(encoded, settings)
    return [
        settings.batching,
        f"{settings.max_tokens:,}",
        f"{len(plan):,}",
        str(len({(batch.rows, batch.length) for batch in plan})),
        f"{padding_share(encoded, plan):.2%}",
        f"{planned:.2f}",
        f"{encoded.counts.tokens / seconds:,.0f}",
    ]


def make_all(encoded: Corpus, settings: TrainingConfig) -> float:
    """Return the seconds that planning and making the first epoch's batches takes."""
    start = time.perf_counter()
    for _ in training_batches(encoded, plan_epoch(encoded, settings, epoch=0)):
        pass
    return time.perf_counter() - start


def encode(corpus: Text, arguments: Arguments) -> tuple[Tokenizer, Corpus]:
    """Return the vocabulary of a recipe, and the text in it."""
    tokenizer = train_byte_pair(corpus.sources + corpus.targets, arguments.vocab_size)
    return tokenizer, encode_text(corpus, tokenizer, arguments.model["max_length"])


def compare(
    tokenizer: Tokenizer,
    encoded: Corpus,
    arguments: Arguments,
    batching: str,
    rounds: int,
) -> dict[str, Any]:
    """Return the tokens a second that are made and trained on in each round; padding is none.

    Args:
        tokenizer: The recipe's vocabulary.
        encoded: The text in it.
        arguments: The recipe.
        batching: In which mode, whatever the recipe's is.
        rounds: How often an epoch is made, and the step of its first batch run, in turn.
    """
    config = model_config(arguments.model, tokenizer)
    settings = replace(arguments.training, batching=batching)
    batch = make_batch(encoded, plan_epoch(encoded, settings, epoch=0)[0])
    tokens = int(np.count_nonzero(batch.src) + np.count_nonzero(batch.tgt_out))
    state = init_state(config, settings)
    step = sharded_train_step(make_mesh(), config, settings).lower(state, batch).compile()
    made, trained, checks = [], [], []
    for _ in range(rounds):
        made.append(encoded.counts.tokens / make_all(encoded, settings))
        state, _ = jax.block_until_ready(step(state, batch))  # discarded
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        stepped = time.perf_counter()
        for name in ("src", "tgt_in", "tgt_out"):
            size = encoded.src_vocab_size if name == "src" else encoded.tgt_vocab_size
            check_ids(name, getattr(batch, name), size)
        trained.append(tokens / (stepped - start))
        checks.append((time.perf_counter() - stepped) / (stepped - start))
    return {
        "batching": batching,
        "shape": list(batch.src.shape),
        "made, tokens/s": made,
        "trained on, tokens/s": trained,
        "check of the ids, share of the step": checks,
    }


def cells(name: str, result: dict[str, Any]) -> list[str]:
    """Return a result as a row of the table."""
    made, trained = result["made, tokens/s"], result["trained on, tokens/s"]
    return [
        name,
        result["batching"],
        " x ".join(map(str, result["shape"])),
        f"{median(trained):,.0f}",
        f"{median(made):,.0f}",
        spread(np.divide(made, trained)),
        f"{median(result['check of the ids, share of the step']):.3%}",
    ]


def main(
    source: Path, target: Path, rounds: int = 5, core: int = 0, json_file: Path | None = None
) -> None:
    """Print how the pairs of two line-aligned files become batches, and how fast beside training.

    Args:
        source: Training text, one sentence a line, plain or gzip.
        target: Its translation, line beside line.
        rounds: How often making and training are timed, in turn.
        core: The one core that everything runs on.
        json_file: Where to write the speeds of every round, if anywhere.
    """
    os.sched_setaffinity(0, {core})
    keep_freed_memory()
    console = Console()
    corpus = TextFiles((source,), (target,)).read()
    recipes = {
        "train.py": Arguments(),
        RECIPE.stem: named_settings([f"--config={RECIPE}"]).arguments(),
    }
    texts = {name: encode(corpus, arguments) for name, arguments in recipes.items()}
    _, encoded = texts[RECIPE.stem]
    console.print(f"{encoded.counts.report()}")
    table = Table("batching", "token budget", "batches", "shapes", "padding", "planned in s")
    table.add_column("tokens/s")
    for budget in TOKEN_BUDGETS:
        for batching in MODES:
            settings = TrainingConfig(batching=batching, max_tokens=budget)
            table.add_row(*batches_row(encoded, settings))
    console.print(table)

    table = Table("recipe", "batching", "first batch", "trained on, tokens/s", "made, tokens/s")
    table.add_column("made / trained on")
    table.add_column("check of the ids, of a step")
    results = []
    for name, arguments in recipes.items():
        for batching in track(MODES, name):
            results.append({"recipe": name} | compare(*texts[name], arguments, batching, rounds))
            table.add_row(*cells(name, results[-1]))
    versions = {name: version(name) for name in ("jax", "grain")}
    console.print(table, f"{processor()}. {versions}")
    if json_file is not None:
        record = {"processor": processor(), "versions": versions, "results": results}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
