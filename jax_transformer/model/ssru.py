"""The decoder layer of `decoder_attention="ssru_then_cross"`: a recurrence, not a self-attention.

It is the Simpler Simple Recurrent Unit, SSRU, of Marian's small models (Kim et al. 2019, "From
Research to Production and Back: Ludicrously Fast Neural Machine Translation", section 3.1). A
decoding step reads one state of each hypothesis, however long the target is. The twin in PyTorch
is `torch_reference.ssru`.

Letters in shapes: B batch, N hypotheses of a source, T targets, S source length, D d_model, M that
of the memory, H heads, slots N times target positions.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.cached_attention import AttentionCache
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, CacheLayout, Execution
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask, band_mask
from jax_transformer.model.layers import (
    NO_CONTEXT,
    AttentionContext,
    DecoderLayer,
    Linear,
    Residual,
)

Steps = tuple[Float[Array, "*shape"], Float[Array, "*shape"]]  # factors of states, and summands


class RecurrenceCache(NamedTuple):
    """What the layer keeps between two decoding steps.

    Attributes:
        cross_attention: Keys and values of the memory.
        state: State of each hypothesis after the last step, in at least float32.
    """

    cross_attention: AttentionCache
    state: Float[Array, "B N D"]


class SSRU(nn.Module):
    """A recurrence whose state forgets by a gate that reads the input alone.

    With f(t) = sigmoid(x(t) Wf + bf), the state is c(t) = f(t) c(t-1) + (1 - f(t)) x(t) W, and the
    output is relu(c(t)). States are in at least float32.
    """

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the products with W and Wf."""
        self.input = Linear(self.config, self.execution)
        self.forget = Linear(self.config, self.execution)

    def __call__(
        self, x: Float[Array, "B T D"], continues: Bool[Array, "#B T"]
    ) -> Float[Array, "B T D"]:
        """Return the outputs of all positions.

        Args:
            continues: Which positions continue the state of the one before; the others begin at 0.
        """
        forget, added = self.gates(x)
        forget = jnp.where(continues[..., None], forget, 0)
        return jax.nn.relu(states(forget, added)).astype(x.dtype)

    def gates(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Return what a state is multiplied by at each position, and what is added to it."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        forget = jax.nn.sigmoid(self.forget(x).astype(wide))
        return forget, (1 - forget) * self.input(x).astype(wide)


class SSRULayer(DecoderLayer):
    """An SSRU, attention to the memory and a feed-forward network."""

    def setup(self) -> None:
        """Declare the sublayers."""
        super().setup()
        self.recurrence = SSRU(self.config, self.execution)
        placement = self.config.norm_placement_of("decoder")
        self.recurrence_residual = Residual(self.config, placement, self.execution)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S M"] | None,
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None,
        cache: RecurrenceCache | None = None,
    ) -> tuple[Float[Array, "B T D"], RecurrenceCache | None]:
        """Return the layer's output and its cache; arguments as `DecoderLayer`.

        Of the context only the mask is read: see `continued` and `continued_states`.
        """
        y = self.recurrence_residual.sublayer_input(x)
        of_memory = None
        if cache is None:
            memory = self.cross_attention_input(memory)
            y = self.recurrence(y, continued(context.mask, x.shape[1]))
        else:
            cache = self.write_step(y, cache, context)
            of_memory = cache.cross_attention
            y = jax.nn.relu(cache.state).astype(x.dtype)
        x = self.recurrence_residual(x, y)
        return self.after_targets(x, memory, src_mask, of_memory), cache

    def init_cache(
        self, memory: Float[Array, "B S M"], hypotheses: int, slots: int, layout: CacheLayout
    ) -> RecurrenceCache:
        """Return the cache before the first token: the memory projected, and states of 0."""
        memory = self.cross_attention_input(memory)
        shape = memory.shape[0], hypotheses, self.config.d_model
        states = jnp.zeros(shape, jnp.promote_types(memory.dtype, jnp.float32))
        return RecurrenceCache(self.cross_attention.keys_and_values(memory, layout), states)

    def write_step(
        self, y: Float[Array, "B N D"], cache: RecurrenceCache, context: AttentionContext
    ) -> RecurrenceCache:
        """Return the cache with the states after a step."""
        hypotheses, slots = context.mask.shape[2:]
        forget, added = self.recurrence.gates(y)
        state = forget * continued_states(cache.state, context) + added
        fits = (context.position.rows < slots // hypotheses)[:, None, None]
        return cache._replace(state=jnp.where(fits, state.astype(cache.state.dtype), cache.state))


def continued(
    mask: Bool[Array, "#B #H #T #T"] | SegmentMask | None, length: int
) -> Bool[Array, "#B T"]:
    """Return which positions continue the state of the one before: those that may attend to it."""
    mask = as_boolean_mask(mask, length, length)
    before = band_mask(length, length, (1, -1))  # of a query, the key before its position alone
    return jnp.any(before if mask is None else mask & before, axis=(1, 3))


def continued_states(
    state: Float[Array, "B N D"], context: AttentionContext
) -> Float[Array, "B N D"]:
    """Return the state that each hypothesis continues in a decoding step; 0 where a row begins.

    It is that of the hypothesis whose slot of the column before the step's mask shows.
    """
    hypotheses, slots = context.mask.shape[2:]
    column = (context.position.column - 1) % (slots // hypotheses)
    start = column * hypotheses
    parents = jax.lax.dynamic_slice_in_dim(context.mask[:, 0], start, hypotheses, axis=2)
    return jnp.sum(jnp.where(parents[..., None], state[:, None], 0), axis=2)


def states(forget: Float[Array, "B T D"], added: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return all states c(t) = forget(t) c(t-1) + added(t), from c(0) = 0 on."""
    if not is_symbolic_dim(forget.shape[1]):
        return jax.lax.associative_scan(joined, (forget, added), axis=1)[1]

    def step(before: Steps, steps: Steps) -> tuple[Steps, Float[Array, "B D"]]:
        after = joined(before, steps)
        return after, after[1]

    forget, added = forget.swapaxes(0, 1), added.swapaxes(0, 1)
    nothing = jnp.zeros_like(forget[0])
    return jax.lax.scan(step, (nothing, nothing), (forget, added))[1].swapaxes(0, 1)


def joined(earlier: Steps, later: Steps) -> Steps:
    """Return two stretches of steps as one: by what it multiplies a state, and what it adds."""
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]
