"""Beam search: the N best hypotheses of a source side by side, in one loop.

Letters in shapes: B batch, N open hypotheses of a source, F finished hypotheses that are kept,
L target positions, V target vocabulary, C candidates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.cache import Cache
from jax_transformer.decoding.generation_config import EarlyStopping
from jax_transformer.decoding.hypotheses import (
    Hypotheses,
    LengthPenalty,
    Step,
    extend_all,
    next_logits,
    start_sequences,
)
from jax_transformer.decoding.rules import Rules, apply_rules, is_end
from jax_transformer.kernels.execution import TopK


class _State(NamedTuple):
    step: Int32[Array, ""]
    cache: Cache
    sequences: Int32[Array, "B N _"]  # open hypotheses, best first
    scores: Float[Array, "B N"]  # sums of their log-probabilities
    finished: Hypotheses  # F of each source
    ended: Bool[Array, " B"]
    failed_at: Int32[Array, " B"]


def beam_search(
    advance: Step,
    cache: Cache,
    config: TransformerConfig,
    rules: Rules,
    length_penalty: LengthPenalty,
    num_hypotheses: int,
    early_stopping: EarlyStopping,
    top_k: TopK,
    batch_sizes: Sequence[int],
) -> tuple[Hypotheses, Int32[Array, " B"]]:
    """Keep the N most likely open hypotheses of each source, and the F best finished ones.

    A step ranks all one-token continuations of the N open hypotheses of a source; the lowest beam
    and then the lowest id wins a tie. A continuation among the first N that ends in EOS is
    finished; the best N continuations without EOS stay open. At the last position of a row the
    first N are finished as they are.

    A source is done, and keeps its finished hypotheses as they are, by a rule of transformers,
    `GenerationConfig.early_stopping`. "never" compares the best score that the best open hypothesis
    can still reach, at the most favourable length: log-probabilities only fall, so it is exact.

    Returns the K best targets, and the step at which a source's logits were not finite, or -1.
    """
    batch, count, length = cache.ancestors.shape
    most_finished = num_hypotheses if early_stopping == "never" else count  # F
    num_candidates = (1 + len(rules.eos_ids)) * count

    def is_done(
        best_open: Float[Array, " B"],
        worst_kept: Float[Array, " B"],
        counted: Int32[Array, " B"],
        rules: Rules,
    ) -> Bool[Array, " B"]:
        if early_stopping is True:
            return (worst_kept > -jnp.inf) | (best_open == -jnp.inf)
        if early_stopping is False:
            return best_open / length_penalty(counted) <= worst_kept
        longest = rules.limits - rules.prefix_lengths
        return _limit(best_open, counted, longest, length_penalty) <= worst_kept

    def extend(state: _State, rules: Rules) -> _State:
        step = state.step
        logits, normalizer, cache = next_logits(advance, state.cache, state.sequences, step)
        alive = state.scores > -jnp.inf
        failed = jnp.any(alive & ~jnp.isfinite(normalizer), axis=1) & ~state.ended
        ended = state.ended | failed

        allowed = logits - normalizer[..., None]
        allowed = apply_rules(allowed, state.sequences, step, rules)
        totals, parents, tokens = _best_continuations(state.scores, allowed, num_candidates, top_k)
        sequences = jnp.take_along_axis(state.sequences, parents[..., None], axis=1)
        sequences = sequences.at[:, :, step + 1].set(tokens)

        free = step >= rules.prefix_lengths  # EOS in a prefix ends nothing
        at_limit = step + 1 >= rules.limits
        ends = (is_end(tokens, rules) & free[:, None]) | at_limit[:, None]
        counted = step + 1 - rules.prefix_lengths  # [B], tokens that the penalty counts
        scores = jnp.where(ends & ~ended[:, None], totals, -jnp.inf)
        scores = scores / length_penalty(counted)[:, None]
        lengths = jnp.broadcast_to(step + 1, ends.shape)
        new = Hypotheses(sequences[:, :count, 1:], scores[:, :count], lengths)
        finished = _best(state.finished, new)
        scores, order = jax.lax.top_k(jnp.where(ends, -jnp.inf, totals), count)
        parents = jnp.take_along_axis(parents, order, axis=1)
        ancestors = jnp.take_along_axis(cache.ancestors, parents[..., None], axis=1)
        return _State(
            step=step + 1,
            cache=cache._replace(ancestors=ancestors),
            sequences=jnp.take_along_axis(sequences, order[..., None], axis=1),
            scores=scores,
            finished=finished,
            ended=ended | is_done(scores[:, 0], finished.scores[:, -1], counted, rules),
            failed_at=jnp.where(failed, step, state.failed_at),
        )

    sequences, scores = start_sequences(cache, config, rules)
    end = extend_all(
        extend,
        _State(
            step=jnp.zeros((), jnp.int32),
            cache=cache,
            sequences=sequences,
            # Only one hypothesis is open at first: equal hypotheses would have equal continuations.
            scores=scores.at[:, 1:].set(-jnp.inf),
            finished=Hypotheses(
                jnp.full((batch, most_finished, length), config.pad_id, jnp.int32),
                jnp.full((batch, most_finished), -jnp.inf, scores.dtype),
                jnp.zeros((batch, most_finished), jnp.int32),
            ),
            ended=jnp.zeros(batch, bool),
            failed_at=jnp.full(batch, -1, jnp.int32),
        ),
        rules,
        batch_sizes,
    )
    tokens, scores, lengths = (leaf[:, :num_hypotheses] for leaf in end.finished)
    scores = jnp.where(end.failed_at[:, None] < 0, scores, jnp.nan).astype(jnp.float32)
    return Hypotheses(tokens, scores, lengths), end.failed_at


def _best_continuations(
    scores: Float[Array, "B N"], allowed: Float[Array, "B N V"], num_candidates: int, top_k: TopK
) -> tuple[Float[Array, "B C"], Int32[Array, "B C"], Int32[Array, "B C"]]:
    """Return the C best sums of each source, best first, their hypotheses and tokens.

    With E ids of EOS, at most E*N of them end in EOS, so at least N of C = (1 + E)*N can stay open.
    """
    batch, count, vocab_size = allowed.shape
    if top_k == "batched":
        best, tokens = jax.lax.top_k(allowed, num_candidates)
    else:  # hypotheses first, as XLA lays them out on a TPU: else it would copy all scores
        rows = allowed.swapaxes(0, 1).reshape(-1, vocab_size)
        best, tokens = (
            x.reshape(count, batch, -1).swapaxes(0, 1) for x in jax.lax.top_k(rows, num_candidates)
        )
    totals = (scores[..., None] + best).reshape(batch, -1)
    totals, index = jax.lax.top_k(totals, num_candidates)
    tokens = jnp.take_along_axis(tokens.reshape(batch, -1), index, axis=1)
    return totals, index // num_candidates, tokens


def _best(finished: Hypotheses, new: Hypotheses) -> Hypotheses:
    """Return the F best of both, the earlier finished first where scores tie."""
    both = jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=1), finished, new)
    scores, order = jax.lax.top_k(both.scores, finished.scores.shape[1])
    return Hypotheses(
        jnp.take_along_axis(both.tokens, order[..., None], axis=1),
        scores,
        jnp.take_along_axis(both.lengths, order, axis=1),
    )


def _limit(
    total: Float[Array, " B"],
    counted: Int32[Array, " B"],
    longest: Int32[Array, " B"],
    penalty: LengthPenalty,
) -> Float[Array, " B"]:
    """Return an upper bound of the score that an open hypothesis can still reach."""
    # The penalty is monotonic in the length, so the best length is the shortest or the longest.
    shortest = jnp.minimum(counted + 1, longest)
    return jnp.maximum(total / penalty(shortest), total / penalty(longest))
