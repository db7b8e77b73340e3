"""The decoder layer of `decoder_attention="ssru_then_cross"`: a recurrence, not a self-attention.

It is the Simpler Simple Recurrent Unit, SSRU, of Marian's small models (Kim et al. 2019, "From
Research to Production and Back: Ludicrously Fast Neural Machine Translation", section 3.1). The
twin in PyTorch is `torch_reference.ssru`.

Letters in shapes: B batch, N hypotheses, T targets, S source length, D d_model, M the memory's.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.cached_attention import RecurrenceCache
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, CacheLayout, Execution
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask, band_mask
from jax_transformer.model.layers import AttentionContext, DecoderLayer, Linear, Residual
from jax_transformer.runtime.sharding import shard_rows

Steps = tuple[Float[Array, "*shape"], Float[Array, "*shape"]]  # factors of states, and summands


class SSRU(nn.Module):
    """A recurrence whose state c forgets by a gate f that reads the input x alone.

    f(t) = sigmoid(x(t) Wf + bf), and c(t) = f(t) c(t-1) + (1 - f(t)) x(t) W; the output is relu(c).
    """

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the products with W and Wf."""
        self.input = Linear(self.config, self.execution)
        self.forget = Linear(self.config, self.execution)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Bool[Array, "#B 1 #T #T"] | SegmentMask | None,
        before: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the state at each position, in at least float32.

        Args:
            mask: The state begins at 0 where a position may not attend to the one before it.
            before: The states that the vectors continue, each its own, in place of a mask.
        """
        wide, length = jnp.promote_types(x.dtype, jnp.float32), x.shape[1]
        forget = jax.nn.sigmoid(self.forget(x).astype(wide))
        added = (1 - forget) * self.input(x).astype(wide)
        if before is not None:
            return forget * before + added
        mask, earlier = as_boolean_mask(mask, length, length), band_mask(length, length, (1, -1))
        continues = jnp.any(earlier if mask is None else mask & earlier, axis=(1, 3))
        return states(jnp.where(continues[..., None], forget, 0), added)


class SSRULayer(DecoderLayer):
    """An SSRU, attention to the memory and a feed-forward network."""

    def setup(self) -> None:
        """Declare the sublayers."""
        super().setup()
        self.recurrence = SSRU(self.config, self.execution)
        placement = self.config.norm_placement_of("decoder")
        self.recurrence_residual = Residual(self.config, placement, self.execution)

    def read_targets(
        self, x: Float[Array, "B T D"], context: AttentionContext, cache: RecurrenceCache | None
    ) -> tuple[Float[Array, "B T D"], RecurrenceCache | None]:
        """Return the residual stream after the recurrence, and the cache with `x` written."""
        y = self.recurrence_residual.sublayer_input(x)
        if cache is not None:
            cache = self.write_step(y, cache, context)
        state = self.recurrence(y, context.mask) if cache is None else cache.state
        return self.recurrence_residual(x, jax.nn.relu(state).astype(x.dtype)), cache

    def init_cache(
        self, memory: Float[Array, "B S M"], hypotheses: int, slots: int, layout: CacheLayout
    ) -> RecurrenceCache:
        """Return the cache before the first token: the memory projected, and states of 0."""
        memory = self.cross_attention_input(memory)
        state = jnp.zeros((memory.shape[0], hypotheses, self.config.d_model), jnp.float32)
        return RecurrenceCache(self.cross_attention.keys_and_values(memory, layout), state)

    def write_step(
        self, y: Float[Array, "B N D"], cache: RecurrenceCache, context: AttentionContext
    ) -> RecurrenceCache:
        """Return the cache with the states after a step.

        Each hypothesis continues the state of the one whose slot of the column before its mask
        shows. Where a row begins, it shows none: the state before is 0.
        """
        hypotheses, slots = context.mask.shape[2:]
        length = slots // hypotheses
        start = (context.position.column - 1) % length * hypotheses
        parents = jax.lax.dynamic_slice_in_dim(context.mask[:, 0], start, hypotheses, axis=2)
        before = jnp.sum(jnp.where(parents[..., None], cache.state[:, None], 0), axis=2)
        new = self.recurrence(y, None, before).astype(cache.state.dtype)
        fits = (context.position.rows < length)[:, None, None]
        # Without this, XLA mixes up the rows of a state on a mesh that splits rows by two axes.
        return cache._replace(state=shard_rows(jnp.where(fits, new, cache.state)))


def states(forget: Float[Array, "B T D"], added: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return all states c(t) = forget(t) c(t-1) + added(t), from 0 on."""

    def joined(earlier: Steps, later: Steps) -> Steps:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    def step(before: Steps, this: Steps) -> tuple[Steps, Float[Array, "B D"]]:
        after = joined(before, this)
        return after, after[1]

    if not is_symbolic_dim(forget.shape[1]):
        return jax.lax.associative_scan(joined, (forget, added), axis=1)[1]
    # A program for any length (`jax.export`) computes one state after the other.
    forget, added = forget.swapaxes(0, 1), added.swapaxes(0, 1)
    nothing = jnp.zeros_like(added[0])
    return jax.lax.scan(step, (nothing, nothing), (forget, added))[1].swapaxes(0, 1)
