"""The options of `generate` that are rules on tokens, checked, and turned into `Rules`.

Letters in shapes: B batch, P prefix, V target vocabulary, S source length.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Int32, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.rules import WILDCARD, Rules
from jax_transformer.decoding.source import (
    Scalar,
    as_ids,
    as_scalar,
    as_tuple,
    check_id,
)
from jax_transformer.errors import InputError
from jax_transformer.model import functional
from jax_transformer.model.checks import (
    check_flag,
    check_ids,
    check_whole,
    check_whole_number,
    shown,
)

StartToken = int | Integer[Array | np.ndarray, ""] | Integer[Array | np.ndarray, " _"]


def make_rules(
    config: TransformerConfig,
    src: Int32[Array, "B S"],
    max_new_tokens: int,
    *,
    start_token: StartToken | None = None,
    eos_ids: tuple[int, ...] | None = None,
    allow_padding: bool = False,
    prefix: Integer[Array | np.ndarray, "_ P"] | None = None,
    length_limits: Integer[Array | np.ndarray, " _"] | None = None,
    min_new_tokens: int | None = None,
    forced_first_token: int | None = None,
    forced_last_token: int | None = None,
    banned_tokens: tuple[int, ...] = (),
    banned_sequences: tuple[tuple[int, ...], ...] = (),
    begin_suppressed_tokens: tuple[int, ...] = (),
    repetition_penalty: Scalar | None = None,
    no_repeat_ngram_size: int | None = None,
    encoder_no_repeat_ngram_size: int | None = None,
    renormalize: bool = False,
) -> Rules:
    """Return the rules of a search; the arguments are those of `generate`.

    Raises:
        InputError: An id is outside the vocabulary, a number or a shape is out of range, or the
            rules leave no token.
    """
    batch, vocab_size = src.shape[0], config.tgt_vocab_size
    eos_ids = (config.eos_id,) if eos_ids is None else eos_ids
    if not eos_ids:
        raise InputError("eos_ids=() must name at least one id")
    check_flag("allow_padding", allow_padding)
    check_flag("renormalize", renormalize)
    banned = _is_one_of("banned_tokens", banned_tokens, vocab_size)
    banned[config.pad_id] |= not allow_padding
    if banned.all():
        raise InputError(f"banned_tokens={shown(banned_tokens)} leaves no token to generate")
    forced = {"forced_first_token": forced_first_token, "forced_last_token": forced_last_token}
    for name, token in forced.items():
        if token is not None:
            check_id(name, token, vocab_size)
            forced[name] = np.asarray(token, np.int32)
    begin_suppressed = _is_one_of("begin_suppressed_tokens", begin_suppressed_tokens, vocab_size)
    prefix, prefix_lengths = _prefix(config, prefix, batch)
    if min_new_tokens is not None:
        check_whole_number("min_new_tokens", min_new_tokens)
        if not 0 <= min_new_tokens < max_new_tokens:
            raise InputError(
                f"min_new_tokens={min_new_tokens} must be from 0 to {max_new_tokens - 1}: "
                f"max_new_tokens={max_new_tokens} counts EOS too"
            )
        min_new_tokens = np.asarray(min_new_tokens, np.int32)
    if repetition_penalty is not None:
        repetition_penalty = as_scalar(
            "repetition_penalty", repetition_penalty, lambda x: 0 < x < np.inf, "above 0"
        )
    longest = 1 + max_new_tokens + (0 if prefix is None else prefix.shape[1])
    sizes = {
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "encoder_no_repeat_ngram_size": encoder_no_repeat_ngram_size,
    }
    for name, size in sizes.items():
        if size is not None:
            check_whole_number(name, size, least=1)
            sizes[name] = int(size) if size <= longest else None  # no text has so many tokens
    source = None
    if sizes["encoder_no_repeat_ngram_size"] is not None:
        source = jnp.where(src == config.pad_id, vocab_size, src)
    return Rules(
        start=_start(config, start_token, batch),
        eos_ids=np.asarray(eos_ids, np.int32),
        prefix_lengths=prefix_lengths,
        limits=prefix_lengths + _length_limits(length_limits, batch, max_new_tokens),
        banned=banned,
        prefix=prefix,
        forced_first=forced["forced_first_token"],
        forced_last=forced["forced_last_token"],
        begin_suppressed=begin_suppressed if begin_suppressed.any() else None,
        min_new_tokens=min_new_tokens,
        repetition_penalty=repetition_penalty,
        banned_sequences=_sequences(banned_sequences, eos_ids, vocab_size),
        source=source,
        renormalize=renormalize,
        **sizes,
    )


def _is_one_of(name: str, ids: tuple[int, ...], vocab_size: int) -> Bool[np.ndarray, " V"]:
    return np.isin(np.arange(vocab_size), as_tuple(name, ids, vocab_size))


def _numpy_for(*values: Any) -> ModuleType:
    """Return numpy, which runs on the host at once; jax's where a value or a size is traced."""
    traced = any(isinstance(value, jax.core.Tracer) or is_symbolic_dim(value) for value in values)
    return jnp if traced else np


def _start(
    config: TransformerConfig, start_token: StartToken | None, batch: int
) -> Int32[Array | np.ndarray, " B"]:
    if start_token is None:
        start_token = config.bos_id
    if isinstance(start_token, np.ndarray | jax.Array):
        check_whole("start_token", start_token)
    if isinstance(start_token, jax.core.Tracer):
        start_token = functional.cast_ids(start_token, config.tgt_vocab_size)
    elif not isinstance(start_token, np.ndarray | jax.Array) or start_token.ndim == 0:
        check_id("start_token", start_token, config.tgt_vocab_size)
        start_token = np.asarray(start_token, np.int32)
    elif start_token.ndim == 1:
        check_ids("start_token", np.asarray(start_token)[None], config.tgt_vocab_size)
        start_token = np.asarray(start_token, np.int32)
    if start_token.shape not in ((), (batch,)):
        raise InputError(
            f"start_token of shape {start_token.shape} must be one id, or one for each of {batch} "
            "sources"
        )
    return _numpy_for(start_token, batch).broadcast_to(start_token, (batch,))


def _prefix(
    config: TransformerConfig, prefix: Integer[Array | np.ndarray, "_ P"] | None, batch: int
) -> tuple[Int32[Array, "B P"] | None, Int32[Array | np.ndarray, " B"]]:
    """Return the prefix, and the number of leading columns of each row that are not padding."""
    if prefix is None:
        return None, _numpy_for(batch).zeros(batch, np.int32)
    prefix = as_ids("prefix", prefix, config.tgt_vocab_size)
    if prefix.shape[0] != batch or prefix.shape[1] == 0:
        raise InputError(
            f"prefix of shape {prefix.shape} must have a row for each of {batch} sources and at "
            "least 1 column"
        )
    xp = _numpy_for(prefix)
    used = xp.asarray(prefix) != config.pad_id
    leading = xp.cumprod(used, axis=1, dtype=np.int32)
    if xp is np and (late := np.argwhere(used & (leading == 0))).size:
        row, column = late[0]
        raise InputError(
            f"prefix[{row}, {column}]={prefix[row, column]} follows padding (id {config.pad_id}): "
            "a prefix has its tokens first; length_limits and forced_last_token end a row"
        )
    return prefix, xp.sum(leading, axis=1, dtype=np.int32)


def _length_limits(
    limits: Integer[Array | np.ndarray, " _"] | None, batch: int, max_new_tokens: int
) -> Int32[Array | np.ndarray, " B"]:
    if limits is None:
        return _numpy_for(batch).full(batch, max_new_tokens, np.int32)
    check_whole("length_limits", limits, "numbers of tokens")
    if limits.shape != (batch,):
        raise InputError(
            f"length_limits of shape {limits.shape} must have a number for each of {batch} sources"
        )
    if isinstance(limits, jax.core.Tracer):
        return jnp.clip(limits, 1, max_new_tokens).astype(np.int32)
    limits = np.asarray(limits)
    wrong = np.flatnonzero((limits < 1) | (limits > max_new_tokens))
    if wrong.size:
        raise InputError(
            f"length_limits[{wrong[0]}]={limits[wrong[0]]} must be from 1 to max_new_tokens="
            f"{max_new_tokens}"
        )
    return limits.astype(np.int32)


def _sequences(
    sequences: Sequence[Sequence[int]], eos_ids: tuple[int, ...], vocab_size: int
) -> Int32[np.ndarray, "sequences longest"] | None:
    if not isinstance(sequences, list | tuple):
        raise InputError(f"banned_sequences={shown(sequences)} must be a tuple of tuples of ids")
    for index, sequence in enumerate(sequences):
        if not as_tuple(f"banned_sequences[{index}]", sequence, vocab_size):
            raise InputError(f"banned_sequences[{index}] is empty")
    # As in transformers: a single EOS id cannot be banned.
    sequences = [ids for ids in sequences if not (len(ids) == 1 and ids[0] in eos_ids)]
    if not sequences:
        return None
    table = np.full((len(sequences), max(map(len, sequences))), WILDCARD, np.int32)
    for row, ids in zip(table, sequences, strict=True):
        row[-len(ids) :] = ids
    return table
