"""A small encoder-decoder in torch, of which the copies in JAX are ports."""

import math

import torch
from torch import nn

WIDTH, HEADS, WIDE, WORDS, DEPTH = 24, 4, 36, 31, 2
PAD = 0


def turned(z):
    """Return heads [B, H, L, d] with each pair of neighbours rotated by its position."""
    angle = torch.arange(z.shape[2], dtype=z.dtype)[:, None] * 0.5 ** torch.arange(z.shape[3] // 2)
    z = torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class Attention(nn.Module):
    def __init__(self, rotary=False):
        super().__init__()
        self.rotary = rotary
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, y, mask):
        q, k, v = (
            z.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for z in (self.query(x), self.key(y), self.value(y))
        )
        q, k = (turned(z) if self.rotary else z for z in (q, k))
        scores = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(~mask, -1e30)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x):
        return self.outer(nn.functional.gelu(self.inner(x)))


class Layer(nn.Module):
    def __init__(self, crossing, rotary):
        super().__init__()
        self.attentions = nn.ModuleList(Attention(rotary and not i) for i in range(1 + crossing))
        self.feed = FeedForward()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1e-5) for _ in range(2 + crossing))

    def forward(self, x, mask, memory=None, memory_mask=None):
        y = self.norms[0](x)
        x = x + self.attentions[0](y, y, mask)
        if memory is not None:
            x = x + self.attentions[1](self.norms[1](x), memory, memory_mask)
        return x + self.feed(self.norms[-1](x))


class Program(nn.Module):
    def __init__(self, rotary=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Layer(False, rotary) for _ in range(DEPTH))
        self.decoder = nn.ModuleList(Layer(True, rotary) for _ in range(DEPTH))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def embed(self, ids):
        angle = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
        angle = angle / 10000 ** (torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
        places = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        return self.words(ids) * math.sqrt(WIDTH) + places.to(self.words.weight.dtype)

    def forward(self, src, tgt):
        seen = (src != PAD)[:, None, None]
        earlier = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()[None, None]
        x, y = self.embed(src), self.embed(tgt)
        for layer in self.encoder:
            x = layer(x, seen)
        memory = self.encoder_norm(x)
        for layer in self.decoder:
            y = layer(y, earlier, memory, seen)
        return self.head(self.decoder_norm(y))
