"""Greedy search and sampling: the one next token of each target.

Letters in shapes: B batch, L target positions, V target vocabulary.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_transformer.decoding.hypotheses import Hypotheses, State, with_tokens
from jax_transformer.decoding.rules import Rules, apply_rules, forced_tokens, is_end
from jax_transformer.decoding.sampling import sample
from jax_transformer.kernels.execution import Argmax

BLOCK = 256  # ids whose largest score is compared first


def extend_by_token(
    state: State,
    logits: Float[Array, "B 1 V"],
    normalizer: Float[Array, "B 1"],
    rules: Rules,
    pad_id: int,
    argmax: Argmax,
) -> State:
    """Extend each target by its most likely next token, or by a drawn one.

    The lowest id wins a tie. The only target of a source is its finished one, whose score is not
    yet divided by the length penalty.
    """
    step, running = state.step, ~state.ended
    allowed = apply_rules(logits, state.sequences, step, rules)[:, 0]
    logits, normalizer = logits[:, 0], normalizer[:, 0]
    if rules.key is not None:
        token = sample(allowed, step, rules.key, rules.temperature, rules.top_k, rules.top_p)
    elif argmax == "at_once":
        token = jnp.argmax(allowed, axis=1).astype(jnp.int32)
    else:
        token = likeliest(allowed)
    score = _score(logits, normalizer, allowed, token, step, rules)
    failed = running & ~jnp.isfinite(normalizer)
    token = jnp.where(running & ~failed, token, pad_id)
    is_free = step >= rules.prefix_lengths  # EOS in a prefix ends nothing
    ends = failed | (is_end(token, rules) & is_free) | (step + 1 >= rules.limits)
    sequences = with_tokens(state.sequences, step, token[:, None])
    scores = state.scores + jnp.where(running, score, 0)[:, None]
    lengths = state.finished.lengths + running[:, None]
    return state._replace(
        sequences=sequences,
        scores=scores,
        finished=Hypotheses(sequences[..., 1:], scores, lengths),
        ended=state.ended | ends,
        failed_at=jnp.where(failed, step, state.failed_at),
    )


def _score(
    logits: Float[Array, "B V"],
    normalizer: Float[Array, " B"],
    allowed: Float[Array, "B V"],
    token: Int32[Array, " B"],
    step: Int32[Array, " B"],
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


def likeliest(scores: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """Return the id of the largest score of each row; the lowest id wins a tie.

    First the block of ids is chosen that has the largest score, then the id in it. XLA has no
    vector code for a long `jnp.argmax` on a CPU. No score is compared with the largest one for
    equality: XLA may compute both, with other roundings, and then nothing is equal.
    """
    count = scores.shape[1]
    width = min(BLOCK, count)
    whole = count - count % width  # ids in whole blocks; the last block is shorter
    blocks = scores[:, :whole].reshape(scores.shape[0], count // width, width)
    best = jnp.max(blocks, axis=2)
    if whole < count:
        best = jnp.append(best, jnp.max(scores[:, whole:], axis=1, keepdims=True), axis=1)
    begins = jnp.minimum(jnp.argmax(best, axis=1) * width, count - width)
    ids = begins[:, None] + jnp.arange(width)
    chosen = jnp.argmax(jnp.take_along_axis(scores, ids, axis=1), axis=1, keepdims=True)
    return jnp.take_along_axis(ids, chosen, axis=1)[:, 0].astype(jnp.int32)
