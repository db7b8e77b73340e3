"""Sampling: a token drawn from its distribution, or from the most likely part of it.

Letters in shapes: B batch, V target vocabulary, C candidates.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int32, Key, PRNGKeyArray

from jax_transformer.decoding.generation_config import SAMPLING_OPTIONS, GenerationConfig
from jax_transformer.decoding.rules import as_array
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.checks import check_key

Keys = PRNGKeyArray | Key[Array, " _"]  # one for a batch, or one for each of its rows


@struct.dataclass
class Sampling:
    """How tokens are drawn: options of `GenerationConfig`; None is off and costs nothing."""

    key: Keys
    temperature: Float[Array | np.ndarray, ""] | None = None
    top_p: Float[Array | np.ndarray, ""] | None = None
    top_k: int | None = struct.field(pytree_node=False, default=None)


def check_sampling(options: GenerationConfig, samples: bool) -> None:
    """Refuse options that contradict whether tokens are drawn."""
    for name in SAMPLING_OPTIONS:
        if not samples and (value := getattr(options, name)) is not None:
            fault = "is for sampling, which needs a key; for lines of text, a seed"
            raise InputError(f"{name}={shorten(value)} {fault}")
    if samples and options.beam_size > 1:
        fault = "searches, and a key or a seed samples: set beam_size=1, or leave that out"
        raise InputError(f"beam_size={options.beam_size} {fault}")


def make_sampling(options: GenerationConfig, key: Keys | None, rows: int) -> Sampling | None:
    """Return how tokens are drawn; None without a key."""
    check_sampling(options, key is not None)
    if key is None:
        return None
    check_key("key", key, rows)
    return Sampling(key, as_array(options.temperature), as_array(options.top_p), options.top_k)


def sample(
    logits: Float[Array, "B V"], step: Int32[Array, " B"], sampling: Sampling
) -> Int32[Array, " B"]:
    """Return a token of each row, drawn with the probabilities of its logits; never one of -inf.

    The temperature comes first, then `top_k`, then `top_p` among those candidates. Each step uses
    its own random numbers.
    """
    if sampling.temperature is not None:
        logits = logits / sampling.temperature.astype(logits.dtype)
    if sampling.top_k is None and sampling.top_p is None:
        return _draw(logits, step, sampling.key)
    count = logits.shape[-1] if sampling.top_k is None else sampling.top_k
    best, ids = jax.lax.top_k(logits, count)  # [B, C], in descending order
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(best)
        better = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The most likely token always stays: a small top_p would else leave no candidate.
        is_candidate = (better < sampling.top_p).at[:, 0].set(True)
        best = jnp.where(is_candidate, best, -jnp.inf)
    drawn = _draw(best, step, sampling.key)
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]


def _draw(logits: Float[Array, "B C"], step: Int32[Array, " B"], key: Keys) -> Int32[Array, " B"]:
    if key.ndim and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # one for each row
        keys = jax.vmap(jax.random.fold_in)(key, step)
    else:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, step)
        keys = jax.vmap(jax.random.fold_in)(keys, jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
