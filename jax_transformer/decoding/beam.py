"""Beam search: the N best hypotheses of a source side by side, in one loop.

Letters in shapes: B batch, N hypotheses of a source, K returned hypotheses, L target positions,
V target vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.cache import Cache, select_hypotheses
from jax_transformer.decoding.processors import Rules, apply_rules
from jax_transformer.decoding.search import (
    Hypotheses,
    LengthPenalty,
    Step,
    next_logits,
    start_sequences,
)


class _Finished(NamedTuple):
    tokens: Int32[Array, "B K L"]
    scores: Float[Array, "B K"]  # best first
    lengths: Int32[Array, "B K"]


class _State(NamedTuple):
    step: Int32[Array, ""]
    cache: Cache
    sequences: Int32[Array, "B N _"]  # open hypotheses, best first
    scores: Float[Array, "B N"]  # sums of their log-probabilities
    finished: _Finished
    done: Bool[Array, " B"]
    failed_at: Int32[Array, " B"]


def beam_search(
    advance: Step,
    cache: Cache,
    config: TransformerConfig,
    rules: Rules,
    length_penalty: LengthPenalty,
    num_hypotheses: int,
) -> tuple[Hypotheses, Int32[Array, " B"]]:
    """Keep the N most likely open hypotheses of each source, and the K best finished ones.

    A step ranks all one-token continuations of the N open hypotheses of a source; the lowest beam
    and then the lowest id wins a tie. A continuation among the first N that ends in EOS is
    finished; the best N continuations without EOS stay open. At the last position the first N are
    finished as they are.

    Early stopping is exact. Log-probabilities only fall, so a source is done as soon as the score
    that its best open hypothesis can still reach, at the most favourable length, does not exceed
    the score of the worst finished hypothesis that is kept.

    Args:
        advance: Function of a cache and tokens; returns the logits of the next tokens and the new
            cache.
        cache: An empty cache, for N hypotheses of each source.
        config: Names the ids of BOS, EOS and padding.
        rules: Which tokens may be chosen.
        length_penalty: Divisor of the scores of finished targets.
        num_hypotheses: Number K of finished targets that are kept.

    Returns:
        The targets, and the step at which a source's logits were not finite, or -1.
    """
    batch, count, length = cache.ancestors.shape

    def unfinished(state: _State) -> Bool[Array, ""]:
        return (state.step < length) & ~jnp.all(state.done)

    def extend(state: _State) -> _State:
        step = state.step
        logits, normalizer, cache = next_logits(advance, state.cache, state.sequences, step)
        alive = state.scores > -jnp.inf
        failed = jnp.any(alive & ~jnp.isfinite(normalizer), axis=1) & ~state.done
        done = state.done | failed

        allowed = logits - normalizer[..., None]
        allowed = apply_rules(allowed, state.sequences, step, rules, config)
        totals, parents, tokens = _best_continuations(state.scores, allowed)
        sequences = jnp.take_along_axis(state.sequences, parents[..., None], axis=1)
        sequences = sequences.at[:, :, step + 1].set(tokens)

        ends = (tokens == config.eos_id) | (step + 1 == length)
        scores = jnp.where(ends & ~done[:, None], totals, -jnp.inf) / length_penalty(step + 1)
        new = _Finished(
            sequences[:, :count, 1:],
            scores[:, :count],
            jnp.broadcast_to(step + 1, (batch, count)),
        )
        finished = _best(state.finished, new)
        scores, order = jax.lax.top_k(jnp.where(ends, -jnp.inf, totals), count)
        parents = jnp.take_along_axis(parents, order, axis=1)
        limit = _limit(scores[:, 0], step + 1, length, length_penalty)
        return _State(
            step=step + 1,
            cache=select_hypotheses(cache, parents),
            sequences=jnp.take_along_axis(sequences, order[..., None], axis=1),
            scores=scores,
            finished=finished,
            done=done | (limit <= finished.scores[:, -1]),
            failed_at=jnp.where(failed, step, state.failed_at),
        )

    sequences, scores = start_sequences(cache, config)
    end = jax.lax.while_loop(
        unfinished,
        extend,
        _State(
            step=jnp.zeros((), jnp.int32),
            cache=cache,
            sequences=sequences,
            # Only one hypothesis is open at first: equal hypotheses would have equal continuations.
            scores=scores.at[:, 1:].set(-jnp.inf),
            finished=_Finished(
                jnp.full((batch, num_hypotheses, length), config.pad_id, jnp.int32),
                jnp.full((batch, num_hypotheses), -jnp.inf, scores.dtype),
                jnp.zeros((batch, num_hypotheses), jnp.int32),
            ),
            done=jnp.zeros(batch, bool),
            failed_at=jnp.full(batch, -1, jnp.int32),
        ),
    )
    tokens, scores, lengths = end.finished
    scores = jnp.where(end.failed_at[:, None] < 0, scores, jnp.nan).astype(jnp.float32)
    return Hypotheses(tokens, scores, lengths), end.failed_at


def _best_continuations(
    scores: Float[Array, "B N"], allowed: Float[Array, "B N V"]
) -> tuple[Float[Array, "B C"], Int32[Array, "B C"], Int32[Array, "B C"]]:
    """Return the C = 2N best sums of each source, best first, their hypotheses and tokens.

    At most N of them end in EOS, one for each hypothesis, so at least N can stay open. All C may
    continue the same hypothesis, so the C best continuations of each hypothesis are ranked first.
    """
    batch, count, _ = allowed.shape
    best, tokens = jax.lax.top_k(allowed, 2 * count)
    totals = (scores[..., None] + best).reshape(batch, -1)
    totals, index = jax.lax.top_k(totals, 2 * count)
    tokens = jnp.take_along_axis(tokens.reshape(batch, -1), index, axis=1)
    return totals, index // (2 * count), tokens


def _best(finished: _Finished, new: _Finished) -> _Finished:
    """Return the K best of both, the earlier finished first where scores tie."""
    both = jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=1), finished, new)
    scores, order = jax.lax.top_k(both.scores, finished.scores.shape[1])
    return _Finished(
        jnp.take_along_axis(both.tokens, order[..., None], axis=1),
        scores,
        jnp.take_along_axis(both.lengths, order, axis=1),
    )


def _limit(
    total: Float[Array, " B"], so_far: Int32[Array, ""], longest: int, penalty: LengthPenalty
) -> Float[Array, " B"]:
    """Return an upper bound of the score that an open hypothesis can still reach."""
    # The penalty is monotonic in the length, so the best length is the shortest or the longest.
    first, last = jnp.minimum(so_far + 1, longest), jnp.asarray(longest, jnp.int32)
    return jnp.maximum(total / penalty(first), total / penalty(last))
