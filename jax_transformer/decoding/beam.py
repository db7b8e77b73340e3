"""Beam search: the N best hypotheses of a source side by side.

Letters in shapes: B batch, N open hypotheses of a source, F finished hypotheses that are kept,
L target positions, V target vocabulary, C candidates.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.decoding.hypotheses import Hypotheses, State, with_tokens
from jax_transformer.decoding.rules import Rules, apply_rules, is_end, length_divisor
from jax_transformer.kernels.execution import TopK


def extend_beam(
    state: State,
    logits: Float[Array, "B N V"],
    normalizer: Float[Array, "B N"],
    rules: Rules,
    top_k: TopK,
) -> State:
    """Keep the N most likely open hypotheses of each source, and the F best finished ones.

    A step ranks all one-token continuations of the N open hypotheses of a source; the lowest beam
    and then the lowest id wins a tie. A continuation among the first N that ends in EOS is
    finished; the best N continuations without EOS stay open. At the last position of a row the
    first N are finished as they are. A beam that shrinks has N less the finished ones in all of
    these places.

    A source is done, and keeps its finished hypotheses as they are, by a rule of transformers,
    `GenerationConfig.early_stopping`.
    """
    step, (_, count) = state.step, state.scores.shape
    alive = state.scores > -jnp.inf
    failed = jnp.any(alive & ~jnp.isfinite(normalizer), axis=1) & ~state.ended
    ended = state.ended | failed

    allowed = logits - normalizer[..., None]
    allowed = apply_rules(allowed, state.sequences, step, rules)
    num_candidates = (1 + len(rules.eos_ids)) * count
    totals, parents, tokens = _best_continuations(state.scores, allowed, num_candidates, top_k)
    if rules.early_stopping == "shrinking":
        room = count - jnp.sum(state.finished.scores > -jnp.inf, axis=1)
        totals = jnp.where(jnp.arange(num_candidates) < room[:, None], totals, -jnp.inf)
    sequences = jnp.take_along_axis(state.sequences, parents[..., None], axis=1)
    sequences = with_tokens(sequences, step, tokens)

    free = step >= rules.prefix_lengths  # EOS in a prefix ends nothing
    at_limit = step + 1 >= rules.limits
    ends = (is_end(tokens, rules) & free[:, None]) | at_limit[:, None]
    counted = step + 1 - rules.prefix_lengths  # [B], tokens that the penalty counts
    scores = jnp.where(ends & ~ended[:, None], totals, -jnp.inf)
    scores = scores / length_divisor(counted, rules)[:, None]
    lengths = jnp.broadcast_to(step[:, None] + 1, ends.shape)
    new = Hypotheses(sequences[:, :count, 1:], scores[:, :count], lengths)
    finished = _best(state.finished, new)
    scores, order = jax.lax.top_k(jnp.where(ends, -jnp.inf, totals), count)
    parents = jnp.take_along_axis(parents, order, axis=1)
    ancestors = jnp.take_along_axis(state.caches[0].ancestors, parents[..., None], axis=1)
    longest = rules.limits - rules.prefix_lengths
    done = _is_done(scores[:, 0], finished.scores[:, -1], counted, longest, rules)
    return state._replace(
        caches=tuple(cache._replace(ancestors=ancestors) for cache in state.caches),
        sequences=jnp.take_along_axis(sequences, order[..., None], axis=1),
        scores=scores,
        finished=finished,
        ended=ended | done | at_limit,
        failed_at=jnp.where(failed, step, state.failed_at),
    )


def _is_done(
    best_open: Float[Array, " B"],
    worst_kept: Float[Array, " B"],
    counted: Int32[Array, " B"],
    longest: Int32[Array, " B"],
    rules: Rules,
) -> Bool[Array, " B"]:
    """Return whether a source is done, by `GenerationConfig.early_stopping`."""
    if rules.early_stopping == "shrinking":
        return best_open == -jnp.inf
    if rules.early_stopping is True:
        return (worst_kept > -jnp.inf) | (best_open == -jnp.inf)
    if rules.early_stopping is False:
        return best_open / length_divisor(counted, rules) <= worst_kept
    # Log-probabilities only fall, so the best score that an open hypothesis can still reach is its
    # present sum at the most favourable length. The penalty is monotonic in the length, so that is
    # the shortest or the longest.
    shortest = jnp.minimum(counted + 1, longest)
    lengths = jnp.stack([shortest, longest])
    return jnp.max(best_open / length_divisor(lengths, rules), axis=0) <= worst_kept


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
