"""Four published models written anew, with the module names of their code.

Each takes a TransformerConfig for its sizes alone and returns logits. Position tables are computed
in float32, as theirs are.
"""

import collections
import functools
import math

import torch
from torch import nn


def attend(query, key, value, mask):
    """Attention over [B, H, L, K] under a mask whose 0 means blocked."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ value


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x):
    return x.transpose(1, 2).flatten(2)


def interleaved_positions(length, width):
    """Sine and cosine columns of shared frequencies, by way of exp and log."""
    frequency = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angle = torch.arange(length).float()[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def per_column_positions(length, width):
    """Each column with an exponent of its own, in double precision."""
    column = torch.arange(width, dtype=torch.float64)
    angle = torch.arange(length)[:, None] / 10000 ** (2 * column / width)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).float()


class StdNorm(nn.Module):
    """(x - mean) / (unbiased deviation + epsilon), with names of the caller's choice."""

    def __init__(self, width, epsilon, scale, bias):
        super().__init__()
        self.epsilon, self.names = epsilon, (scale, bias)
        self.register_parameter(scale, nn.Parameter(torch.ones(width)))
        self.register_parameter(bias, nn.Parameter(torch.zeros(width)))

    def forward(self, x):
        scale, bias = (getattr(self, name) for name in self.names)
        centred = x - x.mean(-1, keepdim=True)
        return scale * centred / (x.std(-1, keepdim=True) + self.epsilon) + bias


class Positions(nn.Module):
    """A buffer [1, length, width] under the given name, added to the input."""

    def __init__(self, name, table):
        super().__init__()
        self.name = name
        self.register_buffer(name, table[None])

    def forward(self, x):
        return x + getattr(self, self.name)[:, : x.shape[1]]


class Table(nn.Module):
    """A scaled embedding table called `embedding`."""

    def __init__(self, size, width):
        super().__init__()
        self.embedding = nn.Embedding(size, width)

    def forward(self, ids):
        return self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)


class Attention(nn.Module):
    """Four full projections under the given names."""

    def __init__(self, width, heads, names, bias=True):
        super().__init__()
        self.heads, self.names = heads, names
        for name in names:
            self.add_module(name, nn.Linear(width, width, bias=bias))

    def forward(self, x, memory, mask):
        query, key, value, output = (getattr(self, name) for name in self.names)
        heads = (split(part, self.heads) for part in (query(x), key(memory), value(memory)))
        return output(merge(attend(*heads, mask)))


class TwoLayers(nn.Module):
    """A ReLU feed-forward network under the given names."""

    def __init__(self, config, names):
        super().__init__()
        self.names = names
        self.add_module(names[0], nn.Linear(config.d_model, config.d_ff))
        self.add_module(names[1], nn.Linear(config.d_ff, config.d_model))

    def forward(self, x):
        first, second = (getattr(self, name) for name in self.names)
        return second(first(x).relu())


# The post-norm model whose heads share three small projections.


class SharedHeadsAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.d_model // config.num_heads
        self.heads = config.num_heads
        self.query_matrix = nn.Linear(width, width, bias=False)
        self.key_matrix = nn.Linear(width, width, bias=False)
        self.value_matrix = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model)

    def forward(self, key, query, value, mask=None):
        q = self.query_matrix(split(query, self.heads))
        k = self.key_matrix(split(key, self.heads))
        v = self.value_matrix(split(value, self.heads))
        return self.out(merge(attend(q, k, v, mask)))


class SharedHeadsBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = SharedHeadsAttention(config)
        self.norm1 = nn.LayerNorm(config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff),
            nn.ReLU(),
            nn.Linear(config.d_ff, config.d_model),
        )

    def forward(self, key, query, value):
        x = self.norm1(self.attention(key, query, value) + value)
        return self.norm2(self.feed_forward(x) + x)


class SharedHeadsDecoderBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = SharedHeadsAttention(config)
        self.norm = nn.LayerNorm(config.d_model)
        self.transformer_block = SharedHeadsBlock(config)

    def forward(self, memory, x, mask):
        value = self.norm(self.attention(memory, memory, memory, mask) + memory)
        return self.transformer_block(memory, x, value)


class SharedHeadsEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding_layer = nn.Module()
        self.embedding_layer.embed = nn.Embedding(config.src_vocab_size, config.d_model)
        table = per_column_positions(config.max_length, config.d_model)
        self.positional_encoder = Positions("pe", table)
        layers = (SharedHeadsBlock(config) for _ in range(config.num_encoder_layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, src):
        x = self.embedding_layer.embed(src)
        x = self.positional_encoder(x * math.sqrt(x.shape[-1]))
        for layer in self.layers:
            x = layer(x, x, x)
        return x


class SharedHeadsDecoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embedding = nn.Embedding(config.tgt_vocab_size, config.d_model)
        table = per_column_positions(config.max_length, config.d_model)
        self.position_embedding = Positions("pe", table)
        layers = (SharedHeadsDecoderBlock(config) for _ in range(config.num_decoder_layers))
        self.layers = nn.ModuleList(layers)
        self.fc_out = nn.Linear(config.d_model, config.tgt_vocab_size)

    def forward(self, tgt, memory, mask):
        x = self.word_embedding(tgt)
        x = self.position_embedding(x * math.sqrt(x.shape[-1]))
        for layer in self.layers:
            x = layer(memory, x, mask)
        return self.fc_out(x)


class SharedHeads(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.encoder = SharedHeadsEncoder(config)
        self.decoder = SharedHeadsDecoder(config)

    def forward(self, src, tgt, src_mask, tgt_mask):
        """Only the target mask is used: this encoder takes no padding mask."""
        return self.decoder(tgt, self.encoder(src), tgt_mask)


# The two pre-norm models whose layers keep their norms in residual connections.


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, sublayer):
        return x + sublayer(self.norm(x))


class ResidualLayer(nn.Module):
    def __init__(self, config, norm, projections, feed_forward, decoder):
        super().__init__()
        self.self_attention_block = Attention(config.d_model, config.num_heads, projections)
        if decoder:
            self.cross_attention_block = Attention(config.d_model, config.num_heads, projections)
        self.feed_forward_block = TwoLayers(config, feed_forward)
        self.residual_connections = nn.ModuleList(Residual(norm()) for _ in range(2 + decoder))

    def forward(self, x, mask, memory=None, memory_mask=None):
        first, *middle, last = self.residual_connections
        x = first(x, lambda x: self.self_attention_block(x, x, mask))
        for residual in middle:
            x = residual(x, lambda x: self.cross_attention_block(x, memory, memory_mask))
        return last(x, self.feed_forward_block)


class ResidualStack(nn.Module):
    def __init__(self, layers, norm):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, x, *masks_and_memory):
        for layer in self.layers:
            x = layer(x, *masks_and_memory)
        return self.norm(x)


class ResidualModel(nn.Module):
    """Encoder and decoder of residual layers; the two programs differ in names alone."""

    def __init__(self, config, tables, positions, buffer, head, leaves, projections, feed_forward):
        super().__init__()
        self.sides = list(zip(tables, positions, strict=True))

        def norm():
            return StdNorm(config.d_model, 1e-6, *leaves)

        def stack(count, decoder):
            layers = (
                ResidualLayer(config, norm, projections, feed_forward, decoder)
                for _ in range(count)
            )
            return ResidualStack(layers, norm())

        self.encoder = stack(config.num_encoder_layers, False)
        self.decoder = stack(config.num_decoder_layers, True)
        for name, size in zip(tables, (config.src_vocab_size, config.tgt_vocab_size), strict=True):
            self.add_module(name, Table(size, config.d_model))
        for name in positions:
            table = interleaved_positions(config.max_length, config.d_model)
            self.add_module(name, Positions(buffer, table))
        linear = nn.Linear(config.d_model, config.tgt_vocab_size)
        self.projection_layer = nn.Sequential(collections.OrderedDict({head: linear}))

    def forward(self, src, tgt, src_mask, tgt_mask):
        src, tgt = (
            getattr(self, positions)(getattr(self, table)(ids))
            for ids, (table, positions) in zip((src, tgt), self.sides, strict=True)
        )
        memory = self.encoder(src, src_mask)
        return self.projection_layer(self.decoder(tgt, tgt_mask, memory, src_mask))


PreNorm = functools.partial(
    ResidualModel,
    tables=("source_embeddings", "target_embeddings"),
    positions=("source_pos", "target_pos"),
    buffer="postitons",
    head="projection",
    leaves=("alpha", "bias"),
    projections=("w_q", "w_k", "w_v", "w_o"),
    feed_forward=("linear_layer_1", "linear_layer_2"),
)
PreNormLogSoftmax = functools.partial(
    ResidualModel,
    tables=("src_embed", "tgt_embed"),
    positions=("src_pos", "tgt_pos"),
    buffer="pe",
    head="proj",
    leaves=("gamma", "beta"),
    projections=("W_q", "W_k", "W_v", "W_o"),
    feed_forward=("linear1", "linear2"),
)


# The pre-norm model whose decoder layers norm the memory.


class MemoryNormLayer(nn.Module):
    def __init__(self, config, decoder):
        super().__init__()
        names = ("W_q", "W_k", "W_v", "W_o")
        self.self_attention = Attention(config.d_model, config.num_heads, names, bias=False)
        if decoder:
            self.encoder_attention = Attention(config.d_model, config.num_heads, names, bias=False)
        self.feedforward = TwoLayers(config, ("W_1", "W_2"))
        for number in range(1, 5 if decoder else 3):
            self.add_module(f"norm{number}", StdNorm(config.d_model, 1e-5, "gamma", "beta"))

    def forward(self, x, mask, memory=None, memory_mask=None):
        y = self.norm1(x)
        x = x + self.self_attention(y, y, mask)
        if memory is None:
            return x + self.feedforward(self.norm2(x))
        y, memory = self.norm2(x), self.norm3(memory)
        x = x + self.encoder_attention(y, memory, memory_mask)
        return x + self.feedforward(self.norm4(x))


class PreNormMemoryNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.src_embedding = Table(config.src_vocab_size, config.d_model)
        self.tgt_embedding = Table(config.tgt_vocab_size, config.d_model)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        encoder_layers = (MemoryNormLayer(config, False) for _ in range(config.num_encoder_layers))
        decoder_layers = (MemoryNormLayer(config, True) for _ in range(config.num_decoder_layers))
        self.encoder.layers = nn.ModuleList(encoder_layers)
        self.decoder.layers = nn.ModuleList(decoder_layers)
        table = interleaved_positions(config.max_length, config.d_model)
        self.register_buffer("positional_encoder", table)
        self.output_layer = nn.Linear(config.d_model, config.tgt_vocab_size)

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory = self.src_embedding(src) + self.positional_encoder[: src.shape[1]]
        for layer in self.encoder.layers:
            memory = layer(memory, src_mask)
        x = self.tgt_embedding(tgt) + self.positional_encoder[: tgt.shape[1]]
        for layer in self.decoder.layers:
            x = layer(x, tgt_mask, memory, src_mask)
        return self.output_layer(x)


MODELS = {
    "shared_heads": SharedHeads,
    "pre_norm": PreNorm,
    "pre_norm_memory_norm": PreNormMemoryNorm,
    "pre_norm_log_softmax": PreNormLogSoftmax,
}


def randomized(module, seed=0):
    """Return the module with no parameter at its starting value: scales of norms stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            is_scale = parameter.dim() == 1 and bool((parameter == 1).all())
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            if is_scale:
                parameter.add_(1)
    return module.train()
