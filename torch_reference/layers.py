"""The blocks of the model as torch modules, named as in `jax_transformer.model.layers`.

Letters in shapes: B batch, T queries, S keys, L length, D d_model, M that of the memory, H heads,
G heads of keys and values, K width of a head's queries and keys, U of its values, C pairs of
rotated columns, V vocab.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import NormPlacement, TransformerConfig
from jax_transformer.config.lengths import axis_length
from torch_reference import functional

Rotation = tuple[Float[Tensor, "L C"], Float[Tensor, "L C"]]  # cosines and sines


class AttentionContext(NamedTuple):
    """What a self-attention reads beside its vectors.

    Attributes:
        mask: Which query attends to which key, True = attend [B, H, T, S]; None is all to all.
        position_bias: Bias of the scores that all layers share [1, H, T, S].
        rotation: Of queries and keys, as `rotation_of` returns it.
    """

    mask: Bool[Tensor, "#B #H #T #S"] | None = None
    position_bias: Float[Tensor, "1 H T S"] | None = None
    rotation: Rotation | None = None


NO_CONTEXT = AttentionContext()  # all positions attend to all


class AttentionCache(NamedTuple):
    """Projected keys and values of one attention."""

    keys: Float[Tensor, "B G L K"]
    values: Float[Tensor, "B G L U"]


class LayerCache(NamedTuple):
    """What a decoder layer keeps of the earlier target tokens and of the memory."""

    self_attention: AttentionCache
    cross_attention: AttentionCache


def add_adapter(
    module: nn.Module, x: Float[Tensor, "*batch inputs"], y: Float[Tensor, "*batch outputs"]
) -> Float[Tensor, "*batch outputs"]:
    """Return a module's product `y` of `x`, plus that of its adapter where it has one.

    It is `lora_scale * (x lora_a) lora_b` (Hu et al. 2021, equation 3), with dropout on `x`.
    """
    if module.lora_a is None:
        return y
    low = nn.functional.linear(module.lora_dropout(x), module.lora_a)
    return y + nn.functional.linear(low, module.lora_b) * module.lora_scale


def attach_adapter(
    model: nn.Module,
    tensors: Mapping[str, Float[Tensor, "..."]],
    scale: float,
    dropout: float = 0.0,
) -> None:
    """Freeze a model and give it an adapter, in place.

    Args:
        tensors: Those of a folder of PEFT, by the names that its adapter_model.safetensors has.
        scale: PEFT's lora_alpha / r.
        dropout: PEFT's lora_dropout.
    """
    model.requires_grad_(False)
    for name, tensor in tensors.items():
        name, leaf = name.removeprefix("base_model.model.").rsplit(".", 1)
        if name.endswith((".lora_A", ".lora_B")):  # else it is a whole parameter
            name, leaf = name.rsplit(".", 1)
        module = model.get_submodule(name)
        module.register_parameter(leaf.lower(), nn.Parameter(tensor))
        module.lora_scale, module.lora_dropout = scale, nn.Dropout(dropout)


class Linear(nn.Linear):
    """A product with a weight, a bias where the config has one, an adapter."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.register_parameter("lora_a", None)

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Return the product."""
        return add_adapter(self, x, super().forward(x))


class Norm(nn.Module):
    """The norm that the config names, over the last axis, whose width is d_model if None."""

    def __init__(self, config: TransformerConfig, width: int | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.d_model if width is None else width
        zero_centered = config.norm == "zero_centered_rms_norm"
        self.weight = nn.Parameter(torch.zeros(width) if zero_centered else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm_bias else None

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Return the normed rows."""
        config = self.config
        return functional.norm(x, self.weight, self.bias, config.norm_epsilon, config.norm)


class Embedding(nn.Embedding):
    """A token table, scaled as the config says (section 3.4)."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__(vocab_size, config.d_model)
        self.config = config

    def forward(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        """Return the scaled rows of `ids`."""
        x = super().forward(ids)
        if self.config.embedding_scale == "sqrt_d_model":
            x = x * self.config.d_model**0.5
        return x


class PositionEmbedding(nn.Embedding):
    """A learned position table, whose first rows are skipped where the config has an offset."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(axis_length(config, "positions"), config.d_model)
        self.offset = config.position_offset

    def forward(self, length: int) -> Float[Tensor, "L D"]:
        """Return the rows of the positions 0 to length - 1."""
        return self.weight[self.offset : self.offset + length]


class RelativeAttentionBias(nn.Embedding):
    """A learned bias of the scores for each head and each bucket of distances (Raffel et al. 2020).

    Queries attend to later keys where it is bidirectional: in the encoder.
    """

    def __init__(self, config: TransformerConfig, bidirectional: bool) -> None:
        super().__init__(config.relative_attention_num_buckets, config.num_heads)
        self.config = config
        self.bidirectional = bidirectional

    def forward(self, queries: int, keys: int) -> Float[Tensor, "1 H T S"]:
        """Return the bias of each query and key; the last keys stand at the queries' positions."""
        distance = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
        return self.by_distance(distance).permute(2, 0, 1)[None]

    def by_distance(self, distance: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape H"]:
        """Return the biases of distances, each a key's position minus a query's."""
        buckets = functional.relative_position_buckets(
            distance,
            self.config.relative_attention_num_buckets,
            self.config.relative_attention_max_distance,
            self.bidirectional,
        )
        return super().forward(buckets.to(self.weight.device))


def rotation_of(
    config: TransformerConfig, window: tuple[int, int] | None, length: int, queries: int
) -> Rotation | None:
    """Return the cosines and sines that rotate the queries and keys of a self-attention.

    Args:
        window: What the layer's queries see, as `TransformerConfig.window_of`.
        length: Number of positions, from 0.
        queries: How many of the last positions are returned.
    """
    if config.positions != "rotary":
        return None
    theta, scaling = config.rotary_theta, config.rotary_scaling
    if window is not None and config.sliding_window_theta is not None:
        theta, scaling = config.sliding_window_theta, 1.0
    angles = functional.rotary_angles(length, config.rotated_columns, theta, scaling)
    angles = angles[length - queries :]
    return angles.cos(), angles.sin()


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2) with full or shared head projections.

    Args:
        memory: Name of the length of what keys and values are made of.
    """

    def __init__(self, config: TransformerConfig, memory: str = "projected") -> None:
        super().__init__()
        self.config = config

        def linear(inputs: str, outputs: str, bias: bool) -> Linear:
            return Linear(axis_length(config, inputs), axis_length(config, outputs), bias)

        self.query = linear("projected", "projected_heads", config.qkv_bias)
        self.key = linear(memory, "projected_key_heads", config.qkv_bias and config.key_bias)
        self.value = linear(memory, "projected_value_heads", config.qkv_bias)
        self.output = linear("heads", "d_model", config.attention_output_bias)
        if config.query_key_norm:
            self.query_norm = Norm(config, config.head_dim)
            self.key_norm = Norm(config, config.head_dim)
        self.dropout = nn.Dropout(config.attention_dropout_rate)

    def forward(
        self,
        query: Float[Tensor, "B T D"],
        key: Float[Tensor, "B S M"] | None,
        value: Float[Tensor, "B S M"] | None,
        mask: Bool[Tensor, "#B #H #T _"] | None = None,
        position_bias: Float[Tensor, "1 H T _"] | None = None,
        rotation: Rotation | None = None,
        cache: AttentionCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return what each query gathers from the values that it may attend to.

        Args:
            mask: True = attend; None attends to everything.
            position_bias: Added to the scores.
            rotation: Of the queries and keys, as `rotation_of` returns it.
            cache: Keys and values that are projected already; `key` and `value` are not read.
        """
        queries = self.queries(query, rotation)
        if cache is not None:
            return self.attend(queries, cache.keys, cache.values, mask, position_bias)
        return self.attend(
            queries, self.keys(key, rotation), self.values(value), mask, position_bias
        )

    def attend(
        self,
        queries: Float[Tensor, "B H T K"],
        keys: Float[Tensor, "B G S K"],
        values: Float[Tensor, "B G S U"],
        mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        position_bias: Float[Tensor, "1 H T S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return what projected queries gather from projected keys and values, projected."""
        heads = functional.dot_product_attention(
            queries,
            keys,
            values,
            mask,
            self.dropout,
            position_bias,
            self.config.attention_divisor,
            self.config.attention_softcap,
        )
        return self.output(functional.merge_heads(heads))

    def queries(
        self, x: Float[Tensor, "B L D"], rotation: Rotation | None = None
    ) -> Float[Tensor, "B H L K"]:
        """Return the queries of vectors, normed and rotated where the config says so."""
        heads = self._project(self.query, x, self.config.num_heads)
        heads = self.query_norm(heads) if self.config.query_key_norm else heads
        return heads if rotation is None else functional.rotate(heads, rotation)

    def keys(
        self, x: Float[Tensor, "B L D"], rotation: Rotation | None = None
    ) -> Float[Tensor, "B G L K"]:
        """Return the keys of vectors, as `queries`."""
        heads = self._project(self.key, x, self.config.key_heads)
        heads = self.key_norm(heads) if self.config.query_key_norm else heads
        return heads if rotation is None else functional.rotate(heads, rotation)

    def values(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B G L U"]:
        """Return the values of vectors."""
        return self._project(self.value, x, self.config.key_heads)

    def keys_and_values(
        self, x: Float[Tensor, "B L D"], rotation: Rotation | None = None
    ) -> AttentionCache:
        """Return the keys and values of vectors, as a cache holds them."""
        return AttentionCache(self.keys(x, rotation), self.values(x))

    def _project(
        self, projection: Linear, x: Float[Tensor, "B L D"], num_heads: int
    ) -> Float[Tensor, "B H L K"]:
        """Return the product of vectors, split into heads."""
        if self.config.shares_heads:
            return projection(functional.split_heads(x, num_heads))
        return functional.split_heads(projection(x), num_heads)


class FeedForward(nn.Module):
    """The position-wise feed-forward network (section 3.3), gated where the config says so."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.inner = Linear(config.d_model, config.d_ff, bias=config.feed_forward_bias)
        if config.gated_feed_forward:
            self.gate = Linear(config.d_model, config.d_ff, bias=config.feed_forward_bias)
        self.dropout = nn.Dropout(config.activation_dropout_rate)
        self.outer = Linear(config.d_ff, config.d_model, bias=config.feed_forward_bias)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Return the network's output at each position."""
        kind = self.config.activation
        if self.config.gated_feed_forward:
            x = functional.activation(self.gate(x), kind) * self.inner(x)
        else:
            x = functional.activation(self.inner(x), kind)
        return self.outer(self.dropout(x))


class Residual(nn.Module):
    """A norm, a dropout and an addition around a sublayer, in the order of the placement."""

    def __init__(self, config: TransformerConfig, placement: NormPlacement) -> None:
        super().__init__()
        self.config = config
        self.placement = placement
        self.norm = Norm(config)
        if placement == "sandwich":
            self.output_norm = Norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Float[Tensor, "B L D"], y: Float[Tensor, "B L D"]
    ) -> Float[Tensor, "B L D"]:
        """Return the residual stream `x` after a sublayer whose output is `y`."""
        if self.placement != "post":
            return x + self.dropout(self.output_norm(y) if self.placement == "sandwich" else y)
        if self.config.dropout_placement == "norm":
            return self.dropout(self.norm(x + y))
        return self.norm(x + self.dropout(y))

    def sublayer_input(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Return what the sublayer reads: `x`, normed unless norms are placed "post"."""
        return x if self.placement == "post" else self.norm(x)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network (section 3.1)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        placement = config.norm_placement_of("encoder")
        self.self_attention = MultiHeadAttention(config)
        self.self_attention_residual = Residual(config, placement)
        if config.has_relative_bias_per_layer:
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional=True)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config, placement)

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        context: AttentionContext = NO_CONTEXT,
    ) -> Float[Tensor, "B S D"]:
        """Return the layer's output."""
        if self.config.has_relative_bias_per_layer:
            bias = self.relative_attention_bias(x.shape[1], x.shape[1])
            context = context._replace(position_bias=bias)
        y = self.self_attention_residual.sublayer_input(x)
        y = self.self_attention(y, y, y, context.mask, context.position_bias, context.rotation)
        x = self.self_attention_residual(x, y)
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y))


class DecoderLayer(nn.Module):
    """Self-attention, attention to the memory and a feed-forward network (section 3.1)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        placement = config.norm_placement_of("decoder")
        if config.decoder_attention != "ssru_then_cross":
            self.self_attention = MultiHeadAttention(config)
            self.self_attention_residual = Residual(config, placement)
        if config.has_relative_bias_per_layer:
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional=False)
        if config.decoder_attention != "merged":
            self.cross_attention = MultiHeadAttention(config, "projected_memory")
            self.cross_attention_residual = Residual(config, placement)
        if config.memory_norm:
            self.memory_norm = Norm(config, axis_length(config, "memory"))
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config, placement)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S M"] | None,
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerCache | None]:
        """Return the layer's output, and the cache with the keys and values of `x` written.

        Args:
            memory: What the cross-attention reads; not read with a cache, which holds its keys
                and values.
            context: Of the self-attention.
            src_mask: Which target position attends to which position of the memory.
            cache: What the layer keeps of the targets before `x`; None where there are none.
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
        self, x: Float[Tensor, "B T D"], context: AttentionContext, cache: LayerCache | None
    ) -> tuple[Float[Tensor, "B T D"], LayerCache | None]:
        """Return the residual stream after the self-attention, and the cache with `x` written."""
        if self.config.has_relative_bias_per_layer:
            before = 0 if cache is None else cached_length(cache)
            bias = self.relative_attention_bias(x.shape[1], before + x.shape[1])
            context = context._replace(position_bias=bias)
        y, of_targets = self.self_attention_residual.sublayer_input(x), None
        if cache is not None:
            cache = self.write_step(y, cache, context)
            of_targets = cache.self_attention
        mask, position_bias, rotation = context
        y = self.self_attention(y, y, y, mask, position_bias, rotation, of_targets)
        return self.self_attention_residual(x, y), cache

    def cross_attention_input(self, memory: Float[Tensor, "B S M"]) -> Float[Tensor, "B S M"]:
        """Return what the cross-attention reads: the memory, normed where the config says so."""
        return self.memory_norm(memory) if self.config.memory_norm else memory

    def init_cache(self, memory: Float[Tensor, "B S M"]) -> LayerCache:
        """Return the cache before the first token: the memory projected, no target."""
        of_memory = self.cross_attention.keys_and_values(self.cross_attention_input(memory))
        none = AttentionCache(of_memory.keys[:, :, :0], of_memory.values[:, :, :0])
        return LayerCache(none, of_memory)

    def write_step(
        self, y: Float[Tensor, "B T D"], cache: LayerCache, context: AttentionContext
    ) -> LayerCache:
        """Return the cache with the self-attention's keys and values of a step written."""
        new = self.self_attention.keys_and_values(y, context.rotation)
        keys = torch.cat([cache.self_attention.keys, new.keys], dim=2)
        values = torch.cat([cache.self_attention.values, new.values], dim=2)
        return cache._replace(self_attention=AttentionCache(keys, values))


def cached_length(cache: LayerCache) -> int:
    """Return the number of target positions in a cache."""
    return cache.self_attention.keys.shape[2]


class OutputProjection(nn.Module):
    """The product that turns hidden states into logits, with an own or a tied matrix."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        linear = nn.Linear(config.d_model, config.tgt_vocab_size, bias=config.output_bias)
        self.weight = linear.weight if config.output_projection == "linear" else None
        self.bias = linear.bias
        self.register_parameter("lora_a", None)

    def forward(
        self, x: Float[Tensor, "B T D"], table: Float[Tensor, "V D"] | None
    ) -> Float[Tensor, "B T V"]:
        """Return the logits; `table` is the embedding that a tied projection reuses."""
        weight = table if self.weight is None else self.weight
        return add_adapter(self, x, nn.functional.linear(x, weight, self.bias))


class ClassificationHead(nn.Module):
    """The products that turn hidden states into scores of labels."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        if config.head == "sequence":
            self.dense = Linear(config.d_model, config.d_model, bias=True)
        self.dropout = nn.Dropout(config.head_dropout)
        self.output = Linear(config.d_model, config.num_labels, bias=True)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch labels"]:
        """Return the scores."""
        x = self.dropout(x)
        if self.config.head == "sequence":
            x = self.dropout(torch.tanh(self.dense(x)))
        return self.output(x)
