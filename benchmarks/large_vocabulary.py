"""Memory and time of a search over 256,206 tokens: python -m benchmarks.large_vocabulary.

The table of nllb-200-distilled-600M under one layer a side, random weights: what XLA asks for
beside the parameters to run `generate`, and the time of a step, from the difference of a short and
a long search.
"""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.systems import processor
from jax_transformer import TransformerConfig, generate, init_params

CONFIG = TransformerConfig.preset(
    "m2m100",
    src_vocab_size=256_206,
    tgt_vocab_size=256_206,
    num_encoder_layers=1,
    num_decoder_layers=1,
)
SEARCHES = ((1, 1), (1, 4), (4, 4))  # rows of the batch, beam size
SOURCE_LENGTH = 12
SHORT, LONG = 4, 20  # tokens of a target
REPEATS = 3


def random_params(dtype: str) -> dict[str, Any]:
    """Return parameters in a type."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(partial(init_params, config=CONFIG), jax.random.key(0))

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(0.05 * random.standard_normal(leaf.shape, np.float32), dtype)

    return jax.tree.map(draw, shapes)


def measure(params: dict[str, Any], batch: int, beam_size: int) -> tuple[float, float]:
    """Return the megabytes of temporary memory, and the milliseconds of a step."""
    random = np.random.default_rng(1)
    src = jnp.asarray(random.integers(5, CONFIG.src_vocab_size, (batch, SOURCE_LENGTH)), jnp.int32)
    seconds = []
    for length in (SHORT, LONG):
        options = {"max_new_tokens": length, "banned_tokens": (CONFIG.eos_id,)}
        search = partial(generate, config=CONFIG, beam_size=beam_size, **options)
        program = jax.jit(search).lower(params, src=src).compile()
        jax.block_until_ready(program(params, src=src))
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            jax.block_until_ready(program(params, src=src))
            times.append(time.perf_counter() - begun)
        seconds.append(min(times))
    temporary = program.memory_analysis().temp_size_in_bytes
    return temporary / 1e6, 1e3 * (seconds[1] - seconds[0]) / (LONG - SHORT)


def main() -> None:
    """Print a row for each type and search."""
    heads = ("parameters, MB", "temporary, MB", "ms a step")
    print(f"{'type':10}{'batch':>6}{'beam':>6}{heads[0]:>18}{heads[1]:>16}{heads[2]:>12}")
    for dtype in ("float32", "bfloat16"):
        params = random_params(dtype)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6
        for batch, beam_size in SEARCHES:
            temporary, step = measure(params, batch, beam_size)
            row = f"{dtype:10}{batch:6}{beam_size:6}{held:18,.0f}{temporary:16,.0f}{step:12,.0f}"
            print(row, flush=True)
    print(processor())


if __name__ == "__main__":
    main()
