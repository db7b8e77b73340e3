"""Programs in the shapes of public code, and what a recorded run of each shows: `SHAPES`.

The names are those of no published program.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, WIDE, VOCABULARIES, PAD = 24, 4, 40, (37, 43), 3
HEAD, LONGEST = WIDTH // HEADS, 31


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
        for layer in self.readers:
            x = layer(x, mask)
        return self.ended(x, False)

    def forward(self, src, tgt):
        seen, back, crossed = self.masks(src, tgt)
        memory, y = self.encode(src, seen), self.embed(self.words_out, tgt)
        for layer in self.writers:
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


class ZeroedRows(Translator):
    """Rows of padding are zero behind the embeddings and behind each layer."""

    def encode(self, src, mask):
        kept = mask[:, 0, 0, :, None]
        x = self.embed(self.words_in, src) * kept
        for layer in self.readers:
            x = layer(x, mask) * kept
        return x


class PaddedInside(Translator):
    """Both sides are padded by four tokens; the logits are cut."""

    def forward(self, src, tgt):
        src, tgt = (functional.pad(ids, (0, 4), value=self.pad) for ids in (src, tgt))
        return super().forward(src, tgt)[:, :-4]


class Seq2SeqTransformer(Translator):
    """Embeddings and a head around nn.Transformer, with its two final norms."""

    def __init__(self):
        super().__init__()
        del self.readers, self.writers
        self.register_buffer("timing", waves(50, WIDTH).float()[None])
        self.core = nn.Transformer(WIDTH, HEADS, 2, 2, WIDE, batch_first=True)

    def places(self, x):
        return self.timing[:, : x.shape[1]]

    def forward(self, src, tgt):
        hidden, back = src == self.pad, ~later(tgt.shape[1])
        x, y = self.embed(self.words_in, src), self.embed(self.words_out, tgt)
        keys = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        keys["tgt_key_padding_mask"] = tgt == self.pad
        return self.head(self.core(x, y, tgt_mask=back, **keys))


class Tied(Translator):
    """One table for the source, the target and the head, which has a bias and comes first."""

    def __init__(self):
        super().__init__()
        del self.words_in, self.words_out
        self.words_in, self.words_out = (nn.Embedding(VOCABULARIES[1], WIDTH) for _ in range(2))
        self.words_in.weight = self.words_out.weight = self.head.weight


class LearnedPlaces(Translator):
    """One learned table of positions, which both sides hold under a name of their own."""

    def __init__(self):
        super().__init__()
        self.places_in = self.places_out = nn.Embedding(29, WIDTH)

    def places(self, x):
        return self.places_in.weight[: x.shape[1]]


class LearnedFromOne(Translator):
    """Learned tables of positions whose row 0 is not used."""

    def __init__(self):
        super().__init__()
        self.places_in, self.places_out = (nn.Embedding(LONGEST, WIDTH) for _ in range(2))

    def embed(self, table, ids):
        places = self.places_in if table is self.words_in else self.places_out
        return table(ids) * math.sqrt(WIDTH) + places.weight[1 : 1 + ids.shape[1]]


class BufferFromOne(Translator):
    """A saved table of sinusoids whose row 0 is not used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("timing", waves(LONGEST, WIDTH).float())

    def places(self, x):
        return self.timing[1 : 1 + x.shape[1]]


class Buffers(Translator):
    """Buffers that a forward computes with: frequencies, nothing, a table in half precision."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_timescales", 10000 ** -(torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("memo", torch.empty(0))
        self.register_buffer("timing", waves(LONGEST, WIDTH).half())
        self.register_buffer("position_ids", torch.arange(9)[None])

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

    def embed(self, table, ids):
        row = ids[:, :1] % 5 if self.tongue is None else torch.tensor(self.tongue).expand_as(ids)
        return super().embed(table, ids) + self.tongues(row)


class Refusal(NamedTuple):
    """What a refusal says, a piece of the source line that it names, and a module that it names."""

    text: str
    line: str = ""
    module: str = ""


class Shape(NamedTuple):
    """A program and what is true of it.

    Attributes:
        build: Returns the module.
        refused: None for a program that is found.
        fields: Fields of the config of a program that is found, which are not `USUAL`.
        dropped: Tensors that its user drops.
    """

    build: type[nn.Module]
    refused: Refusal | None
    fields: Mapping[str, Any]
    dropped: tuple[str, ...]


def found(build, fields=MappingProxyType({}), dropped=()):
    """Return a program that a config and a layout express."""
    return Shape(build, None, fields, dropped)


def refused(build, *words):
    """Return a program that no config has, or no layout."""
    return Shape(build, Refusal(*words), {}, ())


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
    return other(Translator, places=lambda self, x: waves(x.shape[1], WIDTH, **options).to(x))


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
    y = self.embed(self.words_out, tgt)
    for layer in self.readers:
        y = layer(y, later(tgt.shape[1])[None, None])
    return self.head(y)


def by_width(self, query):
    return math.sqrt(WIDTH)


UNPLACED, BOTH = {"summed": lambda self, x: x}, {"before": (True, True)}
ROTARY = {"positions": "rotary", "embedding_scale": "none"}
FROM_ONE = {"positions": "learned", "position_offset": 1, "max_length": LONGEST - 1}
HEADS_FIRST = {"product": "bld,hdk->bhlk", "axes": (HEADS, WIDTH, HEAD)}
USUAL = {
    **{"src_vocab_size": VOCABULARIES[0], "tgt_vocab_size": VOCABULARIES[1], "pad_id": PAD},
    **{"d_model": WIDTH, "num_heads": HEADS, "d_ff": WIDE},
    **{"num_encoder_layers": 2, "num_decoder_layers": 2},
}
SUM = "+ self.places(x)"  # the line of the embeddings
SCORES = "scores = query @ key.mT"
MIXER = "readers.0.mixers.0"
SHAPES = {
    "usual": found(Translator),
    "modern": found(
        Modern,
        {"norm": "zero_centered_rms_norm", "norm_epsilon": 1e-6, "num_kv_heads": 2}
        | {"norm_placement": "sandwich", "final_norm": True}
        | ROTARY,
    ),
    "row_masks": found(RowMasks),
    "zeroed_rows": found(ZeroedRows),
    "padded_inside": found(PaddedInside),
    "seq2seq_transformer": found(Seq2SeqTransformer, {"final_norm": True, "max_length": 50}),
    "heads_apart": found(other(Translator, mixer=HeadMixer)),
    "einsum_kernels": found(
        mixed(EinsumMixer), {"qkv_bias": False, "attention_output_bias": False}
    ),
    "window_of_one": found(other(Translator, network=WindowNetwork)),
    "scaled_by_width": found(mixed(Mixer, divisor=by_width), {"attention_scale": "d_model"}),
    "post_then_pre": found(
        other(Translator, before=(False, True)),
        {"norm_placement": "post", "decoder_norm_placement": "pre", "final_norm": False}
        | {"decoder_final_norm": True},
    ),
    "pre_then_post": found(
        other(Translator, before=(True, False)),
        {"norm_placement": "pre", "decoder_norm_placement": "post", "final_norm": True}
        | {"decoder_final_norm": False},
    ),
    "unbiased_variance": found(normed(), {"norm": "unbiased_layer_norm"}),
    "epsilon_outside": found(
        normed(divisor=lambda self, x: x.std(-1, keepdim=True, unbiased=False) + 1e-6),
        {"norm": "biased_std_norm", "norm_epsilon": 1e-6},
    ),
    "normed_queries": found(mixed(NormedMixer), {"query_key_norm": True}),
    "logit_cap": found(
        other(Translator, after=lambda self, logits: 5 * (logits / 5).tanh()),
        {"logit_softcap": 5.0},
    ),
    "score_cap": found(mixed(Mixer, scored=capped), {"attention_softcap": 0.8}),
    "log_softmax": found(other(Translator, after=lambda self, logits: logits.log_softmax(-1))),
    "rotary": found(
        other(mixed(RotaryMixer, theta=500.0), **UNPLACED), {"rotary_theta": 500} | ROTARY
    ),
    "windows": found(mixed(WindowMixer), {"sliding_window": 3}),
    "buckets": found(
        other(mixed(BucketMixer), **UNPLACED),
        {"positions": "relative", "relative_attention_bias": "per_layer"}
        | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
    "tied": found(
        Tied,
        {"token_embeddings": "shared", "output_projection": "tied", "output_bias": True}
        | {"src_vocab_size": VOCABULARIES[1]},
    ),
    "one_norm": found(layered(FewerNorms)),
    "one_norm_of_attentions": found(layered(other(FewerNorms, order=(0, 0, 1)))),
    "one_place_table": found(LearnedPlaces, {"positions": "learned", "max_length": 29}),
    "learned_from_one": found(LearnedFromOne, FROM_ONE),
    # No config computes the table: it is taken for a learned one, of both sides.
    "buffer_from_one": found(BufferFromOne, FROM_ONE),
    "buffers": found(Buffers, {"max_length": LONGEST}),
    "wrapped_checkpoint": found(Wrapped, dropped=("criterion.weight",)),
    "shifted_inside": found(Shifted, {"bos_id": 2}),
    # No config has these, or no layout.
    "shared_layers": refused(OneLayer, "share weights", "self.ask(x)", f"{MIXER}.ask"),
    "one_attention": refused(
        layered(OneMixer), "share weights", "self.ask(x)", "writers.0.mixer.ask"
    ),
    # A row transposes first and reshapes then: [H, D, K] would need the other order.
    "einsum_heads_first": refused(
        mixed(EinsumMixer, **HEADS_FIRST), "order of axes", "self.product, *pair", MIXER
    ),
    "decoder_alone": refused(other(Translator, forward=alone), "nothing reads the source ids"),
    "features": refused(Features, "the source is no ids but features", "table(ids)", "words_in"),
    "scaled_sum": refused(
        other(Translator, summed=lambda self, x: (x + self.places(x)) * math.sqrt(WIDTH)),
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
    "wide_values": refused(
        other(Translator, mixer=WideValues), "d_kv=6", "self.weights(scores) @ value", MIXER
    ),
    "far_window": refused(
        mixed(WindowMixer, reach=(6, 999)), "positions that no config has, {", "masked_fill", MIXER
    ),
}
