"""Small programs in the shapes that public code has, and what is true of each.

Each is a `Translator` with one thing of its own; the names are those of no published program. The
first half can be expressed by a config and a layout, the rest by none: `SHAPES` has both.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

WIDTH, HEADS, WIDE, VOCABULARIES = 24, 4, 40, (37, 43)


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

    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.ask, self.offer, self.carry, self.join = (nn.Linear(width, width) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def project(self, x, y):
        return self.split(self.ask(x)), self.split(self.offer(y)), self.split(self.carry(y))

    def divisor(self, query):
        return math.sqrt(query.shape[-1])

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, x, y, mask):
        query, key, value = self.project(x, y)
        scores = (query @ key.mT / self.divisor(query)).masked_fill(~mask, -1e9)
        return self.join(self.merge(self.weights(scores) @ value))


class HeadMixer(Mixer):
    """A Linear for each head apart."""

    def __init__(self):
        super().__init__()
        for name in ("ask", "offer", "carry"):
            heads = (nn.Linear(WIDTH, WIDTH // HEADS) for _ in range(HEADS))
            setattr(self, name, nn.ModuleList(heads))

    def project(self, x, y):
        pairs = ((self.ask, x), (self.offer, y), (self.carry, y))
        return [torch.stack([head(z) for head in heads], 1) for heads, z in pairs]


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


class CappedMixer(Mixer):
    """Its scores are capped before the mask."""

    def forward(self, x, y, mask):
        query, key, value = self.project(x, y)
        scores = 0.8 * (query @ key.mT / self.divisor(query) / 0.8).tanh()
        scores = scores.masked_fill(~mask, -1e9)
        return self.join(self.merge(self.weights(scores) @ value))


class WindowMixer(Mixer):
    """Self-attentions see three positions on each side, those of targets two earlier ones."""

    def forward(self, x, y, mask):
        if x is not y:
            return super().forward(x, y, mask)
        place = torch.arange(x.shape[1])
        distance = place[:, None] - place
        targets = mask.shape[2] > 1
        return super().forward(x, y, mask & (distance.abs() < (3 if targets else 4)))


class NormedMixer(Mixer):
    """Queries and keys are normed, each head for itself."""

    def __init__(self):
        super().__init__()
        self.ask_norm, self.offer_norm = (nn.LayerNorm(WIDTH // HEADS) for _ in range(2))

    def project(self, x, y):
        query, key, value = super().project(x, y)
        return self.ask_norm(query), self.offer_norm(key), value


class GroupedMixer(RotaryMixer):
    """Two heads of queries read one of keys and values."""

    def __init__(self):
        super().__init__()
        self.offer, self.carry = (nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))

    def project(self, x, y):
        pairs = zip((self.offer, self.carry), (HEADS // 2,) * 2, strict=True)
        query, within = self.split(self.ask(x)), x is y
        key, value = (part(y).unflatten(-1, (heads, -1)).transpose(1, 2) for part, heads in pairs)
        query, key = (self.turn(query), self.turn(key)) if within else (query, key)
        return query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)


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

    PARTS = ("attention", "cross_attention", "feed_forward")

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        parts = self.PARTS if crossing else self.PARTS[::2]
        names = [f"{when}_{part}_norm" for part in parts for when in ("pre", "post")]
        self.norms = nn.ModuleDict({name: program.norm(WIDTH) for name in names})

    def around(self, place, x, inside):
        before, behind = (
            self.norms[f"{when}_{self.PARTS[place]}_norm"] for when in ("pre", "post")
        )
        return x + behind(inside(before(x)))


class LearnedFactorLayer(Layer):
    """Each sublayer has a learned factor, as in ReZero."""

    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        self.alpha = nn.ParameterList(torch.ones(1) for _ in self.norms)

    def added(self, x, y, place):
        return x + self.alpha[place] * y


class Translator(nn.Module):
    """Post-norm layers, tables times sqrt(d), sinusoids, a head: what a program does otherwise.

    `before` tells whether norms stand before the sublayers: of the encoder, of the decoder.
    """

    mixer, norm, network, layer = Mixer, nn.LayerNorm, Network, Layer
    before, pad = (False, False), 0

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


class Modern(Translator):
    """The blocks of language models of today."""

    mixer, norm, layer, before = GroupedMixer, RootNorm, SandwichLayer, (True, True)

    def summed(self, x):
        return x


class OneLayer(Translator):
    def stack(self, crossing):
        return nn.ModuleList([self.layer(self, crossing)] * 2)


class RowMasks(Translator):
    """Rows of padding see nothing either."""

    def masks(self, src, tgt):
        rows, columns = (((x != self.pad)[:, None, :, None]) for x in (tgt, src))
        return columns & columns.mT, rows & rows.mT & later(tgt.shape[1]), rows & columns.mT


class Seq2SeqTransformer(Translator):
    """Embeddings and a head around nn.Transformer, with its two final norms; PAD_IDX is 1."""

    pad = 1

    def __init__(self):
        nn.Module.__init__(self)
        self.words_in, self.words_out = (nn.Embedding(size, WIDTH) for size in VOCABULARIES)
        self.register_buffer("timing", waves(50, WIDTH).float()[None])
        self.core = nn.Transformer(WIDTH, HEADS, 2, 2, WIDE, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARIES[1])

    def places(self, x):
        return self.timing[:, : x.shape[1]]

    def forward(self, src, tgt):
        hidden, back = src == self.pad, ~later(tgt.shape[1])
        x, y = self.embed(self.words_in, src), self.embed(self.words_out, tgt)
        return self.head(
            self.core(
                *(x, y),
                tgt_mask=back,
                src_key_padding_mask=hidden,
                tgt_key_padding_mask=tgt == self.pad,
                memory_key_padding_mask=hidden,
            )
        )


class ByPart(Translator):
    """Lists of parts side by side: the attentions of a stack, its networks, its norms."""

    def __init__(self):
        super().__init__()
        self.hidden = tuple(map(list, super().lists()))  # named by the lists of parts alone
        del self.readers, self.writers
        for side, layers in zip(("reader", "writer"), self.hidden, strict=True):
            for part in ("mixers", "norms"):
                for number in range(len(getattr(layers[0], part))):
                    parts = nn.ModuleList(getattr(layer, part)[number] for layer in layers)
                    setattr(self, f"{side}_{part}_{'abc'[number]}", parts)
            setattr(self, f"{side}_ffns", nn.ModuleList(layer.network for layer in layers))

    def lists(self):
        return self.hidden


class Interleaved(Translator):
    """One list for both stacks: `layers.0` reads, `layers.1` writes, and so on."""

    def __init__(self):
        super().__init__()
        pairs = zip(*super().lists(), strict=True)
        self.layers = nn.ModuleList(layer for pair in pairs for layer in pair)
        del self.readers, self.writers

    def lists(self):
        return self.layers[::2], self.layers[1::2]


class LearnedPlaces(Translator):
    """One learned table of positions, which both sides hold under a name of their own."""

    def __init__(self):
        super().__init__()
        self.places_in = self.places_out = nn.Embedding(29, WIDTH)

    def places(self, x):
        return self.places_in.weight[: x.shape[1]]


class Buffers(Translator):
    """Buffers that a forward computes with: frequencies, nothing, a table in half precision."""

    def __init__(self):
        super().__init__()
        steps = torch.arange(0, WIDTH, 2) / WIDTH
        self.register_buffer("inv_timescales", 10000**-steps)
        self.register_buffer("memo", torch.empty(0))
        self.register_buffer("timing", waves(31, WIDTH).half())
        self.register_buffer("rates", torch.linspace(0.3, 1.1, 5))

    def places(self, x):
        return self.timing[: x.shape[1]].to(x)


class Wrapped(nn.Module):
    """What trainers put around a model: its average, torch.compile, and the loss beside it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n_averaged", torch.tensor(7))
        self.module, self.criterion = nn.Module(), nn.CrossEntropyLoss(torch.ones(VOCABULARIES[1]))
        self.module._orig_mod = Translator()

    def forward(self, src, tgt):
        return self.module._orig_mod(src, tgt)


class LearnedScale(Translator):
    """A learned scalar scales the positions."""

    def __init__(self):
        super().__init__()
        self.weight_of_places = nn.Parameter(torch.ones(1))

    def summed(self, x):
        return x * math.sqrt(WIDTH) + self.weight_of_places * self.places(x)


class LayerMemory(Translator):
    """Each layer of the decoder reads the output of its layer of the encoder."""

    def forward(self, src, tgt):
        seen, back, crossed = self.masks(src, tgt)
        x, y = self.embed(self.words_in, src), self.embed(self.words_out, tgt)
        for reader, writer in zip(self.readers, self.writers, strict=True):
            x = reader(x, seen)
            y = writer(y, back, x, crossed)
        return self.head(y)


class Shifted(Translator):
    """Puts BOS before the targets and drops the last one."""

    def forward(self, src, tgt):
        return super().forward(src, torch.cat([torch.full_like(tgt[:, :1], 2), tgt[:, :-1]], 1))


class LearnedTemperature(Translator):
    def __init__(self):
        super().__init__()
        self.sharpness = nn.Parameter(torch.ones(1))

    def after(self, logits):
        return logits * self.sharpness


class Reader(Translator):
    """An encoder alone."""

    def __init__(self):
        super().__init__()
        self.words_in, self.words_out, self.writers = self.words_out, None, None

    def forward(self, src, tgt):
        return self.head(self.encode(tgt, (tgt != 0)[:, None, None]))


class Writer(Translator):
    """A decoder alone: a language model."""

    def __init__(self):
        super().__init__()
        self.writers = self.words_in = None

    def forward(self, src, tgt):
        y = self.embed(self.words_out, tgt)
        for layer in self.readers:
            y = layer(y, later(tgt.shape[1]))
        return self.head(y)


class Shape(NamedTuple):
    """A program, what the sentence that refuses it says, and tensors that its user drops.

    The sentence is "" for a program that is found.
    """

    build: type[nn.Module]
    refused: str = ""
    dropped: tuple[str, ...] = ()


def root(self, x):
    return (x + self.places(x)) * math.sqrt(WIDTH)


def view(self, x):
    return x.reshape(len(x), self.heads, x.shape[1], -1)


def unview(self, x):
    return x.reshape(len(x), x.shape[2], -1)


def by_width(self, query):
    return math.sqrt(self.ask.in_features)


def biased(self, x):
    return x.std(-1, keepdim=True, unbiased=False) + 1e-6


def mixed(*bases, **parts):
    """Return a translator with another attention."""
    return other(Translator, mixer=other(*bases, **parts))


def added(add, **parts):
    """Return a translator with another addition of a sublayer's input and output."""
    return other(Translator, layer=other(Layer, added=lambda self, x, y, place: add(x, y)), **parts)


def placed(summed=Translator.summed, **options):
    """Return a translator with another sum of embeddings and positions, or other sinusoids."""
    places = lambda self, x: waves(x.shape[1], WIDTH, **options).to(x)  # noqa: E731
    return other(Translator, places=places, summed=summed)


UNPLACED = {"summed": lambda self, x: x}
SHAPES = {
    # Found, with a config and a layout; or refused because a training in JAX would part from it.
    "shared_layers": Shape(OneLayer, "share"),
    "unbiased_variance": Shape(other(Translator, norm=VarianceNorm), "near, not equal"),
    "row_masks": Shape(RowMasks),
    "seq2seq_transformer": Shape(Seq2SeqTransformer),
    "scaled_by_width": Shape(mixed(Mixer, divisor=by_width)),
    "post_then_pre": Shape(other(Translator, before=(False, True))),
    "pre_then_post": Shape(other(Translator, before=(True, False))),
    "epsilon_outside": Shape(other(Translator, norm=other(VarianceNorm, divisor=biased))),
    "window_of_one": Shape(other(Translator, network=WindowNetwork)),
    "heads_apart": Shape(other(Translator, mixer=HeadMixer)),
    "by_part": Shape(ByPart),
    "interleaved": Shape(Interleaved),
    "one_place_table": Shape(LearnedPlaces),
    "buffers": Shape(Buffers),
    "wrapped_checkpoint": Shape(Wrapped, dropped=("criterion.weight",)),
    "modern": Shape(Modern),
    "logit_cap": Shape(other(Translator, after=lambda self, logits: 5 * (logits / 5).tanh())),
    "score_cap": Shape(mixed(CappedMixer)),
    "rotary_halves": Shape(other(mixed(RotaryMixer), **UNPLACED)),
    "rotary_theta": Shape(other(mixed(RotaryMixer, theta=500.0), **UNPLACED)),
    "windows": Shape(mixed(WindowMixer)),
    "normed_queries": Shape(mixed(NormedMixer), "query_key_norm=True"),
    # No config has these.
    "scaled_sum": Shape(placed(root), "the sum of embedding and positions"),
    "from_one": Shape(placed(first=1), "counts positions from 1"),
    "learned_place_scale": Shape(LearnedScale, "multiplies the positions"),
    "place_scale": Shape(
        placed(lambda self, x: x * math.sqrt(WIDTH) + 0.3 * self.places(x)),
        "multiplies the positions",
    ),
    "base_1000": Shape(placed(base=1000), "1,000 in place of 10,000"),
    "halved_sublayers": Shape(added(lambda x, y: x + 0.5 * y), "multiplies the output of each"),
    "deep_residual": Shape(added(lambda x, y: 1.7 * x + y), "multiplies the input of each"),
    "rezero": Shape(
        other(Translator, layer=LearnedFactorLayer, before=(True, True)),
        "multiplies the output of each",
    ),
    "shifted_inside": Shape(Shifted, "shifts the targets"),
    "temperature": Shape(LearnedTemperature, "multiplies the logits"),
    "logit_scale": Shape(
        other(Translator, after=lambda self, logits: 7 * logits), "multiplies the logits"
    ),
    "layer_memory": Shape(LayerMemory, "the output of the same encoder layer"),
    "view_of_heads": Shape(mixed(Mixer, split=view), "without a transpose"),
    "view_both_ways": Shape(mixed(Mixer, split=view, merge=unview), "without a transpose"),
    "softmax_of_queries": Shape(
        mixed(Mixer, weights=lambda self, scores: scores.softmax(-2)), "softmax over the queries"
    ),
    "softmax_of_heads": Shape(
        mixed(Mixer, weights=lambda self, scores: scores.softmax(1)), "softmax over the heads"
    ),
    "rotary_pairs": Shape(other(mixed(RotaryMixer, halves=False), **UNPLACED), "rotary positions"),
    "encoder_alone": Shape(Reader, "an encoder or a decoder alone"),
    "decoder_alone": Shape(Writer, "an encoder or a decoder alone"),
}
