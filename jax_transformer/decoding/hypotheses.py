"""What greedy search and beam search share: their state, their rules and their result.

Letters in shapes: B batch, N open hypotheses of a source, F finished hypotheses that are kept,
K returned hypotheses, L target positions, V target vocabulary.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.cache import Cache
from jax_transformer.decoding.generation_config import EarlyStopping, GenerationConfig
from jax_transformer.decoding.rules import Rules, as_array, make_rules
from jax_transformer.decoding.sampling import Keys, Sampling, make_sampling


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


@struct.dataclass
class Selection:
    """How a search selects tokens and targets: options of `GenerationConfig` as data.

    Attributes:
        sampling: How tokens are drawn; None searches.
        num_hypotheses: Number K of targets that are returned.
    """

    rules: Rules
    length_penalty: LengthPenalty
    sampling: Sampling | None
    num_hypotheses: int = struct.field(pytree_node=False)
    early_stopping: EarlyStopping = struct.field(pytree_node=False)

    def rows(self) -> dict[str, Array]:
        """Return what each source has of its own, by name; `sampling` has a key for each."""
        names = "start", "prefix_lengths", "limits", "prefix", "source"
        found = {name: getattr(self.rules, name) for name in names}
        if self.sampling is not None:
            found["key"] = self.sampling.key
        return {name: jnp.asarray(value) for name, value in found.items() if value is not None}

    def with_rows(self, rows: Mapping[str, Array]) -> "Selection":
        """Return the selection of other sources, with what `rows` returned for them."""
        rules, sampling = dict(rows), self.sampling
        if sampling is not None:
            sampling = sampling.replace(key=rules.pop("key"))
        return self.replace(rules=self.rules.replace(**rules), sampling=sampling)


def make_selection(
    options: GenerationConfig,
    config: TransformerConfig,
    src: Int32[Array | np.ndarray, "B S"],
    prefix: Integer[Array | np.ndarray, "_ P"] | None = None,
    length_limits: Integer[Array | np.ndarray, " _"] | None = None,
    key: Keys | None = None,
) -> Selection:
    """Return how a search selects; the arguments are those of `generate`, the source checked."""
    return Selection(
        make_rules(options, config, src, prefix, length_limits),
        LengthPenalty(as_array(options.length_penalty), options.length_normalization),
        make_sampling(options, key, src.shape[0]),
        options.num_hypotheses,
        # Greedy search has no use for it, and is compiled once for all its values.
        "never" if options.beam_size == 1 else options.early_stopping,
    )


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


def start_state(caches: tuple[Cache, ...], pad_id: int, selection: Selection) -> State:
    """Return the state before the first token."""
    batch, count, length = caches[0].ancestors.shape
    sequences = jnp.full((batch, count, length + 1), pad_id, jnp.int32)
    computed = jax.tree.leaves(caches[0].layers)[0].dtype
    dtype = jnp.promote_types(computed, jnp.float32)
    most_finished = selection.num_hypotheses if selection.early_stopping == "never" else count
    return State(
        step=jnp.zeros(batch, jnp.int32),
        caches=caches,
        sequences=sequences.at[..., 0].set(jnp.asarray(selection.rules.start)[:, None]),
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
