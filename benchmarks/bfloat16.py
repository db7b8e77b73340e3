"""Searches in bfloat16 beside float32 on one core of a CPU: python -m benchmarks.bfloat16.

The cache of a search in bfloat16 is in float32 ("wide", what a CPU gets by default) or in bfloat16.
Needs Linux (sched_setaffinity).
"""

import os
import time
from functools import partial
from statistics import median

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.systems import processor
from jax_transformer import TransformerConfig, generate, init_params
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.tree import in_dtype

VOCAB_SIZE, SOURCE_LENGTH, NEW_TOKENS = 8_000, 32, 64


def main(core: int = 0, rounds: int = 7) -> None:
    """Print the processor seconds of searches, of the base size of Vaswani et al. 2017, in turn.

    Args:
        core: The core that computes.
        rounds: Timed calls of each search; the median is printed.
    """
    os.sched_setaffinity(0, {core})
    sizes = {"src_vocab_size": VOCAB_SIZE, "tgt_vocab_size": VOCAB_SIZE}
    config = TransformerConfig.preset("vaswani2017", **sizes)
    params = init_params(jax.random.key(0), config)
    half = in_dtype(params, "bfloat16")
    kinds = {"float32": params, "bfloat16, cache in bfloat16": half, "bfloat16": half}
    table = Table("rows, beams", *kinds, "float32 / bfloat16")
    for rows, beams in ((1, 1), (8, 1), (32, 1), (8, 4)):
        src = np.random.default_rng(0).integers(4, VOCAB_SIZE, (rows, SOURCE_LENGTH))
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        calls = {}
        for kind, tree in kinds.items():
            search = partial(
                generate,
                config=config,
                src=src.astype(np.int32),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS - 1,
                beam_size=beams,
                execution=SearchExecution(wide_cache=kind == "bfloat16"),
            )
            calls[kind] = partial(jax.jit(search), tree)
        for _ in range(rounds):
            for kind, call in calls.items():
                jax.block_until_ready(call())  # discarded
                begun = time.process_time()
                jax.block_until_ready(call())
                seconds[kind].append(time.process_time() - begun)
        found = {kind: median(values) for kind, values in seconds.items()}
        shown = [f"{value:.3f}" for value in found.values()]
        table.add_row(f"{rows}, {beams}", *shown, f"{found['float32'] / found['bfloat16']:.2f}")
    console = Console(width=100)
    console.print(f"{processor()}, jax {jax.__version__}")
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
