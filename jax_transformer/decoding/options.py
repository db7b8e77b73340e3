"""The options of `generate`: checked, and turned into the values that the loops read."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, PRNGKeyArray

from jax_transformer.checks import check_ids
from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.processors import Rules
from jax_transformer.decoding.sampling import Sampling
from jax_transformer.decoding.search import LengthPenalty
from jax_transformer.decoding.source import as_ids
from jax_transformer.errors import InputError

Scalar = float | int | Float[Array | np.ndarray, ""]


def check_sizes(config: TransformerConfig, beam_size: int, num_hypotheses: int) -> None:
    """Refuse a beam size that does not fit the vocabulary or the number of hypotheses.

    Raises:
        InputError: Names the sizes.
    """
    if beam_size < 1:
        raise InputError(f"beam_size={beam_size} must be at least 1")
    if beam_size > 1 and 2 * beam_size > config.tgt_vocab_size:
        raise InputError(
            f"beam_size={beam_size} needs a vocabulary of {2 * beam_size} tokens or more, but "
            f"tgt_vocab_size={config.tgt_vocab_size}"
        )
    if not 1 <= num_hypotheses <= beam_size:
        raise InputError(f"num_hypotheses={num_hypotheses} must be from 1 to beam_size={beam_size}")


def length_penalty(alpha: Scalar, normalization: str) -> LengthPenalty:
    """Return the penalty.

    Raises:
        InputError: The normalization is unknown, or alpha is not finite.
    """
    if normalization not in ("gnmt", "power"):
        raise InputError(f"length_normalization={normalization!r} must be 'gnmt' or 'power'")
    alpha = _scalar("length_penalty", alpha, np.isfinite, "a finite number")
    return LengthPenalty(alpha, normalization)


def rules(
    config: TransformerConfig,
    batch: int,
    max_new_tokens: int,
    *,
    min_new_tokens: int | None,
    prefix: Integer[Array | np.ndarray, "_ P"] | None,
    forced_first_token: int | None,
    banned_tokens: tuple[int, ...],
    repetition_penalty: Scalar | None,
    no_repeat_ngram_size: int | None,
) -> Rules:
    """Return the rules of a search for a batch of `batch` sources.

    Raises:
        InputError: An id is outside the vocabulary, a length does not fit `max_new_tokens`, or
            two options contradict each other.
    """
    check_ids("banned_tokens", np.array([banned_tokens], np.int64), config.tgt_vocab_size)
    banned = np.zeros(config.tgt_vocab_size, bool)
    banned[[config.pad_id, *banned_tokens]] = True
    if banned.all():
        raise InputError(f"banned_tokens={banned_tokens} leaves no token to generate")
    if forced_first_token is not None:
        if prefix is not None:
            raise InputError("forced_first_token and prefix exclude each other: prefix holds it")
        prefix = np.full((batch, 1), forced_first_token)
    if prefix is not None:
        name = "prefix" if forced_first_token is None else "forced_first_token"
        prefix = as_ids(name, prefix, config.tgt_vocab_size)
        if prefix.shape[0] != batch or not 1 <= prefix.shape[1] <= max_new_tokens:
            raise InputError(
                f"prefix of shape {prefix.shape} must have a row for each of {batch} sources and "
                f"1 to max_new_tokens={max_new_tokens} columns"
            )
    if min_new_tokens is not None:
        if not 0 <= min_new_tokens < max_new_tokens:
            raise InputError(
                f"min_new_tokens={min_new_tokens} must be from 0 to {max_new_tokens - 1}: "
                f"max_new_tokens={max_new_tokens} counts EOS too"
            )
        min_new_tokens = np.asarray(min_new_tokens, np.int32)
    if repetition_penalty is not None:
        repetition_penalty = _scalar(
            "repetition_penalty", repetition_penalty, lambda x: 0 < x < np.inf, "above 0"
        )
    if no_repeat_ngram_size is not None and no_repeat_ngram_size < 1:
        raise InputError(f"no_repeat_ngram_size={no_repeat_ngram_size} must be at least 1")
    return Rules(banned, prefix, min_new_tokens, repetition_penalty, no_repeat_ngram_size)


def sampling(
    config: TransformerConfig,
    beam_size: int,
    key: PRNGKeyArray | None,
    temperature: Scalar | None,
    top_k: int | None,
    top_p: Scalar | None,
) -> Sampling | None:
    """Return how tokens are drawn; None without a key.

    Raises:
        InputError: An option needs a key that is not given, a value is out of range, or the
            search is a beam search.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for name, value in given.items():
        if key is None and value is not None:
            raise InputError(f"{name}={value} is for sampling, which needs a key")
    if key is None:
        return None
    if beam_size > 1:
        raise InputError(f"beam_size={beam_size} searches, a key samples: give one of them")
    if temperature is not None:
        temperature = _scalar("temperature", temperature, lambda x: 0 < x < np.inf, "above 0")
    if top_p is not None:
        top_p = _scalar("top_p", top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
    if top_k is not None and not 1 <= top_k <= config.tgt_vocab_size:
        raise InputError(f"top_k={top_k} must be from 1 to {config.tgt_vocab_size} tokens")
    return Sampling(key, temperature, top_p, top_k)


def _scalar(
    name: str, value: Scalar, valid: Callable[[Scalar], bool], wanted: str
) -> Float32[Array, ""] | Float32[np.ndarray, ""]:
    if isinstance(value, jax.core.Tracer):
        return value.astype(np.float32)
    if not valid(value):
        raise InputError(f"{name}={value} must be {wanted}")
    return np.asarray(value, np.float32)
