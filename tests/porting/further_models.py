"""Programs in the shapes of public code, and what a recorded run of each shows: `SHAPES`."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.porting.public_models import (
    HEAD,
    HEADS,
    PAD,
    VOCABULARIES,
    WIDE,
    WIDTH,
    BucketMixer,
    ConvolvedLayer,
    EarlyCrossing,
    EinsumMixer,
    FewerNorms,
    GroupedMixer,
    HeadMixer,
    Layer,
    LearnedFactorLayer,
    Mixer,
    NormedMixer,
    OneMixer,
    RootNorm,
    RotaryMixer,
    SandwichLayer,
    Translator,
    VarianceNorm,
    WideValues,
    WindowMixer,
    WindowNetwork,
    later,
    other,
    waves,
)

LONGEST = 31


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


class ZeroedMixer(Mixer):
    """Self-attentions give zeros at padding."""

    def forward(self, x, y, mask):
        mixed = super().forward(x, y, mask)
        return mixed.masked_fill(~mask[:, 0, -1, :, None], 0.0) if x is y else mixed


class PaddedInside(Translator):
    """Both sides are padded by four tokens; the logits are cut."""

    def forward(self, src, tgt):
        src, tgt = (functional.pad(ids, (0, 4), value=self.pad) for ids in (src, tgt))
        return super().forward(src, tgt)[:, :-4]


class PaddedReader(Translator):
    """The source alone is padded, and the memory is cut."""

    def encode(self, src, mask):
        longer = functional.pad(src, (0, 4), value=self.pad)
        return super().encode(longer, (longer != self.pad)[:, None, None])[:, :-4]


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


class Interleaved(Translator):
    """One list for both stacks: `layers.0` reads, `layers.1` writes, and so on."""

    def __init__(self):
        super().__init__()
        pairs = zip(*super().lists(), strict=True)
        self.layers = nn.ModuleList(layer for pair in pairs for layer in pair)
        del self.readers, self.writers

    def lists(self):
        return self.layers[::2], self.layers[1::2]


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


class LearnedScale(Translator):
    """A learned scalar scales the positions."""

    def __init__(self):
        super().__init__()
        self.weight_of_places = nn.Parameter(torch.ones(1))

    def summed(self, x):
        return x * math.sqrt(WIDTH) + self.weight_of_places * self.places(x)


class LearnedTemperature(Translator):
    def __init__(self):
        super().__init__()
        self.sharpness = nn.Parameter(torch.ones(1))

    def after(self, logits):
        return logits * self.sharpness


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


class Reader(Translator):
    """An encoder alone."""

    def forward(self, src, tgt):
        self.words_in = self.words_out
        return self.head(self.encode(tgt, (tgt != self.pad)[:, None, None]))


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
    refused: Refusal | None = None
    fields: Mapping[str, Any] = MappingProxyType({})
    dropped: tuple[str, ...] = ()


def found(build, *dropped, **fields):
    """Return a program that a config and a layout express."""
    return Shape(build, None, fields, dropped)


def refused(build, *words):
    """Return a program that no config has, or no layout."""
    return Shape(build, Refusal(*words))


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


def timing_from_one(self, x):
    """Return all sines, then all cosines, of positions from 1 and frequencies to 1/10000."""
    rates = torch.logspace(0, -4, WIDTH // 2, dtype=torch.float64)
    angle = torch.arange(1, 1 + x.shape[1])[:, None] * rates
    return torch.cat([angle.sin(), angle.cos()], 1).to(x)


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
        y = layer(y, later(tgt.shape[1]))
    return self.head(y)


def by_width(self, query):
    return math.sqrt(WIDTH)


UNPLACED, BOTH = {"summed": lambda self, x: x}, {"before": (True, True)}
ROTARY = {"positions": "rotary", "embedding_scale": "none"}
PRE_NORM = {"norm_placement": "pre", "final_norm": True}
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
        **{"norm": "zero_centered_rms_norm", "norm_epsilon": 1e-6, "num_kv_heads": 2},
        **{"norm_placement": "sandwich", "final_norm": True, **ROTARY},
    ),
    "row_masks": found(RowMasks),
    "zeroed_rows": found(ZeroedRows),
    "zeroed_attention": found(mixed(ZeroedMixer)),
    "padded_inside": found(PaddedInside),
    "padded_reader": found(PaddedReader),
    "seq2seq_transformer": found(Seq2SeqTransformer, final_norm=True, max_length=50),
    "interleaved": found(Interleaved),
    "heads_apart": found(other(Translator, mixer=HeadMixer)),
    "einsum_kernels": found(mixed(EinsumMixer), qkv_bias=False, attention_output_bias=False),
    "window_of_one": found(other(Translator, network=WindowNetwork)),
    "scaled_by_width": found(mixed(Mixer, divisor=by_width), attention_scale="d_model"),
    "post_then_pre": found(
        other(Translator, before=(False, True)),
        **{"norm_placement": "pre", "decoder_norm_placement": "post"},
    ),
    "pre_then_post": found(
        other(Translator, before=(True, False)),
        **{"norm_placement": "pre", "decoder_norm_placement": "post"},
        **{"final_norm": True, "decoder_final_norm": False},
    ),
    "unbiased_variance": found(normed(), norm="unbiased_layer_norm"),
    "epsilon_outside": found(
        normed(divisor=lambda self, x: x.std(-1, keepdim=True, unbiased=False) + 1e-6),
        **{"norm": "biased_std_norm", "norm_epsilon": 1e-6},
    ),
    "normed_queries": found(mixed(NormedMixer), query_key_norm=True),
    "logit_cap": found(
        other(Translator, after=lambda self, logits: 5 * (logits / 5).tanh()), logit_softcap=5.0
    ),
    "score_cap": found(mixed(Mixer, scored=capped), attention_softcap=0.8),
    "log_softmax": found(other(Translator, after=lambda self, logits: logits.log_softmax(-1))),
    "rotary": found(other(mixed(RotaryMixer, theta=500.0), **UNPLACED), rotary_theta=500, **ROTARY),
    "windows": found(mixed(WindowMixer), sliding_window=3),
    "buckets": found(
        other(mixed(BucketMixer), **UNPLACED),
        **{"positions": "relative", "relative_attention_bias": "per_layer"},
        **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
    "tied": found(
        Tied,
        **{"token_embeddings": "shared", "output_projection": "tied", "output_bias": True},
        **{"src_vocab_size": VOCABULARIES[1]},
    ),
    "one_norm": found(layered(FewerNorms)),
    "one_norm_before": found(layered(FewerNorms, **BOTH), **PRE_NORM),
    "one_norm_of_attentions": found(layered(other(FewerNorms, order=(0, 0, 1)))),
    "one_place_table": found(LearnedPlaces, positions="learned", max_length=29),
    "learned_from_one": found(LearnedFromOne, **FROM_ONE),
    # No config computes the table: it is taken for a learned one, of both sides.
    "buffer_from_one": found(BufferFromOne, **FROM_ONE),
    "timing_from_one": found(
        other(Translator, places=timing_from_one),
        **{"positions": "sinusoidal_tensor2tensor", "position_offset": 1},
    ),
    "buffers": found(Buffers, max_length=LONGEST),
    "wrapped_checkpoint": found(Wrapped, "criterion.weight"),
    "shifted_inside": found(Shifted, bos_id=2),
    # No config has these, or no layout.
    "shared_layers": refused(OneLayer, "share weights"),
    "one_attention": refused(layered(OneMixer), "share weights"),
    # A row transposes first and reshapes then: [H, D, K] would need the other order.
    "einsum_heads_first": refused(mixed(EinsumMixer, **HEADS_FIRST), "order of axes"),
    "encoder_alone": refused(Reader, "nothing reads the source ids"),
    "decoder_alone": refused(other(Translator, forward=alone), "nothing reads the source ids"),
    "features": refused(Features, "the source is no ids but features", "full("),
    "scaled_sum": refused(
        other(Translator, summed=lambda self, x: (x + self.places(x)) * math.sqrt(WIDTH)),
        *("sinusoids times 4.89898", SUM),
    ),
    "from_one": refused(placed(first=1), "positions from 1", SUM),
    "learned_scale": refused(LearnedScale, "sinusoids times 1.4", SUM),
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
    "early_crossing": refused(
        layered(EarlyCrossing), "two sublayers read one input", "return x + y", "writers.0"
    ),
    "side_by_side": refused(
        layered(other(Layer, forward=side_by_side), **BOTH),
        *("two sublayers read one input", "self.mixers[1](outer", "writers.0"),
    ),
    "layer_memory": refused(
        LayerMemory, "the output of the same encoder layer", SCORES, "writers.1.mixers.1"
    ),
    "convolution": refused(
        layered(ConvolvedLayer), "one product alone", "self.along(x.mT)", "readers.0.along"
    ),
    "temperature": refused(LearnedTemperature, "sharpness", "logits * self.sharpness", "head"),
    "logit_scale": refused(
        other(Translator, after=lambda self, logits: 7 * logits),
        *("multiplied by 7", "7 * logits", "head"),
    ),
    "view_of_heads": refused(
        mixed(Mixer, split=lambda self, x: x.reshape(len(x), HEADS, x.shape[1], -1)),
        *("without a transpose", SCORES, MIXER),
    ),
    "softmax_of_queries": refused(
        mixed(Mixer, weights=lambda self, scores: scores.softmax(-2)),
        *("the softmax is over the queries", "softmax(-2)", MIXER),
    ),
    "softmax_of_heads": refused(
        mixed(Mixer, weights=lambda self, scores: scores.softmax(1)),
        *("the softmax is over the heads", "softmax(1)", MIXER),
    ),
    "rotary_pairs": refused(
        other(mixed(RotaryMixer, halves=False), **UNPLACED),
        *("pairs of columns", "one * cos - two * sin", MIXER),
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
        mixed(WindowMixer, reach=(6, 999)), "windows that no config has", "masked_fill", MIXER
    ),
}
