"""The rules of a search on its tokens, as the values that the compiled loops read.

Letters in shapes: B batch, P prefix, E ids of EOS, V target vocabulary, S source length.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

WILDCARD = -1  # fills shorter banned sequences on the left


@struct.dataclass
class Rules:
    """The rules of one search; a rule that is None is off and costs nothing.

    Positions count the tokens of a target, from 0; the start token is not one of them.

    Attributes:
        start: First decoder input of each row [B].
        eos_ids: Tokens that end a target [E].
        prefix_lengths: Number of prefix tokens of each row [B].
        limits: Largest number of tokens of each row's target, the prefix included [B].
        banned: True = the token is never chosen [V].
        prefix: Tokens that each target begins with [B, P]; only the first `prefix_lengths` count.
        forced_first: Token at position 0 of a row without prefix.
        forced_last: Token at the last position that `limits` allows.
        begin_suppressed: True = the token is not chosen at the first free position [V].
        min_new_tokens: Number of tokens after the prefix before a target may end.
        repetition_penalty: Factor by which the score of a token falls after its first use.
        banned_sequences: Sequences that are never completed, one in each row, filled on the left
            with `WILDCARD`.
        source: Source ids [B, S] for `encoder_no_repeat_ngram_size`. Padding is replaced by
            `tgt_vocab_size`, which equals no token.
        no_repeat_ngram_size: Length n: no sequence of n tokens occurs twice in a target.
        encoder_no_repeat_ngram_size: Length n: no sequence of n tokens of the source occurs in
            the target.
        renormalize: Whether the scores of the allowed tokens become log-probabilities again.
    """

    start: Int32[Array | np.ndarray, " B"]
    eos_ids: Int32[Array | np.ndarray, " E"]
    prefix_lengths: Int32[Array | np.ndarray, " B"]
    limits: Int32[Array | np.ndarray, " B"]
    banned: Bool[Array | np.ndarray, " V"]
    prefix: Int32[Array | np.ndarray, "B P"] | None = None
    forced_first: Int32[Array | np.ndarray, ""] | None = None
    forced_last: Int32[Array | np.ndarray, ""] | None = None
    begin_suppressed: Bool[Array | np.ndarray, " V"] | None = None
    min_new_tokens: Int32[Array | np.ndarray, ""] | None = None
    repetition_penalty: Float[Array | np.ndarray, ""] | None = None
    banned_sequences: Int32[Array | np.ndarray, "sequences longest"] | None = None
    source: Int32[Array | np.ndarray, "B S"] | None = None
    no_repeat_ngram_size: int | None = struct.field(pytree_node=False, default=None)
    encoder_no_repeat_ngram_size: int | None = struct.field(pytree_node=False, default=None)
    renormalize: bool = struct.field(pytree_node=False, default=False)


def is_end(tokens: Int32[Array, "*shape"], rules: Rules) -> Bool[Array, "*shape"]:
    """Return which tokens are EOS."""
    return jnp.any(tokens[..., None] == rules.eos_ids, axis=-1)


def forced_tokens(step: Int32[Array, ""], rules: Rules) -> Int32[Array, " B"] | None:
    """Return the next token of each row where it is given, and -1 where the search chooses.

    Returns None if no rule forces a token.
    """
    if rules.prefix is None and rules.forced_first is None and rules.forced_last is None:
        return None
    forced = jnp.full(rules.limits.shape, -1, jnp.int32)
    if rules.forced_first is not None:
        forced = jnp.where(step == 0, rules.forced_first, forced)
    if rules.forced_last is not None:
        forced = jnp.where(step + 1 == rules.limits, rules.forced_last, forced)
    if rules.prefix is not None:  # wins over a forced first token
        column = jnp.take(rules.prefix, step, axis=1, mode="clip")
        forced = jnp.where(step < rules.prefix_lengths, column, forced)
    return forced


def first_free_position(rules: Rules) -> Int32[Array, " B"]:
    """Return the first position of each row that follows the prefix and a forced first token."""
    lengths = jnp.asarray(rules.prefix_lengths)
    return lengths if rules.forced_first is None else jnp.maximum(lengths, 1)
