"""Programs in the shapes of public code, and what a recorded run of each shows: `SHAPES`.

Each is `Translator` with other parts. The names are those of no published program.
"""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.convert.foreign import StdNorm, interleaved_positions, randomized

WIDTH, HEADS, WIDE, VOCABULARIES, PAD = 24, 4, 40, (37, 43), 3
HEAD, LONGEST = WIDTH // HEADS, 31


def waves(length, width, first=0, base=10000.0):
    """Return sines and cosines in turn [L, D], of positions from `first` on."""
    place = torch.arange(first, first + length, dtype=torch.float64)[:, None]
    angle = place / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def other(base, **parts):
    """Return a class with other methods, sizes or parts."""
    return type(base.__name__, (base,), parts)


def later(length):
    """Return the mask [T, T] of the keys that a query may see."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def masks(src, tgt, pad):
    """Return the masks [B, 1, 1, S] and [B, 1, T, T], True = attend."""
    seen = (src != pad)[:, None, None]
    return seen, later(tgt.shape[1]) & (tgt != pad)[:, None, None]


class Bare(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)


class Kernel(nn.Module):
    """A matrix (inputs, outputs) that is multiplied from the right."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.kernel


class Conv1D(Kernel):
    """The same with a bias, as GPT-2's."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return super().forward(x) + self.bias


class Mixer(nn.Module):
    """An attention; its methods are what other programs do otherwise."""

    hidden = -1e9

    def __init__(self, program, crossing):
        super().__init__()
        self.heads = program.heads
        self.hold(program, program.width, crossing)

    def hold(self, program, width, crossing):
        projection, join, _ = program.products
        self.ask, self.offer, self.carry = (projection(width, width) for _ in range(3))
        self.join = join(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

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

    def attend(self, query, key, value, mask, within):
        scores = query @ key.mT / self.divisor(query)
        scores = self.scored(scores, within, mask.shape[2] == 1).masked_fill(~mask, self.hidden)
        return self.weights(scores) @ value

    def forward(self, x, y, mask):
        query, key, value = self.project(x, y)
        return self.join(self.merge(self.attend(query, key, value, mask, x is y)))


class FunctionMixer(Mixer):
    """torch's own function."""

    def attend(self, query, key, value, mask, within):
        return functional.scaled_dot_product_attention(query, key, value, mask)


class FusedMixer(FunctionMixer):
    """One matrix in the order of query, key and value; of the memory, one of key and value."""

    def hold(self, program, width, crossing):
        projection, join, _ = program.products
        if crossing:
            self.q, self.kv = projection(width, width), projection(width, 2 * width)
        else:
            self.qkv = projection(width, 3 * width)
        self.join = join(width, width)

    def project(self, x, y):
        parts = self.qkv(x).chunk(3, -1) if x is y else (self.q(x), *self.kv(y).chunk(2, -1))
        return map(self.split, parts)


class HeadsMixer(FusedMixer):
    """Rows of query, key and value of head 0, then those of head 1."""

    hidden, attend = -9e15, Mixer.attend

    def project(self, x, y):
        if x is y:
            return self.split(self.qkv(x)).chunk(3, -1)
        return self.split(self.q(x)), *self.split(self.kv(y)).chunk(2, -1)


class SlicedMixer(FunctionMixer):
    """One matrix in the order of key, query and value, of which a slice at a time is used."""

    def hold(self, program, width, crossing):
        self.kqv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def project(self, x, y):
        kernels, biases = self.kqv.weight.chunk(3), self.kqv.bias.chunk(3)
        key, query, value = map(functional.linear, (y, x, y), kernels, biases)
        return map(self.split, (query, key, value))


class NarrowMixer(FunctionMixer):
    """Its heads are together narrower than the model."""

    inner = 24

    def hold(self, program, width, crossing):
        self.to_kv, self.to_q = Bare(width, 2 * self.inner), Bare(width, self.inner)
        self.join = nn.Linear(self.inner, width)

    def project(self, x, y):
        return map(self.split, (self.to_q(x), *self.to_kv(y).chunk(2, -1)))


class ModuleMixer(nn.Module):
    """torch's module; its masks are those of hidden keys, and of later ones."""

    first = True

    def __init__(self, program, crossing):
        super().__init__()
        sizes = program.width, program.heads
        self.mha = nn.MultiheadAttention(*sizes, batch_first=self.first)

    def forward(self, x, y, mask):
        hidden, after = mask
        return self.mha(x, y, y, key_padding_mask=hidden, attn_mask=after)[0]


class HeadMixer(Mixer):
    """A Linear for each head apart."""

    def hold(self, program, width, crossing):
        super().hold(program, width, crossing)
        for name in ("ask", "offer", "carry"):
            setattr(self, name, nn.ModuleList(nn.Linear(WIDTH, HEAD) for _ in range(HEADS)))

    def project(self, x, y):
        pairs = ((self.ask, x), (self.offer, y), (self.carry, y))
        return [torch.stack([head(z) for head in heads], 1) for heads, z in pairs]


class EinsumMixer(Mixer):
    """Kernels with an axis for the heads."""

    product, axes = "bld,dhk->bhlk", (WIDTH, HEADS, HEAD)

    def hold(self, program, width, crossing):
        self.ask, self.offer, self.carry = (nn.Parameter(torch.rand(self.axes)) for _ in range(3))
        self.out = nn.Parameter(torch.rand(HEADS, HEAD, WIDTH))

    def project(self, x, y):
        pairs = ((x, self.ask), (y, self.offer), (y, self.carry))
        return [torch.einsum(self.product, *pair) for pair in pairs]

    def merge(self, x):
        return x

    def join(self, x):
        return torch.einsum("bhlk,hkd->bld", x, self.out)


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

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.offer, self.carry = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))

    def split(self, x):
        return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)

    def project(self, x, y):
        query, key, value = super().project(x, y)
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

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.ask_norm, self.offer_norm = (nn.LayerNorm(HEAD) for _ in range(2))

    def project(self, x, y):
        query, key, value = super().project(x, y)
        return self.ask_norm(query), self.offer_norm(key), value


class BucketMixer(Mixer):
    """Self-attentions add T5's bias of the distance; distances from `far` on share a bucket."""

    buckets, far = 8, 20

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
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

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.carry, self.join = nn.Linear(WIDTH, HEADS * 9), nn.Linear(HEADS * 9, WIDTH)


class RootNorm(nn.Module):
    """An RMS norm times `more` + w."""

    more = 0

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width) - self.more)

    def forward(self, x):
        scale = self.more + self.weight if self.more else self.weight
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale


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
    def __init__(self, program):
        super().__init__()
        width, wide, linear = program.width, program.wide, program.products[2]
        self.widen, self.narrow = linear(width, wide), linear(wide, width)
        self.activation = program.activation()

    def forward(self, x):
        return self.narrow(self.activation(self.widen(x)))


class GatedNetwork(Network):
    def __init__(self, program):
        super().__init__(program)
        self.gate = program.products[2](program.width, program.wide)

    def forward(self, x):
        return self.narrow(self.activation(self.gate(x)) * self.widen(x))


class HalvesNetwork(Network):
    """Both inner projections are one matrix."""

    def __init__(self, program):
        super().__init__(program)
        self.widen = nn.Linear(program.width, 2 * program.wide)

    def forward(self, x):
        x, gate = self.widen(x).chunk(2, dim=-1)
        return self.narrow(self.activation(gate) * x)


class WindowNetwork(nn.Module):
    """Convolutions whose window is one position."""

    def __init__(self, program):
        super().__init__()
        self.widen, self.narrow = nn.Conv1d(WIDTH, WIDE, 1), nn.Conv1d(WIDE, WIDTH, 1)

    def forward(self, x):
        return self.narrow(self.widen(x.mT).relu()).mT


class Layer(nn.Module):
    """One layer of `program`'s parts, with norms before or behind.

    `order` has the number of each sublayer's norm: of a layer of the encoder, and of the decoder.
    """

    order = ((0, 1), (0, 1, 2))

    def __init__(self, program, crossing):
        super().__init__()
        self.before, self.places = program.before[crossing], self.order[crossing]
        self.mixers = nn.ModuleList(program.mixer(program, n > 0) for n in range(1 + crossing))
        self.network = program.network(program)
        self.norms = nn.ModuleList(program.norm(program.width) for _ in {*self.places})

    def added(self, x, y, place):
        return x + y

    def around(self, place, x, inside):
        norm = self.norms[self.places[place]]
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


class MemoryNormLayer(Layer):
    """The decoder norms the memory; norms are used in another order than they are held."""

    order = ((1, 0), (1, 2, 0))

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.of_memory = program.norm(program.width) if crossing else None

    def forward(self, x, mask, memory=None, seen=None):
        memory = None if memory is None else self.of_memory(memory)
        return super().forward(x, mask, memory, seen)


class LearnedFactorLayer(Layer):
    """Each sublayer has a learned factor, as in ReZero."""

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.alpha = nn.ParameterList(torch.ones(1) for _ in self.norms)

    def added(self, x, y, place):
        return x + self.alpha[place] * y


class OneMixer(Layer):
    """The same attention reads the targets and then the memory."""

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        del self.mixers
        self.mixer = program.mixer(program, crossing)
        self.mixers = (self.mixer,) * 2


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

    Attributes:
        depth: Layers of the encoder, and of the decoder; so all pairs.
        products: What makes projections of attentions, their outputs, and those of networks.
        before: Whether norms stand before the sublayers.
        final: Whether a stack ends with a norm; None is `before`.
        scaled: Whether tables are multiplied by sqrt(d).
        placed: Whether positions are added.
        starts: Whether embeddings are normed.
        tied: Tables whose weight is that of the head.
    """

    width, heads, wide, vocabularies, pad = WIDTH, HEADS, WIDE, VOCABULARIES, PAD
    depth, longest = (2, 2), LONGEST
    mixer, norm, network, layer, stack = Mixer, nn.LayerNorm, Network, Layer, nn.ModuleList
    products, activation, ending = 3 * (nn.Linear,), nn.ReLU, nn.Linear
    before, final, scaled, placed, starts, tied = (False, False), None, True, True, False, ()

    def __init__(self):
        super().__init__()
        sizes = self.vocabularies
        self.words_in, self.words_out = (nn.Embedding(size, self.width) for size in sizes)
        self.readers, self.writers = (
            self.stack(self.layer(self, crossing) for _ in range(self.depth[crossing]))
            for crossing in (False, True)
        )
        self.final = self.final or self.before
        self.ends = nn.ModuleList(self.norm(self.width) for each in self.final if each)
        self.begins = nn.ModuleList(self.norm(self.width) for _ in range(2 * self.starts))
        self.head = self.ending(self.width, sizes[1]) if self.ending else None
        for name in self.tied:
            getattr(self, name).weight = self.head.weight

    def places(self, x, side):
        return waves(x.shape[1], self.width).to(x)

    def summed(self, x, side):
        x = x * math.sqrt(self.width) if self.scaled else x
        return x + self.places(x, side) if self.placed else x

    def embed(self, ids, side):
        x = self.summed((self.words_out if side else self.words_in)(ids), side)
        return self.begins[side](x) if self.starts else x

    def masks(self, src, tgt):
        seen, back = masks(src, tgt, self.pad)
        return seen, back, seen

    def logits(self, y):
        return self.head(y)

    def after(self, logits):
        return logits

    def ended(self, x, crossing):
        return self.ends[-1 if crossing else 0](x) if self.final[crossing] else x

    def encode(self, src, mask):
        x = self.embed(src, 0)
        for layer in self.readers:
            x = layer(x, mask)
        return self.ended(x, False)

    def forward(self, src, tgt):
        seen, back, crossed = self.masks(src, tgt)
        memory, y = self.encode(src, seen), self.embed(tgt, 1)
        for layer in self.writers:
            y = layer(y, back, memory, crossed)
        return self.after(self.logits(self.ended(y, True)))


class Modern(Translator):
    """The blocks of language models of today."""

    mixer, norm, layer = GroupedMixer, other(RootNorm, more=1), SandwichLayer
    before, scaled, placed = (True, True), False, False


class RowMasks(Translator):
    """Rows of padding see nothing either."""

    def masks(self, src, tgt):
        rows, columns = (((x != self.pad)[:, None, :, None]) for x in (tgt, src))
        return columns & columns.mT, rows & rows.mT & later(tgt.shape[1]), rows & columns.mT


class ZeroedRows(Translator):
    """Rows of padding are zero behind the embeddings and behind each layer."""

    def encode(self, src, mask):
        kept = mask[:, 0, 0, :, None]
        x = self.embed(src, 0) * kept
        for layer in self.readers:
            x = layer(x, mask) * kept
        return x


class PaddedInside(Translator):
    """Both sides are padded by four tokens; the logits are cut."""

    def forward(self, src, tgt):
        src, tgt = (functional.pad(ids, (0, 4), value=self.pad) for ids in (src, tgt))
        return super().forward(src, tgt)[:, :-4]


class Timed(Translator):
    """Sinusoids in a buffer [1, L, D]."""

    saved = True

    def __init__(self):
        super().__init__()
        self.register_buffer("timing", self.table()[None], persistent=self.saved)

    def table(self):
        return interleaved_positions(self.longest, self.width)

    def places(self, x, side):
        return self.timing[:, : x.shape[1]]


class Seq2SeqTransformer(Timed):
    """Embeddings and a head around nn.Transformer, with its two final norms."""

    longest = 50

    def __init__(self):
        super().__init__()
        del self.readers, self.writers
        self.core = nn.Transformer(WIDTH, HEADS, 2, 2, WIDE, batch_first=True)

    def forward(self, src, tgt):
        hidden, back = src == self.pad, ~later(tgt.shape[1])
        x, y = self.embed(src, 0), self.embed(tgt, 1)
        keys = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        keys["tgt_key_padding_mask"] = tgt == self.pad
        return self.head(self.core(x, y, tgt_mask=back, **keys))


class LearnedSides(Translator):
    """Learned tables of positions, one for each side, from row `first` on."""

    first = 0

    def __init__(self):
        super().__init__()
        self.places_in, self.places_out = (nn.Embedding(self.longest, self.width) for _ in range(2))

    def places(self, x, side):
        table = self.places_out if side else self.places_in
        return table.weight[self.first : self.first + x.shape[1]]


class LearnedPlaces(LearnedSides):
    """One learned table of positions, which both sides hold under a name of their own."""

    longest = 29

    def __init__(self):
        super().__init__()
        self.places_out = self.places_in


class BareSides(Translator):
    """Learned positions that are parameters [1, L, D]."""

    def __init__(self):
        super().__init__()
        shape = 1, self.longest, self.width
        self.src_pos, self.tgt_pos = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def places(self, x, side):
        return (self.tgt_pos if side else self.src_pos)[:, : x.shape[1]]


class BufferFromOne(Timed):
    """A saved table of sinusoids whose row 0 is not used."""

    def places(self, x, side):
        return self.timing[:, 1 : 1 + x.shape[1]]


class Buffers(Translator):
    """Buffers that a forward computes with: frequencies, nothing, a table in half precision."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_timescales", 10000 ** -(torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("memo", torch.empty(0))
        self.register_buffer("timing", waves(LONGEST, WIDTH).half())
        self.register_buffer("position_ids", torch.arange(9)[None])

    def places(self, x, side):
        return self.timing[: x.shape[1]].to(x)


class Wrapped(Translator):
    """What trainers put around a model: its average, torch.compile, and the loss beside it."""

    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("n_averaged", torch.tensor(7))
        self.module, self.criterion = nn.Module(), nn.CrossEntropyLoss(torch.ones(VOCABULARIES[1]))
        self.module._orig_mod = Translator()

    def forward(self, src, tgt):
        return self.module._orig_mod(src, tgt)


class LayerMemory(Translator):
    """Each layer of the decoder reads the output of its layer of the encoder."""

    def forward(self, src, tgt):
        seen, back, crossed = self.masks(src, tgt)
        x, y = self.embed(src, 0), self.embed(tgt, 1)
        for reader, writer in zip(self.readers, self.writers, strict=True):
            x = reader(x, seen)
            y = writer(y, back, x, crossed)
        return self.head(y)


class Shifted(Translator):
    """Puts BOS before the targets and drops the last one."""

    def forward(self, src, tgt):
        return super().forward(src, torch.cat([torch.full_like(tgt[:, :1], 2), tgt[:, :-1]], 1))


class Features(Translator):
    """Sources are vectors of features [B, S, 11]."""

    def __init__(self):
        super().__init__()
        self.words_in = nn.Linear(11, WIDTH)

    def masks(self, src, tgt):
        return super().masks(torch.full(src.shape[:2], -1), tgt)


class Tongues(Translator):
    """A third table, of languages: the first token tells the row, or an argument."""

    tongue = None

    def __init__(self):
        super().__init__()
        self.tongues = nn.Embedding(5, WIDTH)

    def embed(self, ids, side):
        row = ids[:, :1] % 5 if self.tongue is None else torch.tensor(self.tongue).expand_as(ids)
        return super().embed(ids, side) + self.tongues(row)


def source_alone(self, src, tgt):
    """Return masks of the source's padding, and of later targets, but not of their padding."""
    seen, _ = masks(src, tgt, self.pad)
    return seen, later(tgt.shape[1])[None, None], seen


def of_modules(self, src, tgt):
    """Return what `ModuleMixer` takes: hidden keys [B, L], and later ones [T, T]."""
    return (src == self.pad, None), (tgt == self.pad, ~later(tgt.shape[1])), (src == self.pad, None)


def halves(self):
    table = waves(self.longest, self.width).float()
    return torch.cat([table[:, ::2], table[:, 1::2]], 1)


def layer_norm(**options):
    return staticmethod(partial(nn.LayerNorm, **options))


TABLES = ("words_in", "words_out")


class FusedRows(LearnedSides):
    width, heads, wide, vocabularies, depth, longest, pad = 32, 4, 128, (53, 53), (3, 2), 23, 0
    mixer, norm, activation, ending = FusedMixer, layer_norm(bias=False), nn.GELU, Bare
    products, tied, scaled, before, masks = 3 * (Bare,), TABLES, False, (True, True), source_alone


class KeysBeforeQueries(Timed):
    width, heads, wide, vocabularies, depth, pad = 20, 5, 36, (41, 41), (2, 3), 1
    mixer, norm, table = SlicedMixer, layer_norm(eps=1e-6), halves


class FusedColumns(LearnedSides):
    """No padding is masked at all; the output is tied with the target's table."""

    width, heads, wide, longest, pad = 36, 3, 60, 17, 0
    mixer, products, ending, scaled, before = FusedMixer, 3 * (Conv1D,), None, False, (True, True)
    activation = staticmethod(partial(nn.GELU, approximate="tanh"))

    def masks(self, src, tgt):
        return None, later(tgt.shape[1])[None, None], None

    def logits(self, y):
        return y @ self.words_out.weight.T


class FusedHeads(Timed):
    """Something else is returned beside the logits."""

    width, heads, wide, vocabularies, longest, pad, saved = 28, 7, 44, (43, 47), 160, 0, False
    mixer, layer = HeadsMixer, other(Layer, order=((0, 1), (0, 2, 1)))
    activation = staticmethod(partial(nn.ReLU, inplace=True))

    def after(self, logits):
        return logits, logits.softmax(-1)


class Clones(Timed):
    """Norms by the deviation, log-probabilities."""

    vocabularies, longest, pad = (31, 37), 50, 0
    mixer, before = FunctionMixer, (True, True)
    norm = staticmethod(partial(StdNorm, epsilon=1e-6, scale="a_2", bias="b_2"))

    def after(self, logits):
        return logits.log_softmax(-1)


class MeanFree(Translator):
    heads, wide, vocabularies, depth, pad = 3, 44, (33, 51), (2, 3), 0
    mixer, norm, network, activation = FunctionMixer, RootNorm, GatedNetwork, nn.SiLU
    products, ending, scaled, before = 3 * (Bare,), Bare, False, (True, True)


class Kernels(LearnedSides):
    """Kernels (inputs, outputs) everywhere, also of the output; normed embeddings."""

    width, wide, vocabularies, longest, pad = 16, 48, (31, 31), 19, 0
    mixer, norm, activation = FunctionMixer, layer_norm(eps=1e-12), nn.GELU
    products, starts, ending, scaled = (Kernel, Kernel, Conv1D), True, Conv1D, False


class Letters(Translator):
    """No positions, and no norms at the ends."""

    width, heads, wide, vocabularies, depth, pad = 42, 6, 50, (59, 67), (3, 2), 0
    mixer, norm, layer, activation = FunctionMixer, layer_norm(eps=1e-3), MemoryNormLayer, nn.SiLU
    products, before, final = (Bare, nn.Linear, nn.Linear), (True, True), (False, False)
    placed = False


class UnnormedDecoder(Timed):
    width, heads, wide, vocabularies, depth, longest, pad = 30, 6, 30, (37, 61), (2, 3), 27, 1
    mixer, masks, activation, ending = ModuleMixer, of_modules, nn.GELU, Bare
    before, final = (True, True), (True, False)


class SequenceFirst(Timed):
    """Everything is [L, B, D], the logits [T, B, V] too."""

    width, heads, wide, vocabularies, depth, longest, pad = 22, 2, 34, (39, 45), (3, 2), 34, 0
    mixer, masks = other(ModuleMixer, first=False), of_modules
    layer = other(Layer, order=((1, 0), (2, 0, 1)))

    def __init__(self):
        super().__init__()
        self.timing = self.timing.swapaxes(0, 1).contiguous()

    def places(self, x, side):
        return self.timing[: len(x)]

    def embed(self, ids, side):
        return super().embed(ids.T, side)


class NormInside(Timed):
    """One table for both sides and the output, whose logits are scaled down."""

    width, heads, wide, vocabularies, longest, pad = 40, 2, 62, (57, 57), 44, 0
    mixer, norm, products = FunctionMixer, layer_norm(eps=1e-6), (Bare, Bare, nn.Linear)
    layer = other(Layer, added=lambda self, x, y, place: y + x)
    starts, ending, tied, scaled = True, Bare, TABLES, False

    def after(self, logits):
        return logits * self.width**-0.5


class Narrow(BareSides):
    width, heads, wide, vocabularies, longest, pad = 26, 3, 38, (35, 49), 21, 0
    mixer, network, activation = NarrowMixer, HalvesNetwork, nn.GELU
    scaled, before, masks = False, (True, True), source_alone


class Refusal(NamedTuple):
    """What a refusal says, and what it names."""

    text: str
    line: str = ""  # a piece of it
    module: str = ""


class Shape(NamedTuple):
    """A program and what is true of it."""

    build: type[nn.Module]
    fields: Mapping[str, Any] = MappingProxyType({})  # of the config, beside its sizes
    refused: Refusal | None = None  # None for a program that is found
    dropped: tuple[str, ...] = ()  # tensors that its user drops
    hides: bool = True  # whether it hides the padding of the source

    def module(self):
        """Return the module without dropout, no parameter at its starting value."""
        return randomized(self.build()).eval()

    @property
    def expected(self):
        """The fields of its config that are known."""
        program = self.build
        return {
            "src_vocab_size": program.vocabularies[0],
            "tgt_vocab_size": program.vocabularies[1],
            "pad_id": program.pad,
            "d_model": program.width,
            "num_heads": program.heads,
            "d_ff": program.wide,
            "num_encoder_layers": program.depth[0],
            "num_decoder_layers": program.depth[1],
            **self.fields,
        }


def refused(build, *words):
    """Return a program that no config has, or no layout."""
    return Shape(build, refused=Refusal(*words))


def mixed(*bases, **parts):
    """Return a program with another attention."""
    return other(Translator, mixer=other(*bases, **parts))


def layered(layer, **parts):
    """Return a program with other layers."""
    return other(Translator, layer=layer, **parts)


def added(add):
    """Return a program with another addition of a sublayer's input and output."""
    return layered(other(Layer, added=lambda self, x, y, place: add(x, y)))


def placed(**options):
    """Return a program with other sinusoids."""
    return other(Translator, places=lambda self, x, side: waves(x.shape[1], WIDTH, **options).to(x))


def normed(**parts):
    """Return a program with another norm."""
    return other(Translator, norm=other(VarianceNorm, **parts))


def capped(self, scores, within, sees_all):
    return 0.8 * (scores / 0.8).tanh()


def slopes(self, scores, within, sees_all):
    """Lower the scores of far keys, with a slope for each head."""
    heads, queries, keys = scores.shape[1:]
    slope = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    return scores - (slope[:, None, None] * distance).to(scores)


def bent(self, x, y):
    """Put a relu behind the projections of queries, keys and values."""
    return [product.relu() for product in Mixer.project(self, x, y)]


def side_by_side(self, x, mask, memory=None, seen=None):
    """Pre-norm: both attentions read the layer's input."""
    if memory is None:
        return Layer.forward(self, x, mask)
    inner, outer = self.norms[0](x), self.norms[1](x)
    x = x + self.mixers[0](inner, inner, mask) + self.mixers[1](outer, memory, seen)
    return self.around(-1, x, self.network)


def alone(self, src, tgt):
    """Return the logits of a decoder alone: a language model."""
    y = self.embed(tgt, 1)
    for layer in self.readers:
        y = layer(y, later(tgt.shape[1])[None, None])
    return self.head(y)


def by_width(self, query):
    return math.sqrt(WIDTH)


LEARNED = {"embedding_scale": "none", "positions": "learned"}
NO_BIAS = {"qkv_bias": False, "attention_output_bias": False}
NO_LAYER_BIAS = NO_BIAS | {"feed_forward_bias": False, "norm_bias": False}
SHARED = {"token_embeddings": "shared", "output_projection": "tied", "output_bias": False}
PRE_NORM = {"norm_placement": "pre", "final_norm": True}
UNPLACED, BOTH = {"scaled": False, "placed": False}, {"before": (True, True)}
ROTARY = {"positions": "rotary", "embedding_scale": "none"}
FROM_ONE = {"positions": "learned", "position_offset": 1, "max_length": LONGEST - 1}
HEADS_FIRST = {"product": "bld,hdk->bhlk", "axes": (HEADS, WIDTH, HEAD)}
SUM = "+ self.places(x"  # the line of the embeddings
ONE_LAYER = other(Translator, stack=staticmethod(lambda layers: nn.ModuleList([next(layers)] * 2)))
SCORES = "scores = query @ key.mT"
MIXER = "readers.0.mixers.0"
SHAPES = {
    "fused_rows": Shape(
        FusedRows,
        PRE_NORM | SHARED | LEARNED | NO_LAYER_BIAS | {"max_length": 23, "activation": "gelu"},
    ),
    "keys_before_queries": Shape(
        KeysBeforeQueries,
        {"max_length": 31, "positions": "sinusoidal_halves", "norm_epsilon": 1e-6},
    ),
    "fused_columns": Shape(
        FusedColumns,
        PRE_NORM
        | LEARNED
        | {"max_length": 17, "output_projection": "tied", "output_bias": False}
        | {"activation": "gelu_tanh"},
        hides=False,
    ),
    "fused_heads": Shape(FusedHeads),
    "clones": Shape(
        Clones, PRE_NORM | {"max_length": 50, "norm": "std_norm", "norm_epsilon": 1e-6}
    ),
    "mean_free": Shape(
        MeanFree,
        PRE_NORM
        | NO_LAYER_BIAS
        | {"gated_feed_forward": True, "embedding_scale": "none", "output_bias": False}
        | {"activation": "silu", "norm": "rms_norm", "norm_epsilon": 1e-6},
    ),
    "kernels": Shape(
        Kernels,
        LEARNED
        | NO_BIAS
        | {"max_length": 19, "embedding_norm": True, "activation": "gelu", "norm_epsilon": 1e-12},
    ),
    "letters": Shape(
        Letters,
        {"positions": "none", "qkv_bias": False, "activation": "silu", "memory_norm": True}
        | {"norm_placement": "pre", "norm_epsilon": 1e-3},
    ),
    "unnormed_decoder": Shape(
        UnnormedDecoder,
        PRE_NORM
        | {"max_length": 27, "output_bias": False, "activation": "gelu"}
        | {"decoder_final_norm": False},
    ),
    "sequence_first": Shape(SequenceFirst, {"max_length": 34}),
    "norm_inside": Shape(
        NormInside,
        SHARED
        | NO_BIAS
        | {"max_length": 44, "embedding_scale": "none", "embedding_norm": True}
        | {"output_scale": "inverse_sqrt_d_model", "norm_epsilon": 1e-6},
    ),
    "wrapped": Shape(
        Narrow,
        PRE_NORM
        | LEARNED
        | {"gated_feed_forward": True, "d_kv": 8, "max_length": 21, "qkv_bias": False}
        | {"activation": "gelu"},
    ),
    "usual": Shape(Translator),
    "modern": Shape(
        Modern,
        {"norm": "zero_centered_rms_norm", "norm_epsilon": 1e-6, "num_kv_heads": 2}
        | {"norm_placement": "sandwich", "final_norm": True}
        | ROTARY,
    ),
    "row_masks": Shape(RowMasks),
    "zeroed_rows": Shape(ZeroedRows),
    "padded_inside": Shape(PaddedInside),
    "seq2seq_transformer": Shape(Seq2SeqTransformer, {"final_norm": True, "max_length": 50}),
    "heads_apart": Shape(other(Translator, mixer=HeadMixer)),
    "einsum_kernels": Shape(mixed(EinsumMixer), NO_BIAS),
    "window_of_one": Shape(other(Translator, network=WindowNetwork)),
    "scaled_by_width": Shape(mixed(Mixer, divisor=by_width), {"attention_scale": "d_model"}),
    "post_then_pre": Shape(
        other(Translator, before=(False, True)),
        {"norm_placement": "post", "decoder_norm_placement": "pre", "final_norm": False}
        | {"decoder_final_norm": True},
    ),
    "pre_then_post": Shape(
        other(Translator, before=(True, False)),
        {"norm_placement": "pre", "decoder_norm_placement": "post", "final_norm": True}
        | {"decoder_final_norm": False},
    ),
    "unbiased_variance": Shape(normed(), {"norm": "unbiased_layer_norm"}),
    "epsilon_outside": Shape(
        normed(divisor=lambda self, x: x.std(-1, keepdim=True, unbiased=False) + 1e-6),
        {"norm": "biased_std_norm", "norm_epsilon": 1e-6},
    ),
    "normed_queries": Shape(mixed(NormedMixer), {"query_key_norm": True}),
    "logit_cap": Shape(
        other(Translator, after=lambda self, logits: 5 * (logits / 5).tanh()),
        {"logit_softcap": 5.0},
    ),
    "score_cap": Shape(mixed(Mixer, scored=capped), {"attention_softcap": 0.8}),
    "log_softmax": Shape(other(Translator, after=lambda self, logits: logits.log_softmax(-1))),
    "rotary": Shape(
        other(mixed(RotaryMixer, theta=500.0), **UNPLACED), {"rotary_theta": 500} | ROTARY
    ),
    "windows": Shape(mixed(WindowMixer), {"sliding_window": 3}),
    "buckets": Shape(
        other(mixed(BucketMixer), **UNPLACED),
        {"positions": "relative", "relative_attention_bias": "per_layer"}
        | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
    "tied": Shape(
        other(Translator, vocabularies=(43, 43), tied=TABLES), SHARED | {"output_bias": True}
    ),
    "one_norm": Shape(layered(other(Layer, order=((0, 0), (0, 0, 0))))),
    "one_norm_of_attentions": Shape(layered(other(Layer, order=((0, 1), (0, 0, 1))))),
    "one_place_table": Shape(LearnedPlaces, {"positions": "learned", "max_length": 29}),
    "learned_from_one": Shape(other(LearnedSides, first=1), FROM_ONE),
    # No config computes the table: it is taken for a learned one, of both sides.
    "buffer_from_one": Shape(BufferFromOne, FROM_ONE),
    "buffers": Shape(Buffers, {"max_length": LONGEST}),
    "wrapped_checkpoint": Shape(Wrapped, dropped=("criterion.weight",)),
    "shifted_inside": Shape(Shifted, {"bos_id": 2}),
    # No config has these, or no layout.
    "shared_layers": refused(ONE_LAYER, "share weights", "self.ask(x)", f"{MIXER}.ask"),
    "one_attention": refused(
        layered(OneMixer), "share weights", "self.ask(x)", "writers.0.mixer.ask"
    ),
    # A row transposes first and reshapes then: [H, D, K] would need the other order.
    "einsum_heads_first": refused(
        mixed(EinsumMixer, **HEADS_FIRST), "order of axes", "self.product, *pair", MIXER
    ),
    "decoder_alone": refused(other(Translator, forward=alone), "nothing reads the source ids"),
    "features": refused(
        Features, "the source is no ids but features", "self.words_in)(ids)", "words_in"
    ),
    "scaled_sum": refused(
        other(
            Translator, summed=lambda self, x, side: (x + self.places(x, side)) * math.sqrt(WIDTH)
        ),
        "sinusoids times 4.89898",
        SUM,
    ),
    "from_one": refused(placed(first=1), "positions from 1", SUM),
    "base_1000": refused(placed(base=1000), "1,000 in place of 10,000", SUM),
    "tongue_of_first_token": refused(Tongues, "third table", "self.tongues(row)"),
    "tongue_of_argument": refused(other(Tongues, tongue=2), "third table", "self.tongues(row)"),
    "halved_sublayers": refused(
        added(lambda x, y: x + 0.5 * y), "multiplied by 0.5", "0.5 * y", "readers.0"
    ),
    "deep_residual": refused(
        added(lambda x, y: 1.7 * x + y), "the input of each sublayer is", "1.7 * x", "readers.0"
    ),
    "rezero": refused(
        layered(LearnedFactorLayer, **BOTH),
        "readers.0.alpha.0",
        "self.alpha[place] * y",
        "readers.0",
    ),
    "side_by_side": refused(
        layered(other(Layer, forward=side_by_side), **BOTH),
        "two sublayers read one input",
        "self.mixers[1](outer",
        "writers.0",
    ),
    "layer_memory": refused(
        LayerMemory, "the output of the same encoder layer", SCORES, "writers.1.mixers.1"
    ),
    "convolution": refused(
        layered(ConvolvedLayer), "one product alone", "self.along(x.mT)", "readers.0.along"
    ),
    "logit_scale": refused(
        other(Translator, after=lambda self, logits: 7 * logits),
        "multiplied by 7",
        "7 * logits",
        "head",
    ),
    "view_of_heads": refused(
        mixed(Mixer, split=lambda self, x: x.reshape(len(x), HEADS, x.shape[1], -1)),
        "without a transpose",
        SCORES,
        MIXER,
    ),
    "softmax_of_queries": refused(
        mixed(Mixer, weights=lambda self, scores: scores.softmax(-2)),
        "the softmax is over the queries",
        "softmax(-2)",
        MIXER,
    ),
    "rotary_pairs": refused(
        other(mixed(RotaryMixer, halves=False), **UNPLACED),
        "pairs of columns",
        "one * cos - two * sin",
        MIXER,
    ),
    "linear_bias": refused(
        mixed(Mixer, scored=slopes), "numbers that no weight has", "slope[:, None, None]", MIXER
    ),
    "relu_projections": refused(
        mixed(Mixer, project=bent), "more than a product", "product.relu()", MIXER
    ),
    "wide_values": Shape(other(Translator, mixer=WideValues), {"d_v": 9}),
    "far_window": refused(
        mixed(WindowMixer, reach=(6, 999)), "positions that no config has, {", "masked_fill", MIXER
    ),
}
