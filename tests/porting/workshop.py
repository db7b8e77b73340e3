"""A small encoder-decoder whose parts a test exchanges: its norm, its masks, its list of layers."""

import math

import torch
from torch import nn

from tests.convert.foreign import randomized

PAD, WORDS, WIDTH, HEADS, WIDE, LONGEST = 0, 29, 24, 3, 40, 16
SCALE = math.sqrt(WIDTH)


class UnbiasedNorm(nn.Module):
    """A norm that no config has: epsilon is added inside of the root, and outside once more."""

    def __init__(self, width, epsilon=1e-6):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (x.var(-1, keepdim=True) + self.epsilon).sqrt() + self.epsilon
        return self.weight * centred / deviation + self.bias


class Bench(nn.Module):
    """An attention."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, y, mask):
        heads = (
            product(z).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for product, z in ((self.query, x), (self.key, y), (self.value, y))
        )
        query, key, value = heads
        scores = query @ key.mT / math.sqrt(WIDTH // HEADS)
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)  # of nothing, all keys alike
        return self.output((weights @ value).transpose(1, 2).flatten(2))


class Shelf(nn.Module):
    """A layer of either stack."""

    def __init__(self, norm, attentions, post):
        super().__init__()
        self.post = post
        self.benches = nn.ModuleList(Bench() for _ in range(attentions))
        self.grow, self.shrink = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.norms = nn.ModuleList(norm(WIDTH) for _ in range(attentions + 1))

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.add(0, x, lambda y: self.benches[0](y, y, mask))
        if memory is not None:
            x = self.add(1, x, lambda y: self.benches[1](y, memory, memory_mask))
        return self.add(-1, x, lambda y: self.shrink(self.grow(y).relu()))

    def add(self, which, x, sublayer):
        norm = self.norms[which]
        return norm(x + sublayer(x)) if self.post else x + sublayer(norm(x))


class Workshop(nn.Module):
    """Token ids [B, S] and [B, T] to logits [B, T, V]."""

    def __init__(
        self, norm=nn.LayerNorm, source_mask="keys", shared=False, scale=SCALE, post=False
    ):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.source_place = nn.Embedding(LONGEST, WIDTH)
        self.target_place = nn.Embedding(LONGEST, WIDTH)
        first = [Shelf(norm, 1, post) for _ in range(2)]
        self.readers = nn.ModuleList(first[:1] * 2 if shared else first)
        self.writers = nn.ModuleList(Shelf(norm, 2, post) for _ in range(2))
        self.ends = nn.ModuleList(nn.Identity() if post else norm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.source_mask, self.scale = source_mask, scale

    def forward(self, src, tgt):
        keys = (src != PAD)[:, None, None, :]
        masks = {
            "keys": keys,
            "rows": keys.mT.expand(-1, -1, -1, src.shape[1]),  # a usual mistake: queries, not keys
            "both": keys & keys.mT,
            "nothing": torch.ones_like(keys),
        }
        order = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        memory = self.scale * self.source(src) + self.source_place.weight[: src.shape[1]]
        x = self.scale * self.target(tgt) + self.target_place.weight[: tgt.shape[1]]
        for layer in self.readers:
            memory = layer(memory, masks[self.source_mask])
        memory_mask = masks["nothing" if self.source_mask in ("rows", "nothing") else "keys"]
        memory = self.ends[0](memory)
        for layer in self.writers:
            x = layer(x, order, memory, memory_mask)
        return self.head(self.ends[1](x))


def workshop(seed=0, **parts) -> Workshop:
    """Return the model without dropout, no parameter at its starting value."""
    return randomized(Workshop(**parts), seed).eval()
