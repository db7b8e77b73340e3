"""One function for each rule: it changes the scores of the next token, or names tokens to forbid.

Letters in shapes: B batch, N hypotheses of a source, V target vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.decoding.rules import (
    WILDCARD,
    Rules,
    first_free_position,
    forced_tokens,
    is_end,
)


def apply_rules(
    scores: Float[Array, "B N V"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, ""],
    rules: Rules,
) -> Float[Array, "B N V"]:
    """Return the scores of the next token with -inf where the rules forbid it.

    The order is that of transformers; a later rule wins over an earlier one.

    Args:
        scores: Logits or log-probabilities [B, N, V].
        sequences: The start token and the tokens so far, in the first `step + 1` columns.
        step: Number of tokens so far.
        rules: The rules.
    """
    vocab_size = scores.shape[-1]
    if rules.repetition_penalty is not None:
        scores = penalize_repetition(scores, sequences, step, rules.repetition_penalty)
    if (size := rules.no_repeat_ngram_size) is not None:
        written = jnp.arange(sequences.shape[-1]) <= step
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
    scores = force(scores, forced_tokens(step, rules))
    if rules.begin_suppressed is not None:
        at_begin = step == first_free_position(rules)  # [B]
        scores = _forbid(scores, at_begin[:, None, None] & rules.begin_suppressed)
    return renormalize(scores) if rules.renormalize else scores


def penalize_repetition(
    scores: Float[Array, "B N V"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, ""],
    penalty: Float[Array, ""],
) -> Float[Array, "B N V"]:
    """Return scores, with the scores of used tokens divided by the penalty (Keskar et al. 2019).

    A negative score is multiplied, so that it falls too. The start token counts as a used token.
    """
    seen = _mark(sequences, jnp.arange(sequences.shape[-1]) <= step, scores.shape[-1])
    penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(seen, penalized.astype(scores.dtype), scores)


def completes_ngram(
    texts: Int32[Array, "B #N length"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, ""],
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
    step: Int32[Array, ""],
    vocab_size: int,
) -> Bool[Array, "B N V"]:
    """Return which tokens would complete a sequence of the table."""
    before, last = table[:, :-1], table[:, -1]
    recent = _recent(sequences, step, before.shape[1])[:, :, None]
    matches = jnp.all((recent == before) | (before == WILDCARD), axis=-1)
    return _mark(last[None, None], matches, vocab_size)


def force(
    scores: Float[Array, "B N V"], forced: Int32[Array, " B"] | None
) -> Float[Array, "B N V"]:
    """Return scores of 0 for forced tokens and -inf for all others of their rows."""
    if forced is None:
        return scores
    forced = forced[:, None, None]
    only = jnp.where(jnp.arange(scores.shape[-1]) == forced, 0.0, -jnp.inf).astype(scores.dtype)
    return jnp.where(forced < 0, scores, only)


def renormalize(scores: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
    """Return the log-probabilities of the allowed tokens; all -inf if no token is allowed."""
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.where(total > -jnp.inf, scores - total, -jnp.inf)


def _forbid(
    scores: Float[Array, "B N V"], forbidden: Bool[Array, "*#shape"]
) -> Float[Array, "B N V"]:
    return jnp.where(forbidden, -jnp.inf, scores)


def _recent(
    sequences: Int32[Array, "B N _"], step: Int32[Array, ""], count: int
) -> Int32[Array, "B N count"]:
    """Return the last `count` tokens, with -1 before the start token."""
    index = step + 1 - count + jnp.arange(count)
    return jnp.where(index >= 0, jnp.take(sequences, index, axis=2, mode="clip"), -1)


def _mark(
    tokens: Int32[Array, "*#places"], which: Bool[Array, "*#marked"], vocab_size: int
) -> Bool[Array, "B N V"]:
    """Return True at the tokens [B, N, L] that are marked; `vocab_size` and above are dropped."""
    marked = jnp.where(which, tokens, vocab_size)
    batch, count, _ = marked.shape
    rows, hypotheses = jnp.arange(batch)[:, None, None], jnp.arange(count)[:, None]
    empty = jnp.zeros((batch, count, vocab_size), bool)
    return empty.at[rows, hypotheses, marked].set(True, mode="drop")
