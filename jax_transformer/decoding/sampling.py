"""Sampling: a token drawn from its distribution, or from the most likely part of it.

Letters in shapes: B batch, V target vocabulary, C candidates.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key, PRNGKeyArray

from jax_transformer.decoding.generation_config import SAMPLING_OPTIONS, GenerationConfig
from jax_transformer.errors import InputError, shorten

Keys = PRNGKeyArray | Key[Array, " _"]  # one for a batch, or one for each of its rows


def check_sampling(options: GenerationConfig, samples: bool) -> None:
    """Refuse options that contradict whether tokens are drawn."""
    for name in SAMPLING_OPTIONS:
        if not samples and (value := getattr(options, name)) is not None:
            fault = "is for sampling, which needs a key; for lines of text, a seed"
            raise InputError(f"{name}={shorten(value)} {fault}")
    if samples and options.beam_size > 1:
        fault = "searches, and a key or a seed samples: set beam_size=1, or leave that out"
        raise InputError(f"beam_size={options.beam_size} {fault}")


def sample(
    logits: Float[Array, "B V"],
    step: Int32[Array, " B"],
    key: Keys,
    temperature: Float[Array, ""] | None = None,
    top_k: int | None = None,
    top_p: Float[Array, ""] | None = None,
) -> Int32[Array, " B"]:
    """Return a token of each row, drawn with the probabilities of its logits; never one of -inf.

    The temperature comes first, then `top_k`, then `top_p` among those candidates. Each step uses
    its own random numbers.
    """
    if temperature is not None:
        logits = logits / temperature.astype(logits.dtype)
    if top_k is None and top_p is None:
        return _draw(logits, step, key)
    count = logits.shape[-1] if top_k is None else top_k
    best, ids = jax.lax.top_k(logits, count)  # [B, C], in descending order
    if top_p is not None:
        probabilities = jax.nn.softmax(best)
        better = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The most likely token always stays: a small top_p would else leave no candidate.
        is_candidate = (better < top_p).at[:, 0].set(True)
        best = jnp.where(is_candidate, best, -jnp.inf)
    drawn = _draw(best, step, key)
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]


def _draw(logits: Float[Array, "B C"], step: Int32[Array, " B"], key: Keys) -> Int32[Array, " B"]:
    if key.ndim and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # one for each row
        keys = jax.vmap(jax.random.fold_in)(key, step)
    else:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, step)
        keys = jax.vmap(jax.random.fold_in)(keys, jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
