"""Parts that greedy search and beam search share: result, length penalty, scores of a step.

Letters in shapes: B batch, N hypotheses of a source, K returned hypotheses, L target positions,
V target vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.cache import Cache
from jax_transformer.decoding.rules import Rules

SMALLEST_BATCH = 8  # that a larger batch is followed by

State = TypeVar("State", bound=Any)
# Tokens to the logits of each model of an ensemble.
Step = Callable[[Cache, Int32[Array, "B N"]], tuple[list[Float[Array, "B N V"]], Cache]]


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


@struct.dataclass
class LengthPenalty:
    """The divisor of the score of n tokens after the prefix: ((5 + n) / 6)**alpha, or n**alpha."""

    alpha: Float32[Array | np.ndarray, ""]
    normalization: Literal["gnmt", "power"] = struct.field(pytree_node=False)

    def __call__(self, length: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """Return the divisor for `length` tokens, EOS included and the prefix not."""
        length = jnp.maximum(length, 1)  # inside the prefix, where the divisor divides 0
        base = (5 + length) / 6 if self.normalization == "gnmt" else length
        return jnp.power(jnp.asarray(base, jnp.float32), self.alpha)


def start_sequences(
    cache: Cache, config: TransformerConfig, rules: Rules
) -> tuple[Int32[Array, "B N _"], Float[Array, "B N"]]:
    """Return sequences that hold the start token and room for L tokens, and their scores of 0."""
    batch, count, length = cache.ancestors.shape
    sequences = jnp.full((batch, count, length + 1), config.pad_id, jnp.int32)
    dtype = jnp.promote_types(jax.tree.leaves(cache.layers)[0].dtype, jnp.float32)
    start = jnp.asarray(rules.start)[:, None]
    return sequences.at[..., 0].set(start), jnp.zeros((batch, count), dtype)


def batch_sizes(batch: int) -> list[int]:
    """Return the numbers of sources of the batches of a search, for `extend_all`.

    Each size is a loop that is compiled. With a half and an eighth, the lines of Multi30k have
    1.14 to 1.21 times the rows and steps that they need, and 1.6 to 1.8 times in one batch.
    """
    if is_symbolic_dim(batch):
        return [batch]
    smaller = (batch // share for share in (2, 8))
    return [batch, *(size for size in smaller if size >= SMALLEST_BATCH)]


def extend_all(
    extend: Callable[[State, Rules], State],
    state: State,
    rules: Rules,
    batch_sizes: Sequence[int],
) -> State:
    """Return the state in which the target of each source has ended.

    The sources that go on leave the batch for a smaller one when it can hold them.

    Args:
        extend: One step of the search.
        state: A pytree with the fields `step`, `sequences` and `ended`; each of its leaves has a
            row for each source, or is one for all.
        batch_sizes: Numbers of sources: of the state, and of the smaller batches.
    """
    size, *smaller = batch_sizes
    most_left = smaller[0] if smaller else 0

    def goes_on(state: State) -> Bool[Array, ""]:
        full = state.step + 1 >= state.sequences.shape[-1]
        return ~full & (jnp.sum(~state.ended) > most_left)

    state = jax.lax.while_loop(goes_on, lambda state: extend(state, rules), state)
    if not smaller:
        return state
    rows = jnp.argsort(state.ended, stable=True)[:most_left]  # those that go on are the first

    def has_rows(leaf: Array) -> bool:
        return leaf.ndim > 0 and leaf.shape[0] == size

    part = jax.tree.map(lambda leaf: leaf[rows] if has_rows(leaf) else leaf, state)
    part = extend_all(extend, part, rules.of_rows(rows), smaller)
    return jax.tree.map(
        lambda leaf, new: leaf.at[rows].set(new) if has_rows(leaf) else new, state, part
    )


def next_logits(
    advance: Step, cache: Cache, sequences: Int32[Array, "B N _"], step: Int32[Array, ""]
) -> tuple[Float[Array, "B N V"], Float[Array, "B N"], Cache]:
    """Return the logits of the next token, their log-normalizer, and the cache.

    Several models have the mean of their log-probabilities in the place of logits, and the
    log-normalizer 0. A log-normalizer is not finite where a logit of a model is NaN or infinite.
    """
    tokens = jax.lax.dynamic_index_in_dim(sequences, step, axis=2, keepdims=False)
    of_models, cache = advance(cache, tokens)
    wide = [logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) for logits in of_models]
    normalizers = [_log_normalizer(logits) for logits in wide]
    if len(wide) == 1:
        return wide[0], normalizers[0], cache
    total = sum(wide) - sum(normalizers)[..., None]
    return total / len(wide), 0 * sum(normalizers), cache


def _log_normalizer(logits: Float[Array, "B N V"]) -> Float[Array, "B N"]:
    """Return log(sum(exp(logits)))."""
    largest = jnp.max(logits, axis=-1)
    return largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
