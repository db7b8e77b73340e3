"""The options of `generate` that are not rules on tokens, checked."""

import numpy as np
from jaxtyping import PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.sampling import Sampling
from jax_transformer.decoding.search import EarlyStopping, LengthPenalty
from jax_transformer.decoding.source import Scalar, as_scalar
from jax_transformer.errors import InputError
from jax_transformer.model.checks import check_key, check_whole_number, shown

LARGEST_ALPHA = 10  # 6,000**10 is a float32, and its inverse too
MOST_TOKENS = 2**30  # positions are int32


def check_sizes(
    config: TransformerConfig, beam_size: int, num_hypotheses: int, num_eos_ids: int = 1
) -> None:
    """Refuse a beam size that does not fit the vocabulary or the number of hypotheses.

    Raises:
        InputError: Names the sizes.
    """
    check_whole_number("beam_size", beam_size, least=1)
    check_whole_number("num_hypotheses", num_hypotheses)
    needed = (1 + num_eos_ids) * beam_size
    if beam_size > 1 and needed > config.tgt_vocab_size:
        raise InputError(
            f"beam_size={beam_size} needs a vocabulary of {needed} tokens or more, but "
            f"tgt_vocab_size={config.tgt_vocab_size}"
        )
    if not 1 <= num_hypotheses <= beam_size:
        raise InputError(f"num_hypotheses={num_hypotheses} must be from 1 to beam_size={beam_size}")


def check_lengths(config: TransformerConfig, prefix_length: int, max_new_tokens: int) -> None:
    """Refuse targets that do not fit the position table.

    Raises:
        InputError: Names the lengths.
    """
    check_whole_number("max_new_tokens", max_new_tokens, least=1)
    if prefix_length + max_new_tokens > MOST_TOKENS:
        raise InputError(f"max_new_tokens={shown(max_new_tokens)} must be at most {MOST_TOKENS:,}")
    too_long = prefix_length + max_new_tokens > config.max_length
    if prefix_length and too_long and config.has_position_table:
        raise InputError(
            f"a prefix of {prefix_length} tokens and max_new_tokens={max_new_tokens} exceed the "
            f"position table, which ends at max_length={config.max_length}"
        )


def check_early_stopping(early_stopping: EarlyStopping) -> None:
    """Refuse another value than True, False and "never".

    Raises:
        InputError: Names the value.
    """
    named = isinstance(early_stopping, str) and early_stopping == "never"
    if not (isinstance(early_stopping, bool) or named):
        raise InputError(f"early_stopping={shown(early_stopping)} must be True, False or 'never'")


def length_penalty(alpha: Scalar, normalization: str) -> LengthPenalty:
    """Return the penalty.

    Raises:
        InputError: The normalization is unknown, or alpha is no number or so large that the divisor
            of a long target would overflow.
    """
    if not isinstance(normalization, str) or normalization not in ("gnmt", "power"):
        raise InputError(f"length_normalization={shown(normalization)} must be 'gnmt' or 'power'")
    alpha = as_scalar(
        "length_penalty",
        alpha,
        lambda x: abs(x) <= LARGEST_ALPHA,
        f"a finite number from -{LARGEST_ALPHA} to {LARGEST_ALPHA}",
    )
    return LengthPenalty(alpha, normalization)


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
            raise InputError(f"{name}={shown(value)} is for sampling, which needs a key")
    if key is None:
        return None
    check_key("key", key)
    if beam_size > 1:
        raise InputError(f"beam_size={beam_size} searches, a key samples: give one of them")
    if temperature is not None:
        temperature = as_scalar("temperature", temperature, lambda x: 0 < x < np.inf, "above 0")
    if top_p is not None:
        top_p = as_scalar("top_p", top_p, lambda x: 0 < x <= 1, "above 0 and at most 1")
    if top_k is not None:
        check_whole_number("top_k", top_k)
        if not 1 <= top_k <= config.tgt_vocab_size:
            raise InputError(f"top_k={top_k} must be from 1 to {config.tgt_vocab_size} tokens")
    return Sampling(key, temperature, top_p, top_k)
