"""A small program whose parts are exchanged for those of public code, and such parts.

`further_models.SHAPES` has the programs, and what is true of each. The names are those of no
published program.
"""

import math

import torch
from torch import nn

WIDTH, HEADS, WIDE, VOCABULARIES, PAD = 24, 4, 40, (37, 43), 3
HEAD = WIDTH // HEADS


def waves(length, width, first=0, base=10000.0):
    """Return sines and cosines in turn [L, D], of positions from `first` on."""
    place = torch.arange(first, first + length, dtype=torch.float64)[:, None]
    angle = place / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def other(base, **parts):
    """Return a class with other methods, flags or parts."""
    return type(base.__name__, (base,), parts)


def later(length):
    """Return the mask [T, T] of the keys that a query may see."""
    return torch.ones(length, length, dtype=torch.bool).tril()


class Mixer(nn.Module):
    """An attention; its methods are what other programs do otherwise."""

    def __init__(self):
        super().__init__()
        self.ask, self.offer, self.carry, self.join = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def project(self, x, y):
        return self.split(self.ask(x)), self.split(self.offer(y)), self.split(self.carry(y))

    def divisor(self, query):
        return math.sqrt(query.shape[-1])

    def scored(self, scores, within, sees_all):
        return scores

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, x, y, mask):
        query, key, value = self.project(x, y)
        scores = query @ key.mT / self.divisor(query)
        scores = self.scored(scores, x is y, mask.shape[2] == 1).masked_fill(~mask, -1e9)
        return self.join(self.merge(self.weights(scores) @ value))


class HeadMixer(Mixer):
    """A Linear for each head apart."""

    def __init__(self):
        super().__init__()
        for name in ("ask", "offer", "carry"):
            setattr(self, name, nn.ModuleList(nn.Linear(WIDTH, HEAD) for _ in range(HEADS)))

    def project(self, x, y):
        pairs = ((self.ask, x), (self.offer, y), (self.carry, y))
        return [torch.stack([head(z) for head in heads], 1) for heads, z in pairs]


class EinsumMixer(Mixer):
    """Kernels with an axis for the heads."""

    product, axes = "bld,dhk->bhlk", (WIDTH, HEADS, HEAD)

    def __init__(self):
        nn.Module.__init__(self)
        self.ask, self.offer, self.carry = (nn.Parameter(torch.rand(self.axes)) for _ in range(3))
        self.join = nn.Parameter(torch.rand(HEADS, HEAD, WIDTH))

    def forward(self, x, y, mask):
        pairs = ((x, self.ask), (y, self.offer), (y, self.carry))
        query, key, value = (torch.einsum(self.product, *pair) for pair in pairs)
        scores = (query @ key.mT / self.divisor(query)).masked_fill(~mask, -1e9)
        return torch.einsum("bhlk,hkd->bld", self.weights(scores) @ value, self.join)


class RotaryMixer(Mixer):
    """Self-attentions turn pairs of columns; `halves` pairs a column with one of the other half."""

    halves, theta = True, 10000

    def turn(self, x):
        angle = torch.arange(x.shape[2])[:, None] / self.theta ** (
            torch.arange(0, x.shape[3], 2) / x.shape[3]
        )
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        one, two = x.chunk(2, -1) if self.halves else (x[..., ::2], x[..., 1::2])
        turned = [one * cos - two * sin, two * cos + one * sin]
        return torch.cat(turned, -1) if self.halves else torch.stack(turned, -1).flatten(3)

    def project(self, x, y):
        query, key, value = super().project(x, y)
        return (self.turn(query), self.turn(key), value) if x is y else (query, key, value)


class GroupedMixer(RotaryMixer):
    """Two heads of queries read one of keys and values."""

    def __init__(self):
        super().__init__()
        self.offer, self.carry = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))

    def project(self, x, y):
        key, value = (
            part(y).unflatten(-1, (HEADS // 2, -1)).transpose(1, 2)
            for part in (self.offer, self.carry)
        )
        query, within = self.split(self.ask(x)), x is y
        query, key = (self.turn(query), self.turn(key)) if within else (query, key)
        return query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)


class WindowMixer(Mixer):
    """Self-attentions see so many positions on each side: of sources, and of targets."""

    reach = (3, 2)

    def forward(self, x, y, mask):
        if x is y:
            place, reach = torch.arange(x.shape[1]), self.reach[mask.shape[2] > 1]
            mask = mask & ((place[:, None] - place).abs() <= reach)
        return super().forward(x, y, mask)


class NormedMixer(Mixer):
    """Queries and keys are normed, each head for itself."""

    def __init__(self):
        super().__init__()
        self.ask_norm, self.offer_norm = (nn.LayerNorm(HEAD) for _ in range(2))

    def project(self, x, y):
        query, key, value = super().project(x, y)
        return self.ask_norm(query), self.offer_norm(key), value


class BucketMixer(Mixer):
    """Self-attentions add T5's bias of the distance; distances from `far` on share a bucket."""

    buckets, far = 8, 20

    def __init__(self):
        super().__init__()
        self.nearness = nn.Embedding(self.buckets, HEADS)

    def bucket(self, away, both):
        half = self.buckets // 2 if both else self.buckets
        side, away = (half * (away > 0), away.abs()) if both else (0, (-away).clamp(min=0))
        exact = half // 2
        steps = (away.clamp(min=exact) / exact).log() / math.log(self.far / exact)
        shared = exact + (steps * (half - exact)).long()
        return side + torch.where(away < exact, away, shared.clamp(max=half - 1))

    def scored(self, scores, within, sees_all):
        if not within:
            return scores
        place = torch.arange(scores.shape[-1])
        away = self.bucket(place - place[:, None], sees_all)
        return scores + self.nearness(away).permute(2, 0, 1)


class WideValues(Mixer):
    """Values are wider than queries and keys."""

    def __init__(self):
        super().__init__()
        self.carry, self.join = nn.Linear(WIDTH, HEADS * 9), nn.Linear(HEADS * 9, WIDTH)


class RootNorm(nn.Module):
    """An RMS norm times 1 + w."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class VarianceNorm(nn.Module):
    """Divides by sqrt(unbiased variance + epsilon)."""

    def __init__(self, width):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def divisor(self, x):
        return (x.var(-1, keepdim=True) + 1e-5).sqrt()

    def forward(self, x):
        return self.gain * (x - x.mean(-1, keepdim=True)) / self.divisor(x) + self.shift


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x):
        return self.narrow(self.widen(x).relu())


class WindowNetwork(nn.Module):
    """Convolutions whose window is one position."""

    def __init__(self):
        super().__init__()
        self.widen, self.narrow = nn.Conv1d(WIDTH, WIDE, 1), nn.Conv1d(WIDE, WIDTH, 1)

    def forward(self, x):
        return self.narrow(self.widen(x.mT).relu()).mT


class Layer(nn.Module):
    """One layer of `program`'s parts, with norms before or behind."""

    def __init__(self, program, crossing):
        super().__init__()
        self.before = program.before[crossing]
        self.mixers = nn.ModuleList(program.mixer() for _ in range(1 + crossing))
        self.network = program.network()
        self.norms = nn.ModuleList(program.norm(WIDTH) for _ in range(2 + crossing))

    def added(self, x, y, place):
        return x + y

    def around(self, place, x, inside):
        norm = self.norms[place]
        if self.before:
            return self.added(x, inside(norm(x)), place)
        return norm(self.added(x, inside(x), place))

    def forward(self, x, mask, memory=None, seen=None):
        x = self.around(0, x, lambda x: self.mixers[0](x, x, mask))
        if memory is not None:
            x = self.around(1, x, lambda x: self.mixers[1](x, memory, seen))
        return self.around(-1, x, self.network)


class SandwichLayer(Layer):
    """A norm before each sublayer, and one behind it."""

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.behind = nn.ModuleList(program.norm(WIDTH) for _ in range(2 + crossing))

    def around(self, place, x, inside):
        return x + self.behind[place](inside(self.norms[place](x)))


class LearnedFactorLayer(Layer):
    """Each sublayer has a learned factor, as in ReZero."""

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.alpha = nn.ParameterList(torch.ones(1) for _ in self.norms)

    def added(self, x, y, place):
        return x + self.alpha[place] * y


class FewerNorms(Layer):
    """Sublayers that share a norm: `order` has the number of each one's norm."""

    order = (0, 0, 0)

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        del self.norms
        self.scaling = nn.ModuleList(program.norm(WIDTH) for _ in set(self.order))
        self.norms = tuple(self.scaling[number] for number in self.order)


class OneMixer(Layer):
    """The same attention reads the targets and then the memory."""

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        del self.mixers
        self.mixer = program.mixer()
        self.mixers = (self.mixer,) * 2


class EarlyCrossing(Layer):
    """The attention to the memory reads the layer's input, not the self-attention's output."""

    def forward(self, x, mask, memory=None, seen=None):
        if memory is None:
            return super().forward(x, mask)
        y = self.around(0, x, lambda x: self.mixers[0](x, x, mask))
        y = self.around(1, y, lambda y: self.mixers[1](x, memory, seen))
        return self.around(-1, y, self.network)


class ConvolvedLayer(Layer):
    """A convolution along the sequence behind the network, that sees the past alone."""

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.along = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x, *others):
        x = super().forward(x, *others)
        return x + self.along(x.mT)[..., : x.shape[1]].mT


class Translator(nn.Module):
    """Post-norm layers, tables times sqrt(d), sinusoids, a head: what a program does otherwise.

    `before` tells whether norms stand before the sublayers: of the encoder, of the decoder.
    """

    mixer, norm, network, layer = Mixer, nn.LayerNorm, Network, Layer
    before, pad = (False, False), PAD

    def __init__(self):
        super().__init__()
        self.words_in, self.words_out = (nn.Embedding(size, WIDTH) for size in VOCABULARIES)
        self.readers, self.writers = self.stack(False), self.stack(True)
        self.ends = nn.ModuleList(self.norm(WIDTH) for before in self.before if before)
        self.head = nn.Linear(WIDTH, VOCABULARIES[1])

    def stack(self, crossing):
        return nn.ModuleList(self.layer(self, crossing) for _ in range(2))

    def lists(self):
        return self.readers, self.writers

    def places(self, x):
        return waves(x.shape[1], WIDTH).to(x)

    def summed(self, x):
        return x * math.sqrt(WIDTH) + self.places(x)

    def embed(self, table, ids):
        return self.summed(table(ids))

    def masks(self, src, tgt):
        seen = (src != self.pad)[:, None, None]
        return seen, later(tgt.shape[1]) & (tgt != self.pad)[:, None, None], seen

    def after(self, logits):
        return logits

    def ended(self, x, crossing):
        return self.ends[-1 if crossing else 0](x) if self.before[crossing] else x

    def encode(self, src, mask):
        x = self.embed(self.words_in, src)
        for layer in self.lists()[0]:
            x = layer(x, mask)
        return self.ended(x, False)

    def forward(self, src, tgt):
        seen, back, crossed = self.masks(src, tgt)
        memory, y = self.encode(src, seen), self.embed(self.words_out, tgt)
        for layer in self.lists()[1]:
            y = layer(y, back, memory, crossed)
        return self.after(self.head(self.ended(y, True)))
