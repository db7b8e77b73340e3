"""Greedy search and sampling: one target for each source, in one loop.

Letters in shapes: B batch, L target positions, V target vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.cache import Cache
from jax_transformer.decoding.hypotheses import (
    Hypotheses,
    LengthPenalty,
    Step,
    extend_all,
    next_logits,
    start_sequences,
)
from jax_transformer.decoding.rules import Rules, apply_rules, forced_tokens, is_end
from jax_transformer.decoding.sampling import Sampling, sample


class _State(NamedTuple):
    step: Int32[Array, ""]
    cache: Cache
    sequences: Int32[Array, "B 1 _"]
    scores: Float[Array, " B"]
    lengths: Int32[Array, " B"]
    ended: Bool[Array, " B"]
    failed_at: Int32[Array, " B"]


def greedy_search(
    advance: Step,
    cache: Cache,
    config: TransformerConfig,
    rules: Rules,
    sampling: Sampling | None,
    length_penalty: LengthPenalty,
    batch_sizes: Sequence[int],
) -> tuple[Hypotheses, Int32[Array, " B"]]:
    """Extend each target by its most likely next token, or by a drawn token, until all have ended.

    Without `sampling`, the lowest id wins a tie. Returns the targets (K = 1), and the step at which
    a source's logits were not finite, or -1.
    """
    batch = cache.ancestors.shape[0]

    def extend(state: _State, rules: Rules) -> _State:
        step, running = state.step, ~state.ended
        logits, normalizer, cache = next_logits(advance, state.cache, state.sequences, step)
        logits, normalizer = logits[:, 0], normalizer[:, 0]
        allowed = apply_rules(logits[:, None], state.sequences, step, rules)[:, 0]
        token = _likeliest(allowed) if sampling is None else sample(allowed, step, sampling)
        score = _score(logits, normalizer, allowed, token, step, rules)
        failed = running & ~jnp.isfinite(normalizer)
        token = jnp.where(running & ~failed, token, config.pad_id)
        is_eos, is_free = is_end(token, rules), step >= rules.prefix_lengths
        return _State(
            step=step + 1,
            cache=cache,
            sequences=state.sequences.at[:, 0, step + 1].set(token),
            scores=state.scores + jnp.where(running, score, 0),
            lengths=state.lengths + running,
            ended=state.ended | failed | (is_eos & is_free) | (step + 1 >= rules.limits),
            failed_at=jnp.where(failed, step, state.failed_at),
        )

    sequences, scores = start_sequences(cache, config, rules)
    end = extend_all(
        extend,
        _State(
            step=jnp.zeros((), jnp.int32),
            cache=cache,
            sequences=sequences,
            scores=scores[:, 0],
            lengths=jnp.zeros(batch, jnp.int32),
            ended=jnp.zeros(batch, bool),
            failed_at=jnp.full(batch, -1, jnp.int32),
        ),
        rules,
        batch_sizes,
    )
    divisor = length_penalty(end.lengths - rules.prefix_lengths)
    scores = jnp.where(end.failed_at < 0, end.scores / divisor, jnp.nan)
    hypotheses = Hypotheses(
        tokens=end.sequences[..., 1:],
        scores=scores[:, None].astype(jnp.float32),
        lengths=end.lengths[:, None],
    )
    return hypotheses, end.failed_at


def _score(
    logits: Float[Array, "B V"],
    normalizer: Float[Array, " B"],
    allowed: Float[Array, "B V"],
    token: Int32[Array, " B"],
    step: Int32[Array, ""],
    rules: Rules,
) -> Float[Array, " B"]:
    """Return what the chosen tokens add to the scores: log-probabilities of the unchanged model.

    A forced token adds 0. Where the rules forbid every token, the chosen token has probability 0.
    """
    chosen = token[:, None]
    changed = jnp.take_along_axis(allowed, chosen, axis=-1)[:, 0]
    if rules.renormalize:
        return changed
    score = jnp.take_along_axis(logits, chosen, axis=-1)[:, 0] - normalizer
    if (forced := forced_tokens(step, rules)) is not None:
        score = jnp.where(forced < 0, score, 0)
    return jnp.where(changed > -jnp.inf, score, -jnp.inf)


def _likeliest(scores: Float[Array, "B V"]) -> Int32[Array, " B"]:
    # XLA has no vector code for jnp.argmax on a CPU: it takes 18 times as long as this.
    ids = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    best = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(scores == best, ids, ids.size - 1), axis=-1)
