"""The rules of a search: made of options, and applied to the scores of a step.

Letters in shapes: B batch, P prefix, E ids of EOS, V target vocabulary, S source length,
N hypotheses of a source.
"""

from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int32, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.generation_config import (
    EarlyStopping,
    GenerationConfig,
    Scalar,
    StartToken,
)
from jax_transformer.decoding.sampling import Keys, check_sampling
from jax_transformer.errors import InputError
from jax_transformer.model import functional
from jax_transformer.model.checks import check_ids, check_key, check_whole
from jax_transformer.model.transformer import Source

WILDCARD = -1  # fills shorter banned sequences on the left


@struct.dataclass
class Rules:
    """How a search selects tokens and targets: options of `GenerationConfig` as data.

    None is off, and costs nothing. Positions count the tokens of a target, from 0; the start token
    is not one of them.

    Attributes:
        key: Switches sampling on; None searches.
        limits: Largest number of tokens of each row's target, the prefix included [B].
        prefix: Tokens that each target begins with [B, P]; only the first `prefix_lengths` count.
        banned_sequences: One in each row, filled on the left with `WILDCARD`.
        times: The first id that is a time, from which on all are, and the last of them that a
            target may begin with; see `keep_times`.
        source: Source ids [B, S] for `encoder_no_repeat_ngram_size`. Padding is replaced by
            `tgt_vocab_size`, which equals no token.
    """

    start: Int32[Array | np.ndarray, " B"]
    eos_ids: Int32[Array | np.ndarray, " E"]
    prefix_lengths: Int32[Array | np.ndarray, " B"]
    limits: Int32[Array | np.ndarray, " B"]
    banned: Bool[Array | np.ndarray, " V"]
    length_penalty: Float[Array | np.ndarray, ""]
    prefix: Int32[Array | np.ndarray, "B P"] | None = None
    forced_first: Int32[Array | np.ndarray, ""] | None = None
    forced_last: Int32[Array | np.ndarray, ""] | None = None
    begin_suppressed: Bool[Array | np.ndarray, " V"] | None = None
    min_new_tokens: Int32[Array | np.ndarray, ""] | None = None
    repetition_penalty: Float[Array | np.ndarray, ""] | None = None
    banned_sequences: Int32[Array | np.ndarray, "sequences longest"] | None = None
    source: Int32[Array | np.ndarray, "B S"] | None = None
    times: Int32[Array | np.ndarray, "2"] | None = None
    key: Keys | None = None
    temperature: Float[Array | np.ndarray, ""] | None = None
    top_p: Float[Array | np.ndarray, ""] | None = None
    top_k: int | None = struct.field(pytree_node=False, default=None)
    no_repeat_ngram_size: int | None = struct.field(pytree_node=False, default=None)
    encoder_no_repeat_ngram_size: int | None = struct.field(pytree_node=False, default=None)
    renormalize: bool = struct.field(pytree_node=False, default=False)
    length_normalization: Literal["gnmt", "power"] = struct.field(pytree_node=False, default="gnmt")
    num_hypotheses: int = struct.field(pytree_node=False, default=1)
    early_stopping: EarlyStopping = struct.field(pytree_node=False, default="never")

    def of_rows(self) -> dict[str, Array]:
        """Return the fields that each source has of its own, a key among them."""
        names = "start", "prefix_lengths", "limits", "prefix", "source", "key"
        found = {name: getattr(self, name) for name in names}
        return {name: jnp.asarray(value) for name, value in found.items() if value is not None}


def make_rules(
    options: GenerationConfig,
    config: TransformerConfig,
    src: Source,
    prefix: Integer[Array | np.ndarray, "_ P"] | None = None,
    length_limits: Integer[Array | np.ndarray, " _"] | None = None,
    key: Keys | None = None,
) -> Rules:
    """Return the rules of a search; the arguments are those of `generate`, the source checked."""
    batch, vocab_size = src.shape[0], config.tgt_vocab_size
    eos_ids = options.eos_ids or (config.eos_id,)
    banned = np.isin(np.arange(vocab_size), options.banned_tokens)
    banned[config.pad_id] |= not options.allow_padding
    if banned.all():
        raise InputError("banned_tokens names every id, which leaves no token to generate")
    begin_suppressed = np.isin(np.arange(vocab_size), options.begin_suppressed_tokens)
    prefix, prefix_lengths = _prefix(config, prefix, batch)
    start = _start(config, options.start_token, batch)
    if isinstance(prefix, jax.core.Tracer):  # a token outside gives NaN, as a start token outside
        start = jnp.where(jnp.any(prefix == vocab_size, axis=1), vocab_size, start)
    longest = 1 + options.max_new_tokens + (0 if prefix is None else prefix.shape[1])
    # No text has an n-gram that is longer than it.
    ngram_size, source_ngram_size = (
        size if size is not None and size <= longest else None
        for size in (options.no_repeat_ngram_size, options.encoder_no_repeat_ngram_size)
    )
    limits = _length_limits(length_limits, batch, options.max_new_tokens)
    source = None
    if source_ngram_size is not None:
        source = jnp.where(src == config.pad_id, vocab_size, src)
    check_sampling(options, key is not None)
    if key is not None:
        check_key("key", key, batch)
    return Rules(
        start=start,
        eos_ids=np.asarray(eos_ids, np.int32),
        prefix_lengths=prefix_lengths,
        limits=prefix_lengths + within_factor(limits, options, config, src),
        banned=banned,
        length_penalty=as_array(options.length_penalty),
        prefix=prefix,
        forced_first=as_array(options.forced_first_token, np.int32),
        forced_last=as_array(options.forced_last_token, np.int32),
        begin_suppressed=begin_suppressed if begin_suppressed.any() else None,
        min_new_tokens=as_array(options.min_new_tokens, np.int32),
        repetition_penalty=as_array(options.repetition_penalty),
        banned_sequences=_sequences(options.banned_sequences, eos_ids),
        source=source,
        key=key,
        temperature=as_array(options.temperature),
        top_p=as_array(options.top_p),
        top_k=options.top_k,
        no_repeat_ngram_size=ngram_size,
        encoder_no_repeat_ngram_size=source_ngram_size,
        renormalize=options.renormalize,
        length_normalization=options.length_normalization,
        num_hypotheses=options.num_hypotheses,
        # Greedy search has no use for it, and is compiled once for all its values.
        early_stopping="never" if options.beam_size == 1 else options.early_stopping,
    )


def within_factor(
    limits: Int32[Array | np.ndarray, " B"],
    options: GenerationConfig,
    config: TransformerConfig,
    src: Source,
) -> Int32[Array | np.ndarray, " B"]:
    """Return limits of targets, each at most `max_length_factor` times the tokens of its source."""
    if (factor := options.max_length_factor) is None:
        return limits
    xp = _numpy_for(src, limits)
    tokens = xp.sum(xp.asarray(src) != config.pad_id, axis=1)
    return xp.clip((factor * tokens).astype(np.int32), 1, limits)


def as_array(
    number: Scalar | None, dtype: type[np.number] = np.float32
) -> Float[Array | np.ndarray, ""] | Int32[np.ndarray, ""] | None:
    """Return a number as data of a compiled program; a traced one stays traced."""
    if number is None:
        return None
    return number.astype(dtype) if isinstance(number, jax.Array) else np.asarray(number, dtype)


def apply_rules(
    scores: Float[Array, "B N V"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, " B"],
    rules: Rules,
) -> Float[Array, "B N V"]:
    """Return the scores of the next token with -inf where the rules forbid it.

    The scores are logits or log-probabilities. The sequences hold the start token and the tokens
    so far, `step` of each row, in their first `step + 1` columns. The order is that of
    transformers; a later rule wins.
    """
    vocab_size = scores.shape[-1]
    if rules.repetition_penalty is not None:
        scores = penalize_repetition(scores, sequences, step, rules.repetition_penalty)
    if (size := rules.no_repeat_ngram_size) is not None:
        written = jnp.arange(sequences.shape[-1]) <= step[:, None, None]
        texts = jnp.where(written, sequences, vocab_size)
        scores = _forbid(scores, completes_ngram(texts, sequences, step, size, vocab_size))
    if (size := rules.encoder_no_repeat_ngram_size) is not None:
        texts = rules.source[:, None]
        scores = _forbid(scores, completes_ngram(texts, sequences, step, size, vocab_size))
    if (table := rules.banned_sequences) is not None:
        scores = _forbid(scores, completes_sequence(table, sequences, step, vocab_size))
    scores = _forbid(scores, rules.banned)
    if rules.min_new_tokens is not None:
        too_early = step - rules.prefix_lengths < rules.min_new_tokens  # [B]
        is_eos = is_end(jnp.arange(vocab_size, dtype=jnp.int32), rules)
        scores = _forbid(scores, too_early[:, None, None] & is_eos)
    if (forced := forced_tokens(step, rules)) is not None:
        scores = force(scores, forced)
    if rules.begin_suppressed is not None:
        first_free = jnp.asarray(rules.prefix_lengths)  # [B]
        if rules.forced_first is not None:
            first_free = jnp.maximum(first_free, 1)
        at_begin = step == first_free
        scores = _forbid(scores, at_begin[:, None, None] & rules.begin_suppressed)
    if rules.times is not None:
        scores = keep_times(scores, sequences, step, rules)
    if not rules.renormalize:
        return scores
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.where(total > -jnp.inf, scores - total, -jnp.inf)  # -inf: no token is allowed


def penalize_repetition(
    scores: Float[Array, "B N V"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, " B"],
    penalty: Float[Array, ""],
) -> Float[Array, "B N V"]:
    """Return scores, with the scores of used tokens divided by the penalty (Keskar et al. 2019).

    A negative score is multiplied, so that it falls too. The start token counts as a used token.
    """
    written = jnp.arange(sequences.shape[-1]) <= step[:, None, None]
    seen = _mark(sequences, written, scores.shape[-1])
    penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(seen, penalized.astype(scores.dtype), scores)


def completes_ngram(
    texts: Int32[Array, "B #N length"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, " B"],
    size: int,
    vocab_size: int,
) -> Bool[Array, "B N V"]:
    """Return which tokens would complete a sequence of `size` tokens of the texts.

    With the target itself as the text, this is the rule of Paulus et al. 2017, section 2.5; the
    start token is one of the tokens. A text is filled with `vocab_size` where it has no token.
    """
    recent = _recent(sequences, step, size - 1)
    last = jnp.arange(texts.shape[-1])  # index of the last token of a sequence
    matches = jnp.broadcast_to(last >= size - 1, (*sequences.shape[:2], last.size))
    for back in range(1, size):
        matches &= jnp.roll(texts, back, axis=-1) == recent[..., -back, None]
    return _mark(texts, matches, vocab_size)


def completes_sequence(
    table: Int32[Array, "sequences longest"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, " B"],
    vocab_size: int,
) -> Bool[Array, "B N V"]:
    """Return which tokens would complete a sequence of the table."""
    before, last = table[:, :-1], table[:, -1]
    recent = _recent(sequences, step, before.shape[1])[:, :, None]
    matches = jnp.all((recent == before) | (before == WILDCARD), axis=-1)
    return _mark(last[None, None], matches, vocab_size)


def keep_times(
    scores: Float[Array, "B N V"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, " B"],
    rules: Rules,
) -> Float[Array, "B N V"]:
    """Return scores with -inf where a time of Whisper may not stand (Radford et al. 2022).

    A target begins with a time. Times come in pairs, the end of a segment and the start of the
    next, except at the begin and before EOS, and never go back. A time is next where the times
    together are likelier than each other token.
    """
    (first, last_begin), ids = rules.times, jnp.arange(scores.shape[-1])
    count = (step - rules.prefix_lengths)[:, None]  # tokens behind the prefix [B, 1]
    recent = _recent(sequences, step, 2)
    ended = (recent[..., 1] >= first) & (count >= 1)
    began = ended & ((recent[..., 0] >= first) | (count < 2))
    place = jnp.arange(sequences.shape[-1])
    own = (place > rules.prefix_lengths[:, None]) & (place <= step[:, None])  # [B, length]
    lowest = jnp.max(jnp.where(own[:, None], sequences, first - 1), axis=-1)
    lowest = jnp.maximum(lowest, first - 1) + ~(ended & ~began)
    is_time, at_begin = ids >= first, (count == 0)[..., None]
    scores = _forbid(scores, began[..., None] & is_time)
    scores = _forbid(scores, (ended & ~began)[..., None] & (ids < rules.eos_ids[0]))
    scores = _forbid(scores, is_time & (ids < lowest[..., None]))
    scores = _forbid(scores, at_begin & (~is_time | (ids > last_begin)))
    times, others = jnp.where(is_time, scores, -jnp.inf), jnp.where(is_time, -jnp.inf, scores)
    likelier = jax.nn.logsumexp(times, axis=-1) > jnp.max(others, axis=-1)
    return _forbid(scores, likelier[..., None] & ~is_time)


def force(scores: Float[Array, "B N V"], forced: Int32[Array, " B"]) -> Float[Array, "B N V"]:
    """Return scores of 0 for forced tokens and -inf for all others of their rows."""
    forced = forced[:, None, None]
    only = jnp.where(jnp.arange(scores.shape[-1]) == forced, 0.0, -jnp.inf).astype(scores.dtype)
    return jnp.where(forced < 0, scores, only)


def length_divisor(length: Int32[Array, "*shape"], rules: Rules) -> Float[Array, "*shape"]:
    """Return the divisor of the score of so many tokens, EOS included and the prefix not."""
    length = jnp.maximum(length, 1)  # inside the prefix, where the divisor divides 0
    base = (5 + length) / 6 if rules.length_normalization == "gnmt" else length
    return jnp.power(jnp.asarray(base, jnp.float32), rules.length_penalty)


def is_end(tokens: Int32[Array, "*shape"], rules: Rules) -> Bool[Array, "*shape"]:
    """Return which tokens are EOS."""
    return jnp.any(tokens[..., None] == rules.eos_ids, axis=-1)


def forced_tokens(step: Int32[Array, " B"], rules: Rules) -> Int32[Array, " B"] | None:
    """Return each row's forced token, -1 where the search chooses; None if no rule forces one."""
    if rules.prefix is None and rules.forced_first is None and rules.forced_last is None:
        return None
    forced = jnp.full(rules.limits.shape, -1, jnp.int32)
    if rules.forced_first is not None:
        forced = jnp.where(step == 0, rules.forced_first, forced)
    if rules.forced_last is not None:
        forced = jnp.where(step + 1 == rules.limits, rules.forced_last, forced)
    if rules.prefix is not None:  # wins over a forced first token
        column = jnp.take_along_axis(rules.prefix, step[:, None], axis=1, mode="clip")[:, 0]
        forced = jnp.where(step < rules.prefix_lengths, column, forced)
    return forced


def _forbid(
    scores: Float[Array, "B N V"], forbidden: Bool[Array, "*#shape"]
) -> Float[Array, "B N V"]:
    return jnp.where(forbidden, -jnp.inf, scores)


def _recent(
    sequences: Int32[Array, "B N _"], step: Int32[Array, " B"], count: int
) -> Int32[Array, "B N count"]:
    """Return the last `count` tokens, with -1 before the start token."""
    index = (step[:, None] + 1 - count + jnp.arange(count))[:, None]
    return jnp.where(index >= 0, jnp.take_along_axis(sequences, index, 2, mode="clip"), -1)


def _mark(
    tokens: Int32[Array, "*#places"], which: Bool[Array, "*#marked"], vocab_size: int
) -> Bool[Array, "B N V"]:
    """Return True at the tokens [B, N, L] that are marked; `vocab_size` and above are dropped."""
    marked = jnp.where(which, tokens, vocab_size)
    batch, count, _ = marked.shape
    rows, hypotheses = jnp.arange(batch)[:, None, None], jnp.arange(count)[:, None]
    empty = jnp.zeros((batch, count, vocab_size), bool)
    return empty.at[rows, hypotheses, marked].set(True, mode="drop")


def _numpy_for(*values: Any) -> ModuleType:
    """Return numpy, which runs on the host at once; jax's where a value or a size is traced."""
    traced = any(isinstance(value, jax.core.Tracer) or is_symbolic_dim(value) for value in values)
    return jnp if traced else np


def _start(
    config: TransformerConfig, start_token: StartToken | None, batch: int
) -> Int32[Array | np.ndarray, " B"]:
    start_token = config.bos_id if start_token is None else start_token
    if isinstance(start_token, int):
        start_token = np.asarray(start_token, np.int32)
    check_whole("start_token", start_token)
    if start_token.shape not in ((), (batch,)):
        raise InputError(
            f"start_token of shape {start_token.shape} must be one id, or one for each of {batch} "
            "sources"
        )
    if not isinstance(start_token, jax.core.Tracer):
        check_ids("start_token", np.asarray(start_token).reshape(1, -1), config.tgt_vocab_size)
        start_token = np.asarray(start_token, np.int32)
    else:
        start_token = functional.cast_ids(start_token, config.tgt_vocab_size)
    return _numpy_for(start_token, batch).broadcast_to(start_token, (batch,))


def _prefix(
    config: TransformerConfig, prefix: Integer[Array | np.ndarray, "_ P"] | None, batch: int
) -> tuple[Int32[Array, "B P"] | None, Int32[Array | np.ndarray, " B"]]:
    """Return the prefix, and the number of leading columns of each row that are not padding."""
    if prefix is None:
        return None, _numpy_for(batch).zeros(batch, np.int32)
    if prefix.shape[0] != batch or prefix.shape[1] == 0:
        raise InputError(
            f"prefix of shape {prefix.shape} must have a row for each of {batch} sources and at "
            "least 1 column"
        )
    if not isinstance(prefix, jax.core.Tracer):
        check_ids("prefix", np.asarray(prefix), config.tgt_vocab_size)
    prefix = functional.cast_ids(prefix, config.tgt_vocab_size)
    xp = _numpy_for(prefix)
    used = xp.asarray(prefix) != config.pad_id
    columns = xp.arange(prefix.shape[1])
    lengths = xp.min(xp.where(used, prefix.shape[1], columns), axis=1).astype(np.int32)
    if xp is np and (late := np.argwhere(used & (columns >= lengths[:, None]))).size:
        row, column = late[0]
        raise InputError(
            f"prefix[{row}, {column}]={prefix[row, column]} follows padding (id {config.pad_id}): "
            "a prefix has its tokens first; length_limits and forced_last_token end a row"
        )
    return prefix, lengths


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
    sequences: tuple[tuple[int, ...], ...], eos_ids: tuple[int, ...]
) -> Int32[np.ndarray, "sequences longest"] | None:
    # As in transformers: a single EOS id cannot be banned.
    sequences = [ids for ids in sequences if not (len(ids) == 1 and ids[0] in eos_ids)]
    if not sequences:
        return None
    table = np.full((len(sequences), max(map(len, sequences))), WILDCARD, np.int32)
    for row, ids in zip(table, sequences, strict=True):
        row[-len(ids) :] = ids
    return table
