"""More small programs in the shapes of public code, and what a recorded run of each shows.

Each is a `Further` with a few lines of its own; the names are those of no published program. The
first half can be expressed by a config and a layout, the rest by none: `SHAPES` has both.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.porting.public_models import (
    HEADS,
    UNPLACED,
    VOCABULARIES,
    WIDE,
    WIDTH,
    Layer,
    Mixer,
    Translator,
    VarianceNorm,
    other,
    waves,
)

HEAD, LONGEST = WIDTH // HEADS, 31


class Further(Translator):
    """The usual program, with three layers in its decoder. Its sources may be `features`."""

    pad, features = 3, 0

    def stack(self, crossing):
        return nn.ModuleList(self.layer(self, crossing) for _ in range(2 + crossing))


class ZeroedRows(Further):
    """Rows of padding are zero behind the embeddings and behind each layer."""

    def encode(self, src, mask):
        kept = mask[:, 0, 0, :, None]
        x = self.embed(self.words_in, src) * kept
        for layer in self.readers:
            x = layer(x, mask) * kept
        return x


class ZeroedMixer(Mixer):
    """Self-attentions give zeros at padding."""

    def forward(self, x, y, mask):
        mixed = super().forward(x, y, mask)
        return mixed.masked_fill(~mask[:, 0, -1, :, None], 0.0) if x is y else mixed


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


class PaddedInside(Further):
    """Both sides are padded by four tokens; the logits are cut."""

    def forward(self, src, tgt):
        src, tgt = (functional.pad(ids, (0, 4), value=self.pad) for ids in (src, tgt))
        return super().forward(src, tgt)[:, :-4]


class PaddedReader(Further):
    """The source alone is padded, and the memory is cut."""

    def encode(self, src, mask):
        longer = functional.pad(src, (0, 4), value=self.pad)
        return super().encode(longer, (longer != self.pad)[:, None, None])[:, :-4]


class Tied(Further):
    """One table for the source, the target and the head, which has a bias.

    `names` are those of the three, `order` is the order in which the program makes them.
    """

    names, order = ("reading", "writing", "spelling"), (0, 1, 2)

    def __init__(self):
        super().__init__()
        del self.words_in, self.words_out, self.head
        tables = (nn.Embedding(VOCABULARIES[1], WIDTH) for _ in range(2))
        parts = (*tables, nn.Linear(WIDTH, VOCABULARIES[1]))
        for number in self.order:
            parts[number].weight = parts[0].weight
            self.add_module(self.names[number], parts[number])
        # Under the names of `Translator` they are no modules.
        vars(self).update(words_in=parts[0], words_out=parts[1], head=parts[2])


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


class LearnedFromOne(Further):
    """Learned tables of positions whose row 0 is not used."""

    def __init__(self):
        super().__init__()
        self.places_in, self.places_out = (nn.Embedding(LONGEST, WIDTH) for _ in range(2))

    def embed(self, table, ids):
        places = self.places_in if table is self.words_in else self.places_out
        return table(ids) * math.sqrt(WIDTH) + places.weight[1 : 1 + ids.shape[1]]


class BufferFromOne(Further):
    """A saved table of sinusoids whose row 0 is not used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("timing", waves(LONGEST, WIDTH).float())

    def places(self, x):
        return self.timing[1 : 1 + x.shape[1]]


def timing_from_one(self, x):
    """Return all sines, then all cosines, of positions from 1 and frequencies to 1/10000."""
    rates = torch.logspace(0, -4, WIDTH // 2, dtype=torch.float64)
    angle = torch.arange(1, 1 + x.shape[1])[:, None] * rates
    return torch.cat([angle.sin(), angle.cos()], 1).to(x)


class SequenceFirst(Further):
    """Embeddings and a head around nn.Transformer; the batch is the second axis."""

    def __init__(self):
        nn.Module.__init__(self)
        self.words_in, self.words_out = (nn.Embedding(size, WIDTH) for size in VOCABULARIES)
        self.core = nn.Transformer(WIDTH, HEADS, 2, 3, WIDE)
        self.head = nn.Linear(WIDTH, VOCABULARIES[1])

    def forward(self, src, tgt):
        x, y = self.embed(self.words_in, src), self.embed(self.words_out, tgt)
        hidden = src == self.pad
        hidden_keys = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
        back = torch.full((tgt.shape[1],) * 2, -torch.inf, dtype=y.dtype).triu(1)
        y = self.core(x.transpose(0, 1), y.transpose(0, 1), tgt_mask=back, **hidden_keys)
        return self.head(y).transpose(0, 1)


class Held(nn.Module):
    """What a program holds beside its network."""

    pad, features = Further.pad, 0

    def __init__(self):
        super().__init__()
        self.network = SequenceFirst()

    def forward(self, src, tgt):
        return self.network(src, tgt)


class ReluMixer(Mixer):
    """A relu behind the projections of queries, keys and values."""

    def project(self, x, y):
        products = super().project(x, y)
        return [product.relu() for product in products]


class WideValues(Mixer):
    """Values are wider than queries and keys."""

    def __init__(self):
        super().__init__()
        self.carry, self.join = nn.Linear(WIDTH, HEADS * 9), nn.Linear(HEADS * 9, WIDTH)


class Features(Further):
    """Sources are vectors of features [B, S, 11], zeros where there is padding."""

    features = 11

    def __init__(self):
        super().__init__()
        self.words_in = nn.Linear(self.features, WIDTH)

    def masks(self, src, tgt):
        return super().masks(torch.where(src.any(-1), -1, self.pad), tgt)


class Tongues(Further):
    """A third table, of languages: the first token tells the row."""

    def __init__(self):
        super().__init__()
        self.tongues = nn.Embedding(5, WIDTH)

    def embed(self, table, ids):
        return super().embed(table, ids) + self.tongues(ids[:, :1] % 5)


class ChosenTongue(Tongues):
    """An argument tells the row."""

    def embed(self, table, ids):
        return Translator.embed(self, table, ids) + self.tongues(self.tongue.expand_as(ids))

    def forward(self, src, tgt, tongue=2):
        self.tongue = torch.tensor(tongue)
        return super().forward(src, tgt)


class EarlyCrossing(Layer):
    """The attention to the memory reads the layer's input, not the self-attention's output."""

    def forward(self, x, mask, memory=None, seen=None):
        if memory is None:
            return super().forward(x, mask)
        y = self.around(0, x, lambda x: self.mixers[0](x, x, mask))
        y = self.around(1, y, lambda y: self.mixers[1](x, memory, seen))
        return self.around(-1, y, self.network)


class SideBySide(Layer):
    """Pre-norm: both attentions read the layer's input."""

    def forward(self, x, mask, memory=None, seen=None):
        if memory is None:
            return super().forward(x, mask)
        inner, outer = self.norms[0](x), self.norms[1](x)
        x = x + self.mixers[0](inner, inner, mask) + self.mixers[1](outer, memory, seen)
        return self.around(-1, x, self.network)


class FarWindow(Mixer):
    """The encoder's queries see six positions on each side: all of seven tokens."""

    def forward(self, x, y, mask):
        if x is y and mask.shape[2] == 1:
            place = torch.arange(x.shape[1])
            mask = mask & ((place[:, None] - place).abs() <= 6)
        return super().forward(x, y, mask)


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

    def forward(self, x, y, mask):
        query, key, value = self.project(x, y)
        scores = query @ key.mT / self.divisor(query)
        if x is y:
            place = torch.arange(x.shape[1])
            away = self.bucket(place - place[:, None], mask.shape[2] == 1)
            scores = scores + self.nearness(away).permute(2, 0, 1)
        return self.join(self.merge(scores.masked_fill(~mask, -1e9).softmax(-1) @ value))


class BucketLayer(Layer):
    def __init__(self, program, crossing):
        super().__init__(program, crossing)
        for mixer in self.mixers[1:]:
            del mixer.nearness


class Shape(NamedTuple):
    """A program and what is true of it.

    Attributes:
        build: Returns the module.
        refused: What the sentence that refuses it names; "" for a program that is found.
        fields: Fields of the config of a program that is found, which are not `USUAL`.
    """

    build: type[nn.Module]
    refused: str = ""
    fields: Mapping[str, Any] = MappingProxyType({})


def mixed(mixer, **parts):
    """Return a program with another attention."""
    return other(Further, mixer=mixer, **parts)


def layered(layer, **parts):
    """Return a program with other layers."""
    return other(Further, layer=layer, **parts)


def counted(self, x):
    return waves(x.shape[1], WIDTH, first=1).to(x)


HEADS_FIRST = {"product": "bld,hdk->bhlk", "axes": (HEADS, WIDTH, HEAD)}
BOTH = {"before": (True, True)}
PRE_NORM = {"norm_placement": "pre", "final_norm": True}
FROM_ONE = {"positions": "learned", "position_offset": 1, "max_length": LONGEST - 1}
ONE_TABLE = {"token_embeddings": "shared", "output_projection": "tied", "output_bias": True}
ONE_TABLE |= {"src_vocab_size": VOCABULARIES[1]}
USUAL = {
    **{"src_vocab_size": VOCABULARIES[0], "tgt_vocab_size": VOCABULARIES[1], "pad_id": Further.pad},
    **{"d_model": WIDTH, "num_heads": HEADS, "d_ff": WIDE},
    **{"num_encoder_layers": 2, "num_decoder_layers": 3},
}
SHAPES = {
    # Found, with a config and a layout.
    "zeroed_rows": Shape(ZeroedRows),
    "zeroed_attention": Shape(mixed(ZeroedMixer)),
    # A row of the layout reshapes: Operation(shape=("d_model", "num_heads", "head_dim")).
    "einsum_kernels": Shape(
        mixed(EinsumMixer), fields={"qkv_bias": False, "attention_output_bias": False}
    ),
    "padded_inside": Shape(PaddedInside),
    "padded_reader": Shape(PaddedReader),
    "log_softmax": Shape(other(Further, after=lambda self, logits: logits.log_softmax(-1))),
    "tied_in_order": Shape(other(Tied, names=("a_source", "b_target", "c_head")), fields=ONE_TABLE),
    "tied_backwards": Shape(
        other(Tied, names=("z_source", "y_target", "a_head")), fields=ONE_TABLE
    ),
    "tied_head_first": Shape(other(Tied, order=(2, 0, 1)), fields=ONE_TABLE),
    # Rows with stack="copies": several parameters in one tensor.
    "one_norm": Shape(layered(FewerNorms)),
    "one_norm_before": Shape(layered(FewerNorms, **BOTH), fields=PRE_NORM),
    "one_norm_of_attentions": Shape(layered(other(FewerNorms, order=(0, 0, 1)))),
    "one_attention": Shape(layered(OneMixer)),
    "learned_from_one": Shape(LearnedFromOne, fields=FROM_ONE),
    # No config computes the table: it is taken for a learned one, of both sides.
    "buffer_from_one": Shape(BufferFromOne, fields=FROM_ONE),
    "timing_from_one": Shape(
        other(Further, places=timing_from_one),
        fields={"positions": "sinusoidal_tensor2tensor", "position_offset": 1},
    ),
    "unbiased_variance": Shape(
        other(Further, norm=VarianceNorm), fields={"norm": "unbiased_layer_norm"}
    ),
    "sequence_first": Shape(Held, fields={"final_norm": True}),
    # No config has these, or no layout.
    "relu_projections": Shape(mixed(ReluMixer), "relu"),
    "wide_values": Shape(mixed(WideValues), "d_kv"),
    # A row transposes first and reshapes then: [H, D, K] would need the other order.
    "einsum_heads_first": Shape(mixed(other(EinsumMixer, **HEADS_FIRST)), "axes"),
    "features": Shape(Features, "features"),
    "tongue_of_first_token": Shape(Tongues, "third table"),
    "tongue_of_argument": Shape(ChosenTongue, "third table"),
    "early_crossing": Shape(layered(EarlyCrossing), "cross-attention"),
    "side_by_side": Shape(layered(SideBySide, **BOTH), "cross-attention"),
    # Saved nowhere, so that no learned table can hold them.
    "waves_from_one": Shape(other(Further, places=counted), "positions from 1"),
    "far_window": Shape(mixed(FarWindow), "longer than the record"),
    "far_buckets": Shape(
        layered(BucketLayer, mixer=BucketMixer, **UNPLACED), "longer than the record"
    ),
}
