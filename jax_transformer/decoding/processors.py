"""What a target must and must not hold: rules that change the scores of a step's choices.

Letters in shapes: B batch, N hypotheses of a source, V target vocabulary.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig


@struct.dataclass
class Rules:
    """The rules of one search; None is off and costs nothing.

    Attributes:
        banned: True = never chosen [V]; padding always is.
        prefix: Tokens that begin the targets [B, P]; the choice is free where it holds padding.
        min_new_tokens: Tokens before which no target ends.
        repetition_penalty: Factor by which a token's score falls once it occurs in its target.
        no_repeat_ngram_size: Length of the sequences that occur once at most.
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
        sequences: The begin and the tokens so far, in the first `step + 1` columns.
        step: How many tokens there are so far.
        rules: The rules; a prefix prevails over the others.
        config: Names the ids of padding and the end.
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
    """Return scores with those of tokens that occurred divided by the penalty (Keskar et al. 2019).

    A negative score is multiplied by it, so that it falls too. The begin counts as occurred.
    """
    seen = _mark(sequences, jnp.arange(sequences.shape[-1]) <= step, scores.shape[-1])
    penalized = jnp.where(scores < 0, scores * penalty, scores / penalty)
    return jnp.where(seen, penalized.astype(scores.dtype), scores)


def completes_ngram(
    sequences: Int32[Array, "B N _"], step: Int32[Array, ""], size: int, vocab_size: int
) -> Bool[Array, "B N V"]:
    """Return which tokens would complete a sequence of `size` tokens that occurred already.

    The begin is one of the tokens (Paulus et al. 2017, section 2.5, who choose three).
    """
    length = sequences.shape[-1]
    last = jnp.arange(length)  # of a sequence that occurred
    matches = (last >= size - 1) & (last <= step)
    for back in range(1, size):
        recent = jnp.take(sequences, step + 1 - back, axis=2, mode="fill", fill_value=-1)
        matches &= jnp.roll(sequences, back, axis=-1) == recent[..., None]
    return _mark(sequences, matches, vocab_size)


def _mark(
    sequences: Int32[Array, "B N L"], which: Bool[Array, "*#shape"], vocab_size: int
) -> Bool[Array, "B N V"]:
    batch, count, _ = sequences.shape
    marked = jnp.where(which, sequences, vocab_size)  # past the table: dropped
    rows, hypotheses = jnp.arange(batch)[:, None, None], jnp.arange(count)[:, None]
    empty = jnp.zeros((batch, count, vocab_size), bool)
    return empty.at[rows, hypotheses, marked].set(True, mode="drop")
