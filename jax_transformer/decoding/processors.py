"""Rules on the tokens of a target, as functions that change the scores of the next token.

Letters in shapes: B batch, N hypotheses of a source, V target vocabulary.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig


@struct.dataclass
class Rules:
    """The rules of one search; a rule that is None is off and costs nothing.

    Attributes:
        banned: True = the token is never chosen [V]; always True for padding.
        prefix: Tokens that the targets begin with [B, P]; where the prefix holds padding, the
            search chooses.
        min_new_tokens: Number of tokens that a target has before EOS may follow.
        repetition_penalty: Factor by which the score of a token falls after its first use in the
            target.
        no_repeat_ngram_size: Length n: no sequence of n tokens occurs twice in a target.
    """

    banned: Bool[Array | np.ndarray, " V"]
    prefix: Int32[Array | np.ndarray, "B P"] | None = None
    min_new_tokens: Int32[Array | np.ndarray, ""] | None = None
    repetition_penalty: Float[Array | np.ndarray, ""] | None = None
    no_repeat_ngram_size: int | None = struct.field(pytree_node=False, default=None)


def apply_rules(
    scores: Float[Array, "B N V"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, ""],
    rules: Rules,
    config: TransformerConfig,
) -> Float[Array, "B N V"]:
    """Return the scores of the next token with -inf where the rules forbid it.

    Args:
        scores: Logits or log-probabilities [B, N, V].
        sequences: BOS and the tokens so far, in the first `step + 1` columns.
        step: Number of tokens so far.
        rules: The rules; a prefix overrides the others.
        config: Names the ids of padding and EOS.
    """
    allowed = scores
    if rules.repetition_penalty is not None:
        allowed = penalize_repetition(allowed, sequences, step, rules.repetition_penalty)
    if rules.no_repeat_ngram_size is not None:
        repeated = completes_ngram(sequences, step, rules.no_repeat_ngram_size, scores.shape[-1])
        allowed = jnp.where(repeated, -jnp.inf, allowed)
    ids = jnp.arange(scores.shape[-1])
    if rules.min_new_tokens is not None:
        too_early = (ids == config.eos_id) & (step < rules.min_new_tokens)
        allowed = jnp.where(too_early, -jnp.inf, allowed)
    allowed = jnp.where(rules.banned, -jnp.inf, allowed)
    if rules.prefix is not None:
        column = jnp.take(
            rules.prefix, step, axis=1, mode="fill", fill_value=config.pad_id
        )  # [B], padding past its end
        forced = column[:, None, None]
        only = jnp.where(ids == forced, scores, -jnp.inf)
        allowed = jnp.where(forced == config.pad_id, allowed, only)
    return allowed


def penalize_repetition(
    scores: Float[Array, "B N V"],
    sequences: Int32[Array, "B N _"],
    step: Int32[Array, ""],
    penalty: Float[Array, ""],
) -> Float[Array, "B N V"]:
    """Return scores, with the scores of used tokens divided by the penalty (Keskar et al. 2019).

    A negative score is multiplied, so that it falls too. BOS counts as a used token.
    """
    seen = _mark(sequences, jnp.arange(sequences.shape[-1]) <= step, scores.shape[-1])
    penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(seen, penalized.astype(scores.dtype), scores)


def completes_ngram(
    sequences: Int32[Array, "B N _"], step: Int32[Array, ""], size: int, vocab_size: int
) -> Bool[Array, "B N V"]:
    """Return which tokens would complete a sequence of `size` tokens that occurred already.

    BOS is one of the tokens (Paulus et al. 2017, section 2.5, with sequences of three).
    """
    length = sequences.shape[-1]
    last = jnp.arange(length)  # index of the last token of an earlier sequence
    matches = (last >= size - 1) & (last <= step)
    for back in range(1, size):
        recent = jnp.take(sequences, step + 1 - back, axis=2, mode="fill", fill_value=-1)
        matches &= jnp.roll(sequences, back, axis=-1) == recent[..., None]
    return _mark(sequences, matches, vocab_size)


def _mark(
    sequences: Int32[Array, "B N L"], which: Bool[Array, "*#shape"], vocab_size: int
) -> Bool[Array, "B N V"]:
    batch, count, _ = sequences.shape
    marked = jnp.where(which, sequences, vocab_size)  # an id past the vocabulary is dropped
    rows, hypotheses = jnp.arange(batch)[:, None, None], jnp.arange(count)[:, None]
    empty = jnp.zeros((batch, count, vocab_size), bool)
    return empty.at[rows, hypotheses, marked].set(True, mode="drop")
