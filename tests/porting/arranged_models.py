"""Foreign models whose layers are no modules: lists of parts, numbered names, parts in turn.

Each has more of what a config can say and few programs do: scores divided by sqrt(d_model), norms
of the encoder elsewhere than those of the decoder, a norm by the biased deviation, dense layers
that are convolutions or one for each head, and one table of positions for both sides.
"""

import math

import torch
from torch import nn

from tests.porting.fused_models import masks

# ByPart: a list for the attentions of a stack, one for its networks, one for each norm.


class WideAttention(nn.Module):
    """Divides by sqrt(dim), the width of all heads together."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, y, mask):
        q, k, v = (
            z.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for z in (self.q_lin(x), self.k_lin(y), self.v_lin(y))
        )
        scores = q @ k.mT / math.sqrt(x.shape[-1])
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out_lin((weights @ v).transpose(1, 2).flatten(2))


class Windows(nn.Module):
    """A feed-forward network of convolutions whose window is one position."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(dim, hidden, 1), nn.Conv1d(hidden, dim, 1)

    def forward(self, x):
        return self.conv2(nn.functional.gelu(self.conv1(x.mT))).mT


class PartStack(nn.Module):
    def __init__(self, dim, n_heads, hidden, n_layers, crossing):
        super().__init__()

        def several(part, *sizes, **options):
            return nn.ModuleList(part(*sizes, **options) for _ in range(n_layers))

        self.attentions = several(WideAttention, dim, n_heads)
        self.layer_norm1 = several(nn.LayerNorm, dim, eps=1e-6)
        if crossing:
            self.layer_norm15 = several(nn.LayerNorm, dim, eps=1e-6)
            self.encoder_attn = several(WideAttention, dim, n_heads)
        self.ffns = several(Windows, dim, hidden)
        self.layer_norm2 = several(nn.LayerNorm, dim, eps=1e-6)

    def forward(self, x, mask, memory=None, memory_mask=None):
        for i, attention in enumerate(self.attentions):
            x = self.layer_norm1[i](x + attention(x, x, mask))
            if memory is not None:
                x = self.layer_norm15[i](x + self.encoder_attn[i](x, memory, memory_mask))
            x = self.layer_norm2[i](x + self.ffns[i](x))
        return x


class ByPart(nn.Module):
    """One table of tokens and one of positions, both for both sides."""

    def __init__(self, dim=24, vocab=41, length=26):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.position_embeddings = nn.Embedding(length, dim)
        self.encoder = PartStack(dim, 3, 44, 2, False)
        self.decoder = PartStack(dim, 3, 44, 3, True)

    def embed(self, ids):
        return self.embeddings(ids) + self.position_embeddings.weight[: ids.shape[1]]

    def forward(self, src, tgt):
        see, back = masks(src, tgt)
        memory = self.encoder(self.embed(src), see)
        return self.decoder(self.embed(tgt), back, memory, see) @ self.embeddings.weight.T


# Numbered: every part of a layer is an attribute of the model, with its number in its name.


class OneHead(nn.Module):
    def __init__(self, d_model, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d_model, width) for _ in range(3))

    def forward(self, x, y, mask):
        scores = self.query(x) @ self.key(y).mT / self.query.out_features**0.5
        return scores.masked_fill(~mask[:, 0], -1e9).softmax(-1) @ self.value(y)


class HeadsApart(nn.Module):
    """A residual block with a module for each head."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        width = d_model // num_heads
        self.heads = nn.ModuleList(OneHead(d_model, width) for _ in range(num_heads))
        self.linear, self.normalization = nn.Linear(d_model, d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask, memory=None):
        y = x if memory is None else memory
        heads = torch.cat([head(x, y, mask) for head in self.heads], -1)
        return self.normalization(x + self.linear(heads))


class ResidualNetwork(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.first, self.second = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.normalization = nn.LayerNorm(d_model)

    def forward(self, x):
        return self.normalization(x + self.second(self.first(x).relu()))


class Numbered(nn.Module):
    def __init__(self, d_model=20, num_heads=5, d_ff=28, blocks=2):
        super().__init__()
        self.blocks = blocks
        self.enc_embedding, self.dec_embedding = (
            nn.Embedding(33, d_model),
            nn.Embedding(39, d_model),
        )
        for i in range(blocks):
            self.add_module(f"enc_self_attention_{i}", HeadsApart(d_model, num_heads))
            self.add_module(f"enc_feed_forward_{i}", ResidualNetwork(d_model, d_ff))
            self.add_module(f"dec_self_attention_{i}", HeadsApart(d_model, num_heads))
            self.add_module(f"dec_vanilla_attention_{i}", HeadsApart(d_model, num_heads))
            self.add_module(f"dec_feed_forward_{i}", ResidualNetwork(d_model, d_ff))
        self.logits_layer = nn.Linear(d_model, 39)

    def part(self, name, i):
        return getattr(self, f"{name}_{i}")

    def forward(self, src, tgt):
        see, back = masks(src, tgt)
        scale = self.enc_embedding.embedding_dim**0.5
        x, y = self.enc_embedding(src) * scale, self.dec_embedding(tgt) * scale
        for i in range(self.blocks):
            x = self.part("enc_feed_forward", i)(self.part("enc_self_attention", i)(x, see))
        for i in range(self.blocks):
            y = self.part("dec_self_attention", i)(y, back)
            y = self.part("dec_vanilla_attention", i)(y, see, x)
            y = self.part("dec_feed_forward", i)(y)
        return self.logits_layer(y)


# InTurn: one list in which an attention and a network take turns; norms by the biased deviation.


class BiasedNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        deviation = x.std(-1, keepdim=True, correction=0)
        return self.gain * (x - x.mean(-1, keepdim=True)) / (deviation + 1e-3) + self.bias


class Block(nn.Module):
    """A sublayer with its residual addition, and a norm before or behind it."""

    def __init__(self, width, before):
        super().__init__()
        self.before, self.norm = before, BiasedNorm(width)

    def forward(self, x, *others):
        if self.before:
            return x + self.inside(self.norm(x), *others)
        return self.norm(x + self.inside(x, *others))


class Mix(Block):
    def __init__(self, width, heads, before):
        super().__init__(width, before)
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def inside(self, x, mask, memory=None):
        parts = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
        inputs = (x, x, x) if memory is None else (x, memory, memory)
        q, k, v = (
            nn.functional.linear(z, *part).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for z, part in zip(inputs, parts, strict=True)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Feed(Block):
    def __init__(self, width, wide, before):
        super().__init__(width, before)
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def inside(self, x):
        return self.down(nn.functional.silu(self.up(x)))


class InTurn(nn.Module):
    """Norms stand before the encoder's sublayers and behind the decoder's; sines of base 100."""

    def __init__(self, width=28, heads=4, wide=36, layers=2):
        super().__init__()
        self.source, self.target = nn.Embedding(35, width), nn.Embedding(43, width)
        angle = torch.arange(24)[:, None] / 100 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("signal", torch.cat([angle.sin(), angle.cos()], -1)[None])
        self.reader, self.writer = nn.Module(), nn.Module()
        for stack, attentions in ((self.reader, 1), (self.writer, 2)):
            before = attentions == 1
            stack.layers = nn.ModuleList()
            for _ in range(layers):
                stack.layers.extend(Mix(width, heads, before) for _ in range(attentions))
                stack.layers.append(Feed(width, wide, before))
        self.reader.end = BiasedNorm(width)
        self.head = nn.Linear(width, 43, bias=False)

    def forward(self, src, tgt):
        see, back = masks(src, tgt)
        x = self.source(src) + self.signal[:, : src.shape[1]]
        for mix, feed in zip(*(self.reader.layers[i::2] for i in range(2)), strict=True):
            x = feed(mix(x, see))
        x, y = self.reader.end(x), self.target(tgt) + self.signal[:, : tgt.shape[1]]
        for mix, cross, feed in zip(*(self.writer.layers[i::3] for i in range(3)), strict=True):
            y = feed(cross(mix(y, back), see, x))
        return self.head(y)
