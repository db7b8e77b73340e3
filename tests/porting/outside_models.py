"""Foreign models that no TransformerConfig describes: one unusual block each."""

import math

import torch
from torch import nn

from tests.convert.foreign import interleaved_positions
from tests.porting.fused_models import heads_of, masks, through


def rotate(x):
    """Turn each pair of columns of [B, H, L, K] by its position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * 10000 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def linear_bias(scores):
    """Lower the scores [B, H, T, S] of far keys, with a slope for each head."""
    heads, queries, keys = scores.shape[1:]
    slopes = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    return scores - (slopes[:, None, None] * distance).to(scores)


class Attention(nn.Module):
    def __init__(self, dim, heads, kind=None):
        super().__init__()
        self.heads, self.kind = heads, kind
        for name in ("query", "key", "value", "output"):
            self.add_module(name, nn.Linear(dim, dim))

    def forward(self, x, y, mask):
        q, k, v = (
            heads_of(f(z), self.heads) for f, z in ((self.query, x), (self.key, y), (self.value, y))
        )
        if self.kind == "rotary":
            q, k = rotate(q), rotate(k)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.kind == "linear_bias":
            scores = linear_bias(scores)
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A convolution along the sequence, each column for itself, that sees the past alone."""

    def __init__(self, dim):
        super().__init__()
        self.depthwise = nn.Conv1d(dim, dim, 3, padding=2, groups=dim)

    def forward(self, x):
        return self.depthwise(x.mT)[..., : x.shape[1]].mT


class Layer(nn.Module):
    def __init__(self, dim, heads, inner, kind, decoder):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads, kind)
        if decoder:
            self.memory_norm, self.memory_attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.network_norm = nn.LayerNorm(dim)
        self.network = nn.Sequential(nn.Linear(dim, inner), nn.ReLU(), nn.Linear(inner, dim))
        self.convolution = Convolution(dim) if kind == "convolution" else None

    def forward(self, x, mask, memory=None, memory_mask=None):
        y = self.attention_norm(x)
        x = x + self.attention(y, y, mask)
        if memory is not None:
            x = x + self.memory_attention(self.memory_norm(x), memory, memory_mask)
        x = x + self.network(self.network_norm(x))
        return x if self.convolution is None else x + self.convolution(x)


class Outside(nn.Module):
    """A pre-norm model with "rotary" positions, a "linear_bias" or a "convolution"."""

    def __init__(self, kind, dim=24, heads=4, inner=46, vocabularies=(37, 43)):
        super().__init__()
        self.kind = kind
        self.source, self.target = (nn.Embedding(size, dim) for size in vocabularies)
        self.encoder = nn.ModuleList(Layer(dim, heads, inner, kind, False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(dim, heads, inner, kind, True) for _ in range(2))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabularies[1])

    def embed(self, table, ids):
        x = table(ids) * math.sqrt(table.embedding_dim)
        if self.kind == "convolution":
            x = x + interleaved_positions(ids.shape[1], x.shape[-1]).to(x)
        return x

    def forward(self, src, tgt):
        mask, back = masks(src, tgt)
        memory = self.encoder_norm(through(self.encoder, self.embed(self.source, src), mask))
        y = through(self.decoder, self.embed(self.target, tgt), back, memory, mask)
        return self.head(self.decoder_norm(y))
