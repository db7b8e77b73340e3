"""The blocks of the model: thin Flax shells that hold parameters and call `functional`.

Dropout is active exactly where `apply` is given a "dropout" random stream.
Letters in shapes: B batch, T queries, S keys, L length, D d_model, H heads, K head_dim, V vocab.
"""

import hashlib
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np
from flax.core.scope import LazyRng
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_transformer import functional, initialization
from jax_transformer.config import TransformerConfig
from jax_transformer.dropout import dropout
from jax_transformer.runtime.sharding import constrain


class Linear(nn.Module):
    """A product with a kernel (inputs, outputs), plus a bias.

    Attributes:
        config: Names the initialization.
        features: Outputs.
        use_bias: Whether a bias is added.
        attention: Whether this is one of attention's projections.
        fused: Kernels that torch.nn.MultiheadAttention keeps as one with this.
    """

    config: TransformerConfig
    features: int
    use_bias: bool
    attention: bool = False
    fused: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Return the product."""
        inputs = x.shape[-1]
        draw = initialization.kernel(self.config, inputs, self.features, self.fused)
        kernel = self.param("kernel", draw, (inputs, self.features))
        bias = None
        if self.use_bias:
            draw = initialization.bias(self.config, inputs, self.attention)
            bias = self.param("bias", draw, (self.features,))
        return functional.linear(x, kernel, bias)


class Norm(nn.Module):
    """The norm that the config names, over the last axis."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Return the normed rows."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = None
        if self.config.norm_bias:
            bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        norm = functional.layer_norm if self.config.norm == "layer_norm" else functional.std_norm
        return norm(x, scale, bias, self.config.norm_epsilon)


class Dropout(nn.Module):
    """Dropout at `rate` where the call has a "dropout" random stream, else the identity."""

    rate: float

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return `x` with elements dropped."""
        if not self.has_rng("dropout"):
            return x
        return dropout(x, self.rate, self._key())

    def _key(self) -> PRNGKeyArray:
        """Return the key of this call: that of the stream, xor a digest of the call's place.

        `make_rng` folds such a digest in by threefry, which XLA compiles anew at each place: a
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
    vocab_size: int

    def setup(self) -> None:
        """Declare the table [V, D]."""
        shape = (self.vocab_size, self.config.d_model)
        self.embedding = self.param("embedding", initialization.embedding(self.config), shape)

    def __call__(self, ids: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        """Return the scaled rows of `ids`."""
        # Whole rows on each device: of parts of them XLA would make whole ones after the look-up.
        x = functional.embed(ids, constrain(self.embedding, "tensor"))
        if self.config.embedding_scale == "sqrt_d_model":
            x = x * self.config.d_model**0.5
        return x


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2) with full or shared head projections."""

    config: TransformerConfig

    def setup(self) -> None:
        """Declare the projections, named as in the torch reference."""
        config = self.config
        shared = config.head_projection == "shared"
        width = config.head_dim if shared else config.d_model
        self.query, self.key, self.value = (
            Linear(config, width, config.qkv_bias, attention=True, fused=3) for _ in range(3)
        )
        self.output = Linear(config, config.d_model, config.attention_output_bias, attention=True)
        self.dropout = Dropout(config.attention_dropout_rate)

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S D"],
        value: Float[Array, "B S D"],
        mask: Bool[Array, "#B #H #T #S"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return what each query gathers from the values it may attend to.

        Args:
            query: Vectors that attend [B, T, D].
            key: Vectors that are compared with the queries [B, S, D].
            value: Vectors that are gathered [B, S, D].
            mask: True = attend, broadcastable to [B, H, T, S]; None attends to everything.
        """
        # The weights are there for a dropout that acts, or for whoever looks at what it is given.
        dropped = self.dropout.rate > 0 and self.has_rng("dropout")
        weights_wanted = dropped or self.is_mutable_collection("intermediates")
        heads = functional.dot_product_attention(
            self.project_queries(query),
            self.project_keys(key),
            self.project_values(value),
            mask,
            self.dropout if weights_wanted else None,
        )
        return self.output(functional.merge_heads(heads))

    def attend_to_cache(
        self,
        queries: Float[Array, "B H T K"],
        keys: Float[Array, "B H K S"],
        values: Float[Array, "B H S K"],
        mask: Bool[Array, "#B #H #T #S"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return what queries gather from keys and values, all of them projected already.

        Args:
            queries: Projected queries [B, H, T, K].
            keys: Projected keys, in columns [B, H, K, S], finite everywhere.
            values: Projected values [B, H, S, K], finite everywhere.
            mask: True = attend, broadcastable to [B, H, T, S]; None attends to everything.
        """
        heads = functional.cached_attention(queries, keys, values, mask)
        return self.output(functional.merge_heads(heads))

    def project_queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B H T K"]:
        """Return the queries of vectors that attend, split into heads."""
        return self._project(self.query, x)

    def project_keys(self, x: Float[Array, "B S D"]) -> Float[Array, "B H S K"]:
        """Return the keys of vectors, split into heads."""
        return self._project(self.key, x)

    def project_values(self, x: Float[Array, "B S D"]) -> Float[Array, "B H S K"]:
        """Return the values of vectors, split into heads."""
        return self._project(self.value, x)

    def _project(self, projection: Linear, x: Float[Array, "B L D"]) -> Float[Array, "B H L K"]:
        if self.config.head_projection == "shared":
            return projection(functional.split_heads(x, self.config.num_heads))
        return functional.split_heads(projection(x), self.config.num_heads)


class FeedForward(nn.Module):
    """The position-wise feed-forward network (section 3.3)."""

    config: TransformerConfig

    def setup(self) -> None:
        """Declare the two projections."""
        config = self.config
        self.inner = Linear(config, config.d_ff, config.feed_forward_bias)
        self.dropout = Dropout(config.activation_dropout_rate)
        self.outer = Linear(config, config.d_model, config.feed_forward_bias)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Return the network's output at each position."""
        x = functional.activation(self.inner(x), self.config.activation)
        return self.outer(self.dropout(x))


class Residual(nn.Module):
    """A norm, a dropout and an addition around a sublayer, in the order the config names."""

    config: TransformerConfig

    def setup(self) -> None:
        """Declare the norm."""
        self.norm = Norm(self.config)
        self.dropout = Dropout(self.config.dropout)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        sublayer: Callable[[Float[Array, "B L D"]], Float[Array, "B L D"]],
    ) -> Float[Array, "B L D"]:
        """Return the residual stream after the sublayer.

        Args:
            x: What the sublayer's output is added to.
            sublayer: A function of `x`, normed first where norms are placed "pre".
        """
        if self.config.norm_placement == "pre":
            return x + self.dropout(sublayer(self.norm(x)))
        if self.config.dropout_placement == "norm":
            return self.dropout(self.norm(x + sublayer(x)))
        return self.norm(x + self.dropout(sublayer(x)))


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network (section 3.1)."""

    config: TransformerConfig

    def setup(self) -> None:
        """Declare the sublayers."""
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward = FeedForward(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "#B #H #S #S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Return the layer's output; `mask` says who attends to whom."""
        x = self.self_attention_residual(x, lambda x: self.self_attention(x, x, x, mask))
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the memory and a feed-forward network (section 3.1)."""

    config: TransformerConfig

    def setup(self) -> None:
        """Declare the sublayers."""
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_residual = Residual(self.config)
        self.cross_attention = MultiHeadAttention(self.config)
        self.cross_attention_residual = Residual(self.config)
        if self.config.memory_norm:
            self.memory_norm = Norm(self.config)
        self.feed_forward = FeedForward(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        tgt_mask: Bool[Array, "#B #H #T #T"] | None = None,
        src_mask: Bool[Array, "#B #H #T #S"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the layer's output.

        Args:
            x: Target stream [B, T, D].
            memory: Encoder output [B, S, D].
            tgt_mask: Who of the target attends to whom of the target.
            src_mask: Who of the target attends to whom of the memory.
        """
        if self.config.decoder_attention == "self_over_memory":
            x = self._attend_over_memory(x, memory, tgt_mask, src_mask)
        else:
            x = self.self_attention_residual(x, lambda x: self.self_attention(x, x, x, tgt_mask))
            if self.config.memory_norm:
                memory = self.memory_norm(memory)
            x = self.cross_attention_residual(
                x, lambda x: self.cross_attention(x, memory, memory, src_mask)
            )
        return self.feed_forward_residual(x, self.feed_forward)

    def _attend_over_memory(
        self,
        x: Float[Array, "B L D"],
        memory: Float[Array, "B L D"],
        tgt_mask: Bool[Array, "#B #H #L #L"] | None,
        src_mask: Bool[Array, "#B #H #L #L"] | None,
    ) -> Float[Array, "B L D"]:
        value = self.self_attention_residual(
            memory, lambda memory: self.self_attention(memory, memory, memory, tgt_mask)
        )
        return self.cross_attention_residual(
            value, lambda value: self.cross_attention(x, memory, value, src_mask)
        )


class OutputProjection(nn.Module):
    """The product that turns hidden states into logits, with an own or a tied matrix."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], table: Float[Array, "V D"] | None
    ) -> Float[Array, "B T V"]:
        """Return the logits; `table` is the embedding that a tied projection reuses."""
        config = self.config
        shape = (config.d_model, config.tgt_vocab_size)
        if config.output_projection == "tied":
            kernel = table.T
        else:
            kernel = self.param("kernel", initialization.kernel(config, *shape), shape)
        bias = None
        if config.output_bias:
            draw = initialization.bias(config, config.d_model)
            bias = self.param("bias", draw, (config.tgt_vocab_size,))
        return functional.linear(x, kernel, bias)
