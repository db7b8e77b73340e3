"""What greedy search and beam search share: their state and their result.

Letters in shapes: B batch, N open hypotheses of a source, F finished hypotheses that are kept,
K returned hypotheses, L target positions, V target vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_transformer.decoding.cache import Cache
from jax_transformer.decoding.rules import Rules


class Hypotheses(NamedTuple):
    """The K best targets of each source of a batch, best first.

    Attributes:
        tokens: Ids without the start token [B, K, L]: the prefix, the tokens that follow it, EOS,
            then padding.
        scores: Sums of the log-probabilities of the tokens, EOS included, divided by the length
            penalty, float32 [B, K]; tokens of the prefix and forced tokens add 0. The score is -inf
            where a source has fewer than K possible targets.
        lengths: Number of tokens of each target, prefix and EOS included [B, K].
    """

    tokens: Int32[Array, "B K L"]
    scores: Float32[Array, "B K"]
    lengths: Int32[Array, "B K"]


class State(NamedTuple):
    """What a search carries from one step to the next.

    Attributes:
        step: Number of tokens that each source has so far.
        caches: Of each model.
        sequences: Open hypotheses, best first: the start token and the tokens so far.
        scores: Sums of their log-probabilities.
        finished: The F best finished hypotheses of each source, best first.
        ended: Whether a source is done.
        failed_at: The step at which the logits of a source were not finite, or -1.
    """

    step: Int32[Array, " B"]
    caches: tuple[Cache, ...]
    sequences: Int32[Array, "B N _"]
    scores: Float[Array, "B N"]
    finished: Hypotheses
    ended: Bool[Array, " B"]
    failed_at: Int32[Array, " B"]


def with_tokens(
    sequences: Int32[Array, "B N L"], step: Int32[Array, " B"], tokens: Int32[Array, "B N"]
) -> Int32[Array, "B N L"]:
    """Return sequences with the next token of each, behind `step` tokens and the start token."""
    here = jnp.arange(sequences.shape[-1]) == step[:, None, None] + 1
    return jnp.where(here, tokens[..., None], sequences)


def start_state(caches: tuple[Cache, ...], pad_id: int, rules: Rules) -> State:
    """Return the state before the first token."""
    batch, count, length = caches[0].ancestors.shape
    sequences = jnp.full((batch, count, length + 1), pad_id, jnp.int32)
    computed = jax.tree.leaves(caches[0].layers)[0].dtype
    dtype = jnp.promote_types(computed, jnp.float32)
    most_finished = rules.num_hypotheses if rules.early_stopping == "never" else count
    return State(
        step=jnp.zeros(batch, jnp.int32),
        caches=caches,
        sequences=sequences.at[..., 0].set(jnp.asarray(rules.start)[:, None]),
        # Only one hypothesis is open at first: equal hypotheses would have equal continuations.
        scores=jnp.zeros((batch, count), dtype).at[:, 1:].set(-jnp.inf),
        finished=Hypotheses(
            jnp.full((batch, most_finished, length), pad_id, jnp.int32),
            jnp.full((batch, most_finished), -jnp.inf, dtype),
            jnp.zeros((batch, most_finished), jnp.int32),
        ),
        ended=jnp.zeros(batch, bool),
        failed_at=jnp.full(batch, -1, jnp.int32),
    )
