"""The blocks of the model: thin Flax modules that hold parameters and call `functional`.

The classes of `torch_reference.layers` have the same names, parameters and methods; `Dropout` is
`torch.nn`'s there. Dropout is active exactly where `apply` is given a "dropout"
random stream. The cache, and the methods that use it, exist in JAX only.

Letters in shapes: B batch, T queries, S keys, L length, D d_model, M that of the memory, H heads,
G heads of keys and values, K width of a head's queries and keys, U of its values, C pairs of
rotated columns, V vocab, N hypotheses of a source, slots N times target positions.
"""

import hashlib
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.scope import LazyRng
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_transformer.config import NormPlacement, TransformerConfig
from jax_transformer.kernels.cached_attention import (
    AttentionCache,
    LayerCache,
    RecurrenceCache,
    StepPosition,
    attend_to_cache,
    cached_keys,
    cached_values,
    empty_slots,
    write_slots,
)
from jax_transformer.kernels.dropout import dropout
from jax_transformer.kernels.execution import (
    DEFAULT_EXECUTION,
    CacheLayout,
    DropoutMask,
    Execution,
    NormForm,
)
from jax_transformer.kernels.fused_attention import fused_attention
from jax_transformer.kernels.panels import Panels
from jax_transformer.kernels.products import linear, linear_by_rows, mixed_linear
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask
from jax_transformer.model import functional, tree
from jax_transformer.model.norms import norm
from jax_transformer.runtime.sharding import constrain

Rotation = tuple[Float[Array, "... C"], Float[Array, "... C"]]  # cosines and sines


class AttentionContext(NamedTuple):
    """What a self-attention reads beside its vectors.

    Attributes:
        mask: Which query attends to which key, True = attend [B, H, T, S]; in a decoding step
            which hypothesis to which slot of the cache [B, 1, N, slots]. None is all to all.
        position_bias: Bias of the scores that all layers share [1, H, T, S].
        rotation: Of queries and keys, as `rotation_of` returns it.
        position: Where a decoding step is; None where all positions are computed.
    """

    mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None
    position_bias: Float[Array, "1 H T S"] | None = None
    rotation: Rotation | None = None
    position: StepPosition | None = None


NO_CONTEXT = AttentionContext()  # all positions attend to all


def parameter(module: nn.Module, name: str) -> Float[Array | np.ndarray, "..."] | Panels | None:
    """Return a module's parameter; None where the config has none, as a bias.

    Flax's `init` makes one by its row of `tree`. Elsewhere a module reads what it is given, which
    `checks.check_params` has compared with the tree.
    """
    if not module.is_initializing():
        return module.get_variable("params", name)
    row = tree.find_parameter("/".join((*module.path, name)))
    if row is None or row.missing_fields(module.config):
        return None
    return module.param(name, lambda key: row.draw(key, module.config))


def add_adapter(
    module: nn.Module, x: Float[Array, "*batch inputs"], y: Float[Array, "*batch outputs"]
) -> Float[Array, "*batch outputs"]:
    """Return a module's product `y` of `x`, plus that of an adapter where its parameters have one.

    It is `lora_scale * (x lora_a) lora_b` (Hu et al. 2021, equation 3), with dropout on `x` as
    PEFT has it; see `adapters.lora`.
    """
    first, execution = parameter(module, "lora_a"), module.execution
    if first is None:
        return y
    second, scale = parameter(module, "lora_b"), parameter(module, "lora_scale")
    product = partial(linear, product=execution.product)
    if execution.compute_dtype is not None:
        product = mixed_linear
    x = Dropout(execution.lora_dropout, execution.dropout_mask, name="lora_dropout")(x)
    return y + (product(product(x, first), second) * scale).astype(y.dtype)


class Linear(nn.Module):
    """A product with a kernel (inputs, outputs), a bias where the config has one, an adapter."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Return the product."""
        kernel, bias = parameter(self, "kernel"), parameter(self, "bias")
        if self.execution.compute_dtype is not None:
            return add_adapter(self, x, mixed_linear(x, kernel, bias))
        return add_adapter(self, x, linear(x, kernel, bias, self.execution.product))


class Norm(nn.Module):
    """The norm that the config names, over the last axis; `form` as `Execution.norm`."""

    config: TransformerConfig
    form: NormForm = "shifted"

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Return the normed rows."""
        config, scale, bias = self.config, parameter(self, "scale"), parameter(self, "bias")
        return norm(x, scale, bias, config.norm_epsilon, config.norm, self.form)


class Dropout(nn.Module):
    """Dropout at `rate` where the call has a "dropout" random stream, else the identity."""

    rate: float
    mask: DropoutMask = "packed"

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return `x` with elements dropped."""
        return dropout(x, self.rate, self._key(), self.mask) if self.is_active() else x

    def is_active(self) -> bool:
        """Return whether a call drops elements."""
        return self.rate > 0 and self.has_rng("dropout")

    def _key(self) -> PRNGKeyArray:
        """Return the key of this call: the stream's key, xor a digest of the module's path.

        `make_rng` folds the path in by threefry, which XLA compiles once for each module: a
        seventh of the time that a training step takes to compile.
        """
        self.scope.rng_counters["dropout"] += 1
        stream = LazyRng.create(self.scope.rngs["dropout"], self.scope.rng_counters["dropout"])
        words = jax.random.key_data(stream.rng)
        digest = np.frombuffer(hashlib.sha256(repr(stream.suffix).encode()).digest(), np.uint32)
        return jax.random.wrap_key_data(
            words ^ digest[: words.shape[-1]], impl=jax.random.key_impl(stream.rng)
        )


class Embedding(nn.Module):
    """A token table, scaled as the config says (section 3.4)."""

    config: TransformerConfig

    def setup(self) -> None:
        """Read the table [V, D]."""
        self.embedding = parameter(self, "embedding")

    def __call__(self, ids: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Return the scaled rows of `ids`."""
        # Each device looks up whole rows: XLA would gather rows that are split after the look-up.
        x = functional.embed(ids, constrain(self.embedding, "tensor"))
        if self.config.embedding_scale == "sqrt_d_model":
            x = x * self.config.d_model**0.5
        return x


class PositionEmbedding(nn.Module):
    """A learned position table, whose first rows are skipped where the config has an offset."""

    config: TransformerConfig

    def setup(self) -> None:
        """Read the table [max_length + position_offset, D]."""
        self.embedding = parameter(self, "embedding")

    def __call__(self, length: int) -> Float[Array, "L D"]:
        """Return the rows of the positions 0 to length - 1."""
        offset = self.config.position_offset
        return self.embedding[offset : offset + length]


class RelativeAttentionBias(nn.Module):
    """A learned bias of the scores for each head and each bucket of distances (Raffel et al. 2020).

    Queries attend to later keys where it is bidirectional: in the encoder.
    """

    config: TransformerConfig
    bidirectional: bool

    def setup(self) -> None:
        """Read the table [buckets, H]."""
        self.embedding = parameter(self, "embedding")

    def __call__(self, queries: int, keys: int) -> Float[Array, "1 H T S"]:
        """Return the bias of each query and key; the last keys stand at the queries' positions."""
        if is_symbolic_dim(queries) or is_symbolic_dim(keys):
            return _of_symbolic_lengths(self, queries, keys)
        distances = np.arange(1 - keys, queries)
        return functional.toeplitz(self.by_distance(distances), queries)[None]

    def by_distance(self, distance: Int[np.ndarray, " distances"]) -> Float[Array, "distances H"]:
        """Return the biases of distances, each a key's position minus a query's."""
        config = self.config
        buckets = functional.relative_position_buckets(
            distance,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            self.bidirectional,
        )
        return self.embedding[buckets]


def _of_symbolic_lengths(
    bias: RelativeAttentionBias, queries: int, keys: int
) -> Float[Array, "1 H T S"]:
    """Return the bias for lengths that are not known, where numpy can name no distances."""
    # From this distance on, all distances of a side share a bucket.
    furthest = bias.config.relative_attention_max_distance
    by_distance = bias.by_distance(np.arange(-furthest, furthest + 1))
    distances = jnp.arange(keys) - (jnp.arange(queries)[:, None] + keys - queries)
    rows = by_distance[jnp.clip(distances, -furthest, furthest) + furthest]
    return jnp.moveaxis(rows, -1, 0)[None]


def with_position_bias(
    context: AttentionContext, bias: RelativeAttentionBias, length: int
) -> AttentionContext:
    """Return the context with a table's bias of `length` positions, or of one decoding step."""
    if context.position is None:
        return context._replace(position_bias=bias(length, length))
    # The slots of a step are a ring of columns, so the distances change in each step. Those of
    # columns that are not written yet are wrong, but the mask hides them.
    hypotheses, slots = context.mask.shape[2:]
    furthest = slots // hypotheses - 1
    if is_symbolic_dim(furthest):  # from this distance on, all share a bucket
        furthest = bias.config.relative_attention_max_distance
    by_distance = bias.by_distance(np.arange(-furthest, 1))
    row = furthest - context.position.distances(slots, hypotheses)
    of_slots = by_distance[jnp.clip(row, 0, furthest)]
    return context._replace(position_bias=of_slots.T[None, :, None])


def rotation_of(
    config: TransformerConfig,
    window: tuple[int, int] | None,
    length: int,
    dtype: jnp.dtype,
    positions: Int[Array, " B"] | None = None,
) -> Rotation | None:
    """Return the cosines and sines that rotate the queries and keys of a self-attention.

    Args:
        window: What the layer's queries see, as `TransformerConfig.window_of`.
        length: Number of positions, from 0.
        dtype: Of the queries; the tables are at least float32.
        positions: The one position of each row that is returned; None is all of all rows.
    """
    if config.positions != "rotary":
        return None
    theta, scaling = config.rotary_theta, config.rotary_scaling
    if window is not None and config.sliding_window_theta is not None:
        theta, scaling = config.sliding_window_theta, 1.0
    symbolic = is_symbolic_dim(length)
    rows = config.max_length if symbolic else length
    angles = functional.rotary_angles(rows, config.rotated_columns, theta, scaling)
    wide = jnp.promote_types(dtype, jnp.float32)
    tables = jnp.asarray(np.cos(angles), wide), jnp.asarray(np.sin(angles), wide)
    if positions is not None:
        return tuple(functional.embed(positions[:, None, None], table) for table in tables)
    if symbolic:
        return tuple(functional.embed(jnp.arange(length), table) for table in tables)
    return tables


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2) with full or shared head projections."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the projections, named as in the torch reference."""
        config, execution = self.config, self.execution
        self.query = Linear(config, execution)
        self.key = Linear(config, execution)
        self.value = Linear(config, execution)
        self.output = Linear(config, execution)
        if config.query_key_norm:
            self.query_norm = Norm(config, execution.norm)
            self.key_norm = Norm(config, execution.norm)
        self.dropout = Dropout(config.attention_dropout_rate, execution.dropout_mask)

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S M"] | None,
        value: Float[Array, "B S M"] | None,
        mask: Bool[Array, "#B #H #T _"] | SegmentMask | None = None,
        position_bias: Float[Array, "1 H #T _"] | None = None,
        rotation: Rotation | None = None,
        cache: AttentionCache | None = None,
    ) -> Float[Array, "B T D"]:
        """Return what each query gathers from the values that it may attend to.

        Args:
            mask: True = attend; None attends to everything.
            position_bias: Added to the scores.
            rotation: Of the queries and keys, as `rotation_of` returns it.
            cache: Keys and values that are projected already; `key` and `value` are not read.
        """
        queries, softcap = self.queries(query, rotation), self.config.attention_softcap
        if cache is not None:
            heads = attend_to_cache(
                queries, cache, mask, position_bias, self.config.attention_divisor, softcap
            )
            return self.output(functional.merge_heads(heads))
        return self.attend(
            queries, self.keys(key, rotation), self.values(value), mask, position_bias
        )

    def attend(
        self,
        queries: Float[Array, "B H T K"],
        keys: Float[Array, "B G S K"],
        values: Float[Array, "B G S U"],
        mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None,
        position_bias: Float[Array, "1 H T S"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return what projected queries gather from projected keys and values, projected."""
        config, num_queries, num_keys = self.config, queries.shape[2], keys.shape[2]
        by_segments = position_bias is None and (mask is None or isinstance(mask, SegmentMask))
        implementation = self.execution.attention_of(num_queries, num_keys, by_segments)
        if implementation == "plain":
            heads = functional.dot_product_attention(
                queries,
                keys,
                values,
                as_boolean_mask(mask, num_queries, num_keys),
                self.dropout,
                position_bias,
                config.attention_divisor,
                self.execution.exponentials,
                config.attention_softcap,
            )
        else:
            heads = fused_attention(
                implementation,
                queries,
                keys,
                values,
                mask,
                position_bias,
                config.attention_divisor,
                dropping=self.dropout.is_active(),
                softcap=config.attention_softcap,
            )
        return self.output(functional.merge_heads(heads))

    def queries(
        self, x: Float[Array, "B L D"], rotation: Rotation | None = None
    ) -> Float[Array, "B H L K"]:
        """Return the queries of vectors, normed and rotated where the config says so."""
        heads = self._project(self.query, x, self.config.num_heads)
        heads = self.query_norm(heads) if self.config.query_key_norm else heads
        return heads if rotation is None else functional.rotate(heads, rotation)

    def keys(
        self, x: Float[Array, "B L D"], rotation: Rotation | None = None
    ) -> Float[Array, "B G L K"]:
        """Return the keys of vectors, as `queries`."""
        heads = self._project(self.key, x, self.config.key_heads)
        heads = self.key_norm(heads) if self.config.query_key_norm else heads
        return heads if rotation is None else functional.rotate(heads, rotation)

    def values(self, x: Float[Array, "B L D"]) -> Float[Array, "B G L U"]:
        """Return the values of vectors."""
        return self._project(self.value, x, self.config.key_heads)

    def keys_and_values(
        self, x: Float[Array, "B L D"], layout: CacheLayout, rotation: Rotation | None = None
    ) -> AttentionCache:
        """Return the keys and values of vectors, as a cache of this layout holds them."""
        keys, values = self.keys(x, rotation), self.values(x)
        return AttentionCache(cached_keys(keys, layout), cached_values(values, layout))

    def _project(
        self, projection: Linear, x: Float[Array, "B L D"], num_heads: int
    ) -> Float[Array, "B H L K"]:
        """Return the product of vectors, split into heads."""
        if self.config.shares_heads:
            return projection(functional.split_heads(x, num_heads))
        return functional.split_heads(projection(x), num_heads)


class FeedForward(nn.Module):
    """The position-wise feed-forward network (section 3.3), gated where the config says so."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the projections."""
        config, execution = self.config, self.execution
        self.inner = Linear(config, execution)
        if config.gated_feed_forward:
            self.gate = Linear(config, execution)
        self.dropout = Dropout(config.activation_dropout_rate, execution.dropout_mask)
        self.outer = Linear(config, execution)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Return the network's output at each position."""
        kind = self.config.activation
        if self.config.gated_feed_forward:
            x = functional.activation(self.gate(x), kind) * self.inner(x)
        else:
            x = functional.activation(self.inner(x), kind)
        return self.outer(self.dropout(x))


class Residual(nn.Module):
    """A norm, a dropout and an addition around a sublayer, in the order of the placement."""

    config: TransformerConfig
    placement: NormPlacement
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the norms."""
        self.norm = Norm(self.config, self.execution.norm)
        if self.placement == "sandwich":
            self.output_norm = Norm(self.config, self.execution.norm)
        self.dropout = Dropout(self.config.dropout, self.execution.dropout_mask)

    def __call__(self, x: Float[Array, "B L D"], y: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Return the residual stream `x` after a sublayer whose output is `y`."""
        if self.placement != "post":
            return x + self.dropout(self.output_norm(y) if self.placement == "sandwich" else y)
        if self.config.dropout_placement == "norm":
            return self.dropout(self.norm(x + y))
        return self.norm(x + self.dropout(y))

    def sublayer_input(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Return what the sublayer reads: `x`, normed unless norms are placed "post"."""
        return x if self.placement == "post" else self.norm(x)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network (section 3.1)."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the sublayers."""
        config, execution = self.config, self.execution
        placement = config.norm_placement_of("encoder")
        self.self_attention = MultiHeadAttention(config, execution)
        self.self_attention_residual = Residual(config, placement, execution)
        if config.has_relative_bias_per_layer:
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional=True)
        self.feed_forward = FeedForward(config, execution)
        self.feed_forward_residual = Residual(config, placement, execution)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        context: AttentionContext = NO_CONTEXT,
    ) -> Float[Array, "B S D"]:
        """Return the layer's output."""
        if self.config.has_relative_bias_per_layer:
            context = with_position_bias(context, self.relative_attention_bias, x.shape[1])
        y = self.self_attention_residual.sublayer_input(x)
        y = self.self_attention(y, y, y, context.mask, context.position_bias, context.rotation)
        x = self.self_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y))


class DecoderLayer(nn.Module):
    """Self-attention, attention to the memory and a feed-forward network (section 3.1)."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the sublayers."""
        config, execution = self.config, self.execution
        placement = config.norm_placement_of("decoder")
        if config.decoder_attention != "ssru_then_cross":
            self.self_attention = MultiHeadAttention(config, execution)
            self.self_attention_residual = Residual(config, placement, execution)
        if config.has_relative_bias_per_layer:
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional=False)
        if config.decoder_attention != "merged":
            self.cross_attention = MultiHeadAttention(config, execution)
            self.cross_attention_residual = Residual(config, placement, execution)
        if config.memory_norm:
            self.memory_norm = Norm(config, execution.norm)
        self.feed_forward = FeedForward(config, execution)
        self.feed_forward_residual = Residual(config, placement, execution)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S M"] | None,
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None,
        cache: LayerCache | RecurrenceCache | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | RecurrenceCache | None]:
        """Return the layer's output, and the cache with the keys and values of `x` written.

        Args:
            memory: What the cross-attention reads; not read with a cache, which holds its keys
                and values.
            context: Of the self-attention.
            src_mask: Which target position attends to which position of the memory.
            cache: What the layer keeps between decoding steps, in which `x` is one position of N
                hypotheses; None where all positions are computed.
        """
        x, cache = self.read_targets(x, context, cache)
        of_memory = None if cache is None else cache.cross_attention
        memory = self.cross_attention_input(memory) if cache is None else None
        y = self.cross_attention_residual.sublayer_input(x)
        y = self.cross_attention(y, memory, memory, src_mask, cache=of_memory)
        x = self.cross_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y)), cache

    def read_targets(
        self, x: Float[Array, "B T D"], context: AttentionContext, cache: LayerCache | None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Return the residual stream after the self-attention, and the cache with `x` written."""
        if self.config.has_relative_bias_per_layer:
            context = with_position_bias(context, self.relative_attention_bias, x.shape[1])
        y, of_targets = self.self_attention_residual.sublayer_input(x), None
        if cache is not None:
            cache = self.write_step(y, cache, context)
            of_targets = cache.self_attention
        mask, position_bias, rotation, _ = context
        y = self.self_attention(y, y, y, mask, position_bias, rotation, of_targets)
        return self.self_attention_residual(x, y), cache

    def cross_attention_input(self, memory: Float[Array, "B S M"]) -> Float[Array, "B S M"]:
        """Return what the cross-attention reads: the memory, normed where the config says so."""
        return self.memory_norm(memory) if self.config.memory_norm else memory

    def init_cache(
        self, memory: Float[Array, "B S M"], hypotheses: int, slots: int, layout: CacheLayout
    ) -> LayerCache:
        """Return the cache before the first token: the memory projected, no slot written."""
        memory = self.cross_attention_input(memory)
        of_memory = self.cross_attention.keys_and_values(memory, layout)
        return LayerCache(empty_slots(of_memory, slots), of_memory)

    def write_step(
        self, y: Float[Array, "B N D"], cache: LayerCache, context: AttentionContext
    ) -> LayerCache:
        """Return the cache with the self-attention's keys and values of a step written."""
        attention, (hypotheses, slots) = self.self_attention, context.mask.shape[2:]
        targets = cache.self_attention
        new = attention.keys_and_values(y, targets.layout, context.rotation)
        first = targets.length - slots  # a merged attention keeps the memory before the slots
        start = first + context.position.column * hypotheses
        fits = context.position.rows < slots // hypotheses
        return cache._replace(self_attention=write_slots(targets, new, start, fits))


class OutputProjection(nn.Module):
    """The product that turns hidden states into logits, with an own or a tied matrix."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], table: Float[Array, "V D"] | None
    ) -> Float[Array, "B T V"]:
        """Return the logits; `table` is the embedding that a tied projection reuses."""
        kernel, bias = parameter(self, "kernel"), parameter(self, "bias")
        tied = kernel is None
        kernel = table if tied else kernel
        if self.execution.compute_dtype is not None:
            return add_adapter(self, x, mixed_linear(x, kernel, bias, by_rows=tied))
        if tied and self.execution.product == "wide_sums":
            return linear_by_rows(x, kernel, bias)
        y = linear(x, kernel.T if tied else kernel, bias, self.execution.product)
        return add_adapter(self, x, y)


class ClassificationHead(nn.Module):
    """The products that turn hidden states into scores of labels."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the products."""
        if self.config.head == "sequence":
            self.dense = Linear(self.config, self.execution)
        self.dropout = Dropout(self.config.head_dropout, self.execution.dropout_mask)
        self.output = Linear(self.config, self.execution)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch labels"]:
        """Return the scores."""
        x = self.dropout(x)
        if self.config.head == "sequence":
            x = self.dropout(jnp.tanh(self.dense(x)))
        return self.output(x)
