"""Twelve programs whose config and layout nobody wrote down, and what is true of each.

Each `forward(src, tgt)` takes ids [B, S] and [B, T] and makes its own masks.
"""

import math
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.convert.foreign import StdNorm, interleaved_positions, randomized

bare = partial(nn.Linear, bias=False)


class Part(nn.Module):
    """A module of named parts."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Block(nn.Module):
    """A layer: each of its parts is added to its input, with a norm before or behind."""

    def __init__(self, before, norm, *parts):
        super().__init__()
        self.before, self.parts = before, nn.ModuleList(parts)
        self.norms = several(len(parts), norm)

    def forward(self, x, mask, memory=None, seen=None):
        others = [(mask,), (seen, memory), ()] if len(self.parts) == 3 else [(mask,), ()]
        for part, norm, given in zip(self.parts, self.norms, others, strict=True):
            x = x + part(norm(x), *given) if self.before else norm(x + part(x, *given))
        return x


def several(count, make, *arguments):
    """Return a list of modules."""
    return nn.ModuleList(make(*arguments) for _ in range(count))


def network(width, wide, activation, linear=nn.Linear):
    """Return a feed-forward network."""
    return nn.Sequential(linear(width, wide), activation, linear(wide, width))


def past(length):
    """Return the mask [1, 1, T, T] that hides later positions, True = attend."""
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def masks(src, tgt, pad=0):
    """Return the masks [B, 1, 1, S] and [B, 1, T, T], True = attend."""
    return (src != pad)[:, None, None], (tgt != pad)[:, None, None] & past(tgt.shape[1])


def through(layers, x, *others):
    """Return what leaves the last of some layers."""
    for layer in layers:
        x = layer(x, *others)
    return x


def heads_of(x, count):
    """Return [B, L, D] as [B, H, L, K]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attended(q, k, v, count, mask=None):
    """Return what `count` heads read [B, L, D]."""
    q, k, v = (heads_of(x, count) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class FusedAttention(Part):
    """One matrix in the order of query, key and value; of the memory, one of key and value."""

    def forward(self, x, mask, memory=None):
        if memory is None:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            q, (k, v) = self.q(x), self.kv(memory).chunk(2, -1)
        return self.out(attended(q, k, v, self.heads, mask))


def fused_attentions(width, heads, crossing, linear):
    """Yield the attentions of a layer."""
    yield FusedAttention(heads=heads, qkv=linear(width, 3 * width), out=linear(width, width))
    if crossing:
        own = {"q": linear(width, width), "kv": linear(width, 2 * width)}
        yield FusedAttention(heads=heads, **own, out=linear(width, width))


class FusedRows(nn.Module):
    """Only the padding of the source is masked; one table for both sides and the output."""

    def __init__(self, width=32, words=53, length=23):
        super().__init__()
        norm = partial(nn.LayerNorm, width, bias=False)

        def layer(crossing):
            attentions = fused_attentions(width, 4, crossing, bare)
            return Block(True, norm, *attentions, network(width, 128, nn.GELU(), bare))

        self.table, self.places = (
            nn.Embedding(words, width),
            several(2, nn.Embedding, length, width),
        )
        self.enc, self.dec = several(3, layer, False), several(2, layer, True)
        self.ends, self.lm_head = several(2, norm), bare(width, words)
        self.lm_head.weight = self.table.weight

    def forward(self, src, tgt):
        seen, _ = masks(src, tgt)
        x, y = (
            self.table(ids) + place.weight[: ids.shape[1]]
            for ids, place in zip((src, tgt), self.places, strict=True)
        )
        memory = self.ends[0](through(self.enc, x, seen))
        y = through(self.dec, y, past(tgt.shape[1]), memory, seen)
        return self.lm_head(self.ends[1](y))


class KeyQueryValue(Part):
    """One matrix in the order of key, query and value, of which a slice at a time is used."""

    def forward(self, x, mask, memory=None):
        other = x if memory is None else memory
        kernels, biases = self.kqv.weight.chunk(3), self.kqv.bias.chunk(3)
        k, q, v = map(F.linear, (other, x, other), kernels, biases)
        return self.proj(attended(q, k, v, 5, mask))


class KeysBeforeQueries(nn.Module):
    """PAD is 1; a table of all sines, then all cosines, lies in a buffer [L, D]."""

    def __init__(self, dim=20, words=41, longest=31):
        super().__init__()

        def layer(attentions):
            parts = (
                KeyQueryValue(kqv=nn.Linear(dim, 3 * dim), proj=nn.Linear(dim, dim))
                for _ in range(attentions)
            )
            norm = partial(nn.LayerNorm, dim, eps=1e-6)
            return Block(False, norm, *parts, network(dim, 36, nn.ReLU()))

        self.readers, self.writers = several(2, layer, 1), several(3, layer, 2)
        self.words_in, self.words_out = several(2, nn.Embedding, words, dim)
        self.head = nn.Linear(dim, words)
        angle = torch.arange(longest)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("timing", torch.cat([angle.sin(), angle.cos()], 1))

    def forward(self, src, tgt):
        seen, back = masks(src, tgt, pad=1)
        x = self.words_in(src) * 20**0.5 + self.timing[: src.shape[1]]
        y = self.words_out(tgt) * 20**0.5 + self.timing[: tgt.shape[1]]
        return self.head(through(self.writers, y, back, through(self.readers, x, seen), seen))


class Conv1D(nn.Module):
    """A matrix (inputs, outputs) that is multiplied from the right, as GPT-2's."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class FusedColumns(nn.Module):
    """No padding is masked at all; the output is tied with the target's table."""

    def __init__(self, nx=36):
        super().__init__()
        norm = partial(nn.LayerNorm, nx)

        def stack(vocab, crossing):
            def layer():
                inner = network(nx, 60, nn.GELU(approximate="tanh"), Conv1D)
                return Block(True, norm, *fused_attentions(nx, 3, crossing, Conv1D), inner)

            tables = {"wte": nn.Embedding(vocab, nx), "wpe": nn.Embedding(17, nx)}
            return Part(**tables, h=several(2, layer), ln_f=norm())

        self.encoder, self.decoder = stack(37, False), stack(43, True)

    def run(self, stack, ids, *others):
        x = stack.wte(ids) + stack.wpe.weight[: ids.shape[1]]
        return stack.ln_f(through(stack.h, x, *others))

    def forward(self, src, tgt):
        memory = self.run(self.encoder, src, None)
        return self.run(self.decoder, tgt, past(tgt.shape[1]), memory) @ self.decoder.wte.weight.T


class PerHeadAttention(Part):
    """Rows of query, key and value of head 0, then those of head 1; its weights are returned."""

    def forward(self, x, mask, memory=None):
        if memory is None:
            q, k, v = heads_of(self.qkv_proj(x), 7).chunk(3, -1)
        else:
            q, (k, v) = heads_of(self.q_proj(x), 7), heads_of(self.kv_proj(memory), 7).chunk(2, -1)
        scores = (q @ k.mT / math.sqrt(k.shape[-1])).masked_fill(mask == 0, -9e15)
        weights = scores.softmax(dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class PerHeadLayer(nn.Module):
    def __init__(self, dim, decoder):
        super().__init__()
        self.self_attn = PerHeadAttention(
            qkv_proj=nn.Linear(dim, 3 * dim), o_proj=nn.Linear(dim, dim)
        )
        if decoder:
            fused = {"q_proj": nn.Linear(dim, dim), "kv_proj": nn.Linear(dim, 2 * dim)}
            self.cross_attn = PerHeadAttention(**fused, o_proj=nn.Linear(dim, dim))
        self.linear_net = network(dim, 44, nn.ReLU(inplace=True))
        self.norms = several(2 + decoder, nn.LayerNorm, dim)

    def forward(self, x, mask, memory=None, seen=None):
        y, heads = self.self_attn(x, mask)
        x = self.norms[0](x + y)
        if memory is not None:
            y, heads = self.cross_attn(x, seen, memory)
            x = self.norms[2](x + y)
        return self.norms[1](x + self.linear_net(x)), heads


class FusedHeads(nn.Module):
    """A trainer's module around the model; it returns what its heads read beside the logits."""

    def __init__(self, dim=28):
        super().__init__()
        encoder, decoder = (several(2, PerHeadLayer, dim, crossing) for crossing in (False, True))
        embed = nn.ModuleDict({"src": nn.Embedding(43, dim), "tgt": nn.Embedding(47, dim)})
        stacks = {"embed": embed, "encoder": encoder, "decoder": decoder}
        self.model = Part(net=Part(**stacks, output_net=nn.Linear(dim, 47)))
        self.register_buffer("pe", interleaved_positions(160, dim)[None], persistent=False)

    def forward(self, src, tgt):
        net, (seen, back) = self.model.net, masks(src, tgt)
        x, y = (
            net.embed[side](ids) * 28**0.5 + self.pe[:, : ids.shape[1]]
            for side, ids in (("src", src), ("tgt", tgt))
        )
        for layer in net.encoder:
            x, _ = layer(x, seen)
        for layer in net.decoder:
            y, heads = layer(y, back, x, seen)
        return net.output_net(y), heads


class ClonedAttention(nn.Module):
    """Query, key, value and output are clones in a list."""

    def __init__(self, d_model):
        super().__init__()
        self.linears = several(4, nn.Linear, d_model, d_model)

    def forward(self, x, mask, memory=None):
        y = x if memory is None else memory
        inputs = zip(self.linears, (x, y, y), strict=False)
        return self.linears[-1](attended(*(linear(z) for linear, z in inputs), 4, mask))


class Clones(nn.Module):
    """Norms by the deviation, log-probabilities."""

    def __init__(self, size=24):
        super().__init__()
        norm = partial(StdNorm, size, 1e-6, "a_2", "b_2")

        def stack(attentions):
            layers = (
                Block(
                    True,
                    norm,
                    *several(attentions, ClonedAttention, size),
                    network(size, 40, nn.ReLU()),
                )
                for _ in range(3)
            )
            return Part(layers=nn.ModuleList(layers), norm=norm())

        self.encoder, self.decoder = stack(1), stack(2)
        self.src_embed, self.tgt_embed = nn.Embedding(31, size), nn.Embedding(37, size)
        self.register_buffer("pe", interleaved_positions(50, size)[None])
        self.generator = Part(proj=nn.Linear(size, 37))

    def forward(self, src, tgt):
        seen, back = masks(src, tgt)
        x, y = (
            table(ids) * math.sqrt(table.embedding_dim) + self.pe[:, : ids.shape[1]]
            for table, ids in ((self.src_embed, src), (self.tgt_embed, tgt))
        )
        memory = self.encoder.norm(through(self.encoder.layers, x, seen))
        y = self.decoder.norm(through(self.decoder.layers, y, back, memory, seen))
        return self.generator.proj(y).log_softmax(-1)


class MeanFreeNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class SeparateAttention(Part):
    """A matrix for each of query, key, value and output: `a` to `d`."""

    def forward(self, x, mask, memory=None):
        y = x if memory is None else memory
        return self.d(attended(self.a(x), self.b(y), self.c(y), self.heads, mask))


class GatedNetwork(Part):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MeanFree(nn.Module):
    """A norm without a mean, a gated network, no bias; positions are computed in every call."""

    def __init__(self, dim=24, hidden=44):
        super().__init__()
        norm = partial(MeanFreeNorm, dim)

        def layer(attentions):
            parts = (
                SeparateAttention(heads=3, **{name: bare(dim, dim) for name in "dcba"})
                for _ in range(attentions)
            )
            wide = {name: bare(dim, hidden) for name in ("w1", "w3")}
            return Block(True, norm, *parts, GatedNetwork(**wide, w2=bare(hidden, dim)))

        self.input_table, self.output_table = nn.Embedding(33, dim), nn.Embedding(51, dim)
        self.encoder_blocks, self.decoder_blocks = several(2, layer, 1), several(3, layer, 2)
        self.encoder_norm, self.decoder_norm = several(2, norm)
        self.output = bare(dim, 51)

    def forward(self, src, tgt):
        table = interleaved_positions(max(src.shape[1], tgt.shape[1]), 24).to(self.output.weight)
        seen, back = masks(src, tgt)
        x = self.input_table(src) + table[: src.shape[1]]
        memory = self.encoder_norm(through(self.encoder_blocks, x, seen))
        y = self.output_table(tgt) + table[: tgt.shape[1]]
        y = through(self.decoder_blocks, y, back, memory, seen)
        return self.output(self.decoder_norm(y))


class KernelLayer(nn.Module):
    """Plain parameters (inputs, outputs)."""

    def __init__(self, d, parts):
        super().__init__()
        shapes = {f"{part}{name}": (d, d) for part in parts[:-1] for name in "qkvo"}
        shapes |= {"Wi": (d, 3 * d), "bi": (3 * d,), "Wf": (3 * d, d), "bf": (d,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        for name in parts:
            self.register_parameter(f"gain_{name}", nn.Parameter(torch.ones(d)))
            self.register_parameter(f"shift_{name}", nn.Parameter(torch.zeros(d)))

    def norm(self, x, name):
        gain, shift = getattr(self, f"gain_{name}"), getattr(self, f"shift_{name}")
        return F.layer_norm(x, x.shape[-1:], gain, shift, 1e-12)

    def attend(self, x, y, part, mask):
        q, k, v, o = (getattr(self, f"{part}{name}") for name in "qkvo")
        return self.norm(x + attended(x @ q, y @ k, y @ v, 4, mask) @ o, part)

    def forward(self, x, mask, memory=None, seen=None):
        x = self.attend(x, x, "W", mask)
        if memory is not None:
            x = self.attend(x, memory, "U", seen)
        return self.norm(x + F.gelu(x @ self.Wi + self.bi) @ self.Wf + self.bf, "F")


class Kernels(nn.Module):
    """Embeddings plus learned positions are normed; layers are attributes, no list."""

    def __init__(self, d=16, vocab=31):
        super().__init__()
        self.encoder, self.decoder = (
            Part(
                word=nn.Embedding(vocab, d),
                place=nn.Embedding(19, d),
                start=nn.LayerNorm(d, eps=1e-12),
                layer0=KernelLayer(d, parts),
                layer1=KernelLayer(d, parts),
            )
            for parts in ("WF", "WUF")
        )
        self.to_words = nn.Parameter(torch.randn(d, vocab))
        self.words_bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, src, tgt):
        seen, back = masks(src, tgt)
        x, y = (
            stack.start(stack.word(ids) + stack.place.weight[: ids.shape[1]])
            for stack, ids in ((self.encoder, src), (self.decoder, tgt))
        )
        x = through((self.encoder.layer0, self.encoder.layer1), x, seen)
        y = through((self.decoder.layer0, self.decoder.layer1), y, back, x, seen)
        return y @ self.to_words + self.words_bias


class LetterLayer(nn.Module):
    """Norms n1 to n4, of which n4 is the memory's."""

    def __init__(self, n, decoder):
        super().__init__()
        for name in ("n1", "n2", "n3", "n4")[: 4 if decoder else 2]:
            self.add_module(name, nn.LayerNorm(n, eps=1e-3))
        self.s, self.t = (
            SeparateAttention(heads=6, d=nn.Linear(n, n), **{name: bare(n, n) for name in "abc"})
            for _ in range(2)
        )
        self.t = self.t if decoder else None
        self.e, self.f = nn.Linear(n, 50), nn.Linear(50, n)

    def forward(self, x, mask, memory=None, seen=None):
        x = x + self.s(self.n2(x), mask)
        if memory is not None:
            x = x + self.t(self.n3(x), seen, self.n4(memory))
        return x + self.f(F.silu(self.e(self.n1(x))))


class Letters(nn.Module):
    """No positions."""

    def __init__(self, n=42):
        super().__init__()
        self.enc_layers = several(3, LetterLayer, n, False)
        self.dec_layers = several(2, LetterLayer, n, True)
        self.u, self.w, self.z = nn.Embedding(59, n), nn.Embedding(67, n), nn.Linear(n, 67)

    def forward(self, src, tgt):
        seen, back = masks(src, tgt)
        x, y = self.u(src) * 42**0.5, self.w(tgt) * 42**0.5
        x = through(self.enc_layers, x, seen)
        return self.z(through(self.dec_layers, y, back, x, seen))


class Stage(nn.Module):
    """torch's attention; its masks are those of hidden keys, and of later ones."""

    def __init__(self, channels, heads, first, count):
        super().__init__()
        self.mha = nn.ModuleList(
            nn.MultiheadAttention(channels, heads, batch_first=first) for _ in range(count)
        )

    def attend(self, number, x, y, hidden, later=None):
        return self.mha[number](x, y, y, key_padding_mask=hidden, attn_mask=later)[0]


class PreStage(Stage):
    def __init__(self, channels, heads, count):
        super().__init__(channels, heads, True, count)
        self.pre = several(count + 1, nn.LayerNorm, channels)
        self.mlp = network(channels, channels, nn.GELU())

    def forward(self, x, hidden, later=None, memory=None, memory_hidden=None):
        y = self.pre[0](x)
        x = x + self.attend(0, y, y, hidden, later)
        if memory is not None:
            x = x + self.attend(1, self.pre[1](x), memory, memory_hidden)
        return x + self.mlp(self.pre[-1](x))


class UnnormedDecoder(nn.Module):
    """The encoder ends in a norm, the decoder not; PAD is 1."""

    def __init__(self, channels=30, heads=6):
        super().__init__()
        self.source, self.target = nn.Embedding(37, channels), nn.Embedding(61, channels)
        self.register_buffer("position_encoding", interleaved_positions(27, channels)[None])
        stages = several(2, PreStage, channels, heads, 1)
        self.encode = Part(stages=stages, ln_post=nn.LayerNorm(channels))
        self.decode = Part(stages=several(3, PreStage, channels, heads, 2))
        self.classify = bare(channels, 61)

    def forward(self, src, tgt):
        hidden, later = src == 1, ~past(tgt.shape[1])[0, 0]
        x = self.source(src) * math.sqrt(30) + self.position_encoding[:, : src.shape[1]]
        memory = self.encode.ln_post(through(self.encode.stages, x, hidden))
        y = self.target(tgt) * math.sqrt(30) + self.position_encoding[:, : tgt.shape[1]]
        return self.classify(through(self.decode.stages, y, tgt == 1, later, memory, hidden))


class SequenceStage(Stage):
    """Norms `ln_a` to `ln_c` are used in the order c, a, b (encoder: b, a)."""

    def __init__(self, d_model, width, count):
        super().__init__(d_model, 2, False, count)
        self.ln_a, self.ln_b, self.ln_c = several(3, nn.LayerNorm, d_model)
        self.ln_c = self.ln_c if count > 1 else None
        self.network = network(d_model, width, nn.ReLU())

    def forward(self, x, hidden, later=None, memory=None, memory_hidden=None):
        y = x + self.attend(0, x, x, hidden, later)
        if memory is None:
            x = self.ln_b(y)
            return self.ln_a(x + self.network(x))
        x = self.ln_c(y)
        x = self.ln_a(x + self.attend(1, x, memory, memory_hidden))
        return self.ln_b(x + self.network(x))


class SequenceFirst(nn.Module):
    """Everything is [L, B, D], the logits [T, B, V] too."""

    def __init__(self, d_model=22, width=34):
        super().__init__()
        self.register_buffer("pe", interleaved_positions(34, d_model)[:, None])
        self.emb_src, self.emb_trg = nn.Embedding(39, d_model), nn.Embedding(45, d_model)
        self.down = several(2, SequenceStage, d_model, width, 2)
        self.up = several(3, SequenceStage, d_model, width, 1)
        self.fc = nn.Linear(d_model, 45)

    def forward(self, src, tgt):
        x = self.emb_src(src.T) * math.sqrt(22) + self.pe[: src.shape[1]]
        x = through(self.up, x, src == 0)
        y = self.emb_trg(tgt.T) * math.sqrt(22) + self.pe[: tgt.shape[1]]
        later = ~past(tgt.shape[1])[0, 0]
        return self.fc(through(self.down, y, tgt == 0, later, x, src == 0))


class AttentionWithNorm(Part):
    """It adds its input and norms the sum itself."""

    def forward(self, q, k, v, mask):
        heads = attended(self.w_qs(q), self.w_ks(k), self.w_vs(v), 2, mask)
        return self.layer_norm(self.fc(heads) + q)


class NetworkWithNorm(Part):
    def forward(self, x):
        return self.layer_norm(self.w_2(F.relu(self.w_1(x))) + x)


class NormInside(nn.Module):
    """One table for both sides and the output, whose input is scaled down."""

    def __init__(self, words=57, d_model=40):
        super().__init__()
        norm = partial(nn.LayerNorm, d_model, eps=1e-6)

        def attention():
            projections = {name: bare(d_model, d_model) for name in ("w_qs", "w_ks", "w_vs", "fc")}
            return AttentionWithNorm(**projections, layer_norm=norm())

        def layer(crossing):
            inner = {"w_1": nn.Linear(d_model, 62), "w_2": nn.Linear(62, d_model)}
            cross = {"enc_attn": attention()} if crossing else {}
            own = NetworkWithNorm(**inner, layer_norm=norm())
            return Part(slf_attn=attention(), **cross, pos_ffn=own)

        self.encoder, self.decoder = (
            Part(
                word_emb=nn.Embedding(words, d_model, padding_idx=0),
                layer_stack=several(2, layer, crossing),
                layer_norm=norm(),
            )
            for crossing in (False, True)
        )
        for stack in (self.encoder, self.decoder):
            stack.register_buffer("pos_table", interleaved_positions(44, d_model)[None])
        self.word_prj = bare(d_model, words)
        self.word_prj.weight = self.encoder.word_emb.weight = self.decoder.word_emb.weight

    def run(self, stack, ids, mask, memory=None, seen=None):
        x = stack.layer_norm(stack.word_emb(ids) + stack.pos_table[:, : ids.shape[1]])
        for layer in stack.layer_stack:
            x = layer.slf_attn(x, x, x, mask)
            if memory is not None:
                x = layer.enc_attn(x, memory, memory, seen)
            x = layer.pos_ffn(x)
        return x

    def forward(self, src, tgt):
        seen, back = masks(src, tgt)
        memory = self.run(self.encoder, src, seen)
        return self.word_prj(self.run(self.decoder, tgt, back, memory, seen)) * 40**-0.5


class Normed(Part):
    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class WideAttention(Part):
    """Its heads are together wider or narrower than the model."""

    def forward(self, x, mask, context=None):
        k, v = self.to_kv(x if context is None else context).chunk(2, dim=-1)
        return self.to_out(attended(self.to_q(x), k, v, 3, mask))


class GatedHalves(nn.Module):
    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return F.gelu(gate) * x


class Wrapped(nn.Module):
    """Lists of lists, a norm around a function; both inner projections are one matrix."""

    def __init__(self, dim=26, wide=24, inner=38):
        super().__init__()
        self.src_emb, self.tgt_emb = nn.Embedding(35, dim), nn.Embedding(49, dim)
        self.src_pos, self.tgt_pos = (nn.Parameter(torch.randn(1, 21, dim)) for _ in range(2))

        def layer(attentions):
            blocks = [
                WideAttention(
                    to_kv=bare(dim, 2 * wide), to_q=bare(dim, wide), to_out=nn.Linear(wide, dim)
                )
                for _ in range(attentions)
            ]
            gated = nn.Sequential(nn.Linear(dim, 2 * inner), GatedHalves(), nn.Linear(inner, dim))
            return nn.ModuleList(Normed(norm=nn.LayerNorm(dim), fn=fn) for fn in (*blocks, gated))

        self.enc = Part(layers=several(2, layer, 1), norm=nn.LayerNorm(dim))
        self.dec = several(2, layer, 2)
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 49))

    def forward(self, src, tgt):
        mask = (src != 0)[:, None, None]
        x = self.src_emb(src) + self.src_pos[:, : src.shape[1]]
        for attn, ff in self.enc.layers:
            x = attn(x, mask=mask) + x
            x = ff(x) + x
        x = self.enc.norm(x)
        y = self.tgt_emb(tgt) + self.tgt_pos[:, : tgt.shape[1]]
        for attn, cross_attn, ff in self.dec:
            y = attn(y, mask=past(tgt.shape[1])) + y
            y = cross_attn(y, mask=mask, context=x) + y
            y = ff(y) + y
        return self.to_logits(y)


class ForeignModel(NamedTuple):
    """A program, fields of its config, and whether the padding of its source is masked."""

    build: Callable[[], nn.Module]
    expected: dict[str, Any]
    hides: bool

    def module(self):
        """Return the module without dropout, no parameter at its starting value."""
        return randomized(self.build()).eval()


def model(build, sizes, fields=MappingProxyType({}), *, hides=True):
    """Return a model; sizes are vocabularies, d_model, num_heads, d_ff, and numbers of layers."""
    names = ("src_vocab_size", "tgt_vocab_size", "d_model", "num_heads", "d_ff")
    names += ("num_encoder_layers", "num_decoder_layers")
    expected = {"pad_id": 0} | dict(zip(names, sizes, strict=True)) | dict(fields)
    return ForeignModel(build, expected, hides)


PRE_NORM = {"norm_placement": "pre", "final_norm": True}
LEARNED = {"embedding_scale": "none", "positions": "learned"}
NO_BIAS = {"qkv_bias": False, "attention_output_bias": False}
NO_LAYER_BIAS = NO_BIAS | {"feed_forward_bias": False, "norm_bias": False}
SHARED = {"token_embeddings": "shared", "output_projection": "tied", "output_bias": False}
GATED = {"gated_feed_forward": True}
MODELS = {
    "fused_rows": model(
        FusedRows,
        (53, 53, 32, 4, 128, 3, 2),
        PRE_NORM | SHARED | LEARNED | NO_LAYER_BIAS | {"max_length": 23, "activation": "gelu"},
    ),
    "keys_before_queries": model(
        KeysBeforeQueries,
        (41, 41, 20, 5, 36, 2, 3),
        {"max_length": 31, "positions": "sinusoidal_halves", "norm_epsilon": 1e-6} | {"pad_id": 1},
    ),
    "fused_columns": model(
        FusedColumns,
        (37, 43, 36, 3, 60, 2, 2),
        PRE_NORM
        | LEARNED
        | {"max_length": 17, "output_projection": "tied", "output_bias": False}
        | {"activation": "gelu_tanh"},
        hides=False,
    ),
    "fused_heads": model(FusedHeads, (43, 47, 28, 7, 44, 2, 2)),
    "clones": model(
        Clones,
        (31, 37, 24, 4, 40, 3, 3),
        PRE_NORM | {"max_length": 50, "norm": "std_norm", "norm_epsilon": 1e-6},
    ),
    "mean_free": model(
        MeanFree,
        (33, 51, 24, 3, 44, 2, 3),
        PRE_NORM
        | NO_LAYER_BIAS
        | GATED
        | {"embedding_scale": "none", "output_bias": False, "activation": "silu"}
        | {"norm": "rms_norm", "norm_epsilon": 1e-6},
    ),
    "kernels": model(
        Kernels,
        (31, 31, 16, 4, 48, 2, 2),
        LEARNED
        | NO_BIAS
        | {"max_length": 19, "embedding_norm": True, "activation": "gelu"}
        | {"norm_epsilon": 1e-12},
    ),
    "letters": model(
        Letters,
        (59, 67, 42, 6, 50, 3, 2),
        {"positions": "none", "qkv_bias": False, "activation": "silu"}
        | {"norm_placement": "pre", "norm_epsilon": 1e-3, "memory_norm": True},
    ),
    "unnormed_decoder": model(
        UnnormedDecoder,
        (37, 61, 30, 6, 30, 2, 3),
        PRE_NORM
        | {"max_length": 27, "output_bias": False, "activation": "gelu"}
        | {"decoder_final_norm": False, "pad_id": 1},
    ),
    "sequence_first": model(SequenceFirst, (39, 45, 22, 2, 34, 3, 2), {"max_length": 34}),
    "norm_inside": model(
        NormInside,
        (57, 57, 40, 2, 62, 2, 2),
        SHARED
        | NO_BIAS
        | {"max_length": 44, "embedding_scale": "none", "embedding_norm": True}
        | {"output_scale": "inverse_sqrt_d_model", "norm_epsilon": 1e-6},
    ),
    "wrapped": model(
        Wrapped,
        (35, 49, 26, 3, 38, 2, 2),
        PRE_NORM
        | LEARNED
        | GATED
        | {"d_kv": 8, "max_length": 21, "qkv_bias": False, "activation": "gelu"},
    ),
}
