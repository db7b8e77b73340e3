"""Foreign models with a tensor for each projection, under names that tell much or nothing."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.convert.foreign import Positions, StdNorm, interleaved_positions
from tests.porting.fused_models import attended, masks, through

# Clones: linears.0 to linears.3, norms by the deviation, log-probabilities.


class ClonedAttention(nn.Module):
    """Query, key, value and output are clones in a list."""

    def __init__(self, h, d_model):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value, mask):
        inputs = zip(self.linears, (query, key, value), strict=False)
        return self.linears[-1](attended(*(linear(x) for linear, x in inputs), self.h, mask))


class Connection(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = StdNorm(size, 1e-6, "a_2", "b_2")

    def forward(self, x, inside):
        return x + inside(self.norm(x))


class CloneLayer(nn.Module):
    def __init__(self, size, h, d_ff, decoder):
        super().__init__()
        self.self_attn = ClonedAttention(h, size)
        if decoder:
            self.src_attn = ClonedAttention(h, size)
        self.feed_forward = nn.Module()
        self.feed_forward.w_1, self.feed_forward.w_2 = nn.Linear(size, d_ff), nn.Linear(d_ff, size)
        self.sublayer = nn.ModuleList(Connection(size) for _ in range(3 if decoder else 2))

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        if memory is not None:
            x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, memory_mask))
        return self.sublayer[-1](
            x, lambda x: self.feed_forward.w_2(self.feed_forward.w_1(x).relu())
        )


class CloneStack(nn.Module):
    def __init__(self, size, h, d_ff, count, decoder):
        super().__init__()
        self.layers = nn.ModuleList(CloneLayer(size, h, d_ff, decoder) for _ in range(count))
        self.norm = StdNorm(size, 1e-6, "a_2", "b_2")

    def forward(self, x, *others):
        return self.norm(through(self.layers, x, *others))


class LookUp(nn.Module):
    def __init__(self, size, vocab):
        super().__init__()
        self.lut = nn.Embedding(vocab, size)

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.lut.embedding_dim)


class Clones(nn.Module):
    def __init__(self, size=24, h=4, d_ff=40):
        super().__init__()
        self.encoder = CloneStack(size, h, d_ff, 3, False)
        self.decoder = CloneStack(size, h, d_ff, 3, True)
        table = interleaved_positions(50, size)
        self.src_embed = nn.Sequential(LookUp(size, 31), Positions("pe", table))
        self.tgt_embed = nn.Sequential(LookUp(size, 37), Positions("pe", table.clone()))
        self.generator = nn.Module()
        self.generator.proj = nn.Linear(size, 37)

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt)
        memory = self.encoder(self.src_embed(src), src_mask)
        x = self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask)
        return self.generator.proj(x).log_softmax(-1)


# MeanFree: a norm without a mean, a gated feed-forward network, no bias in a layer.


class MeanFreeNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class PlainAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        for name in ("wo", "wv", "wk", "wq"):
            self.add_module(name, nn.Linear(dim, dim, bias=False))

    def forward(self, x, context, mask):
        q, k, v = self.wq(x), self.wk(context), self.wv(context)
        return self.wo(attended(q, k, v, self.n_heads, mask))


class GatedNetwork(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MeanFreeBlock(nn.Module):
    def __init__(self, dim, n_heads, hidden, decoder):
        super().__init__()
        self.attention_norm = MeanFreeNorm(dim)
        self.attention = PlainAttention(dim, n_heads)
        self.context_norm = MeanFreeNorm(dim) if decoder else None
        self.context_attention = PlainAttention(dim, n_heads) if decoder else None
        self.ffn_norm = MeanFreeNorm(dim)
        self.ffn = GatedNetwork(dim, hidden)

    def forward(self, x, mask, context=None, context_mask=None):
        y = self.attention_norm(x)
        x = x + self.attention(y, y, mask)
        if context is not None:
            x = x + self.context_attention(self.context_norm(x), context, context_mask)
        return x + self.ffn(self.ffn_norm(x))


class MeanFree(nn.Module):
    def __init__(self, dim=24, n_heads=3, hidden=44):
        super().__init__()
        self.input_table = nn.Embedding(33, dim)
        self.output_table = nn.Embedding(51, dim)
        self.encoder_blocks = nn.ModuleList(
            MeanFreeBlock(dim, n_heads, hidden, False) for _ in range(2)
        )
        self.decoder_blocks = nn.ModuleList(
            MeanFreeBlock(dim, n_heads, hidden, True) for _ in range(3)
        )
        self.encoder_norm, self.decoder_norm = MeanFreeNorm(dim), MeanFreeNorm(dim)
        self.output = nn.Linear(dim, 51, bias=False)

    def forward(self, src, tgt):
        """Its positions are not in its file: they are computed in every call."""
        dim = self.input_table.embedding_dim
        table = interleaved_positions(max(src.shape[1], tgt.shape[1]), dim).to(self.output.weight)
        visible, back = masks(src, tgt)
        x = self.input_table(src) + table[: src.shape[1]]
        context = self.encoder_norm(through(self.encoder_blocks, x, visible))
        y = self.output_table(tgt) + table[: tgt.shape[1]]
        y = through(self.decoder_blocks, y, back, context, visible)
        return self.output(self.decoder_norm(y))


# Kernels: plain parameters (inputs, outputs), and layers that are attributes, not a list.


class KernelLayer(nn.Module):
    def __init__(self, d, heads, decoder):
        super().__init__()
        self.heads = heads
        for name in "qkvo":
            self.register_parameter(f"W{name}", nn.Parameter(torch.randn(d, d) / d**0.5))
            if decoder:
                self.register_parameter(f"U{name}", nn.Parameter(torch.randn(d, d) / d**0.5))
        self.Wi, self.bi = nn.Parameter(torch.randn(d, 3 * d)), nn.Parameter(torch.zeros(3 * d))
        self.Wf, self.bf = nn.Parameter(torch.randn(3 * d, d)), nn.Parameter(torch.zeros(d))
        for name in ("self", "cross", "ff") if decoder else ("self", "ff"):
            self.register_parameter(f"gain_{name}", nn.Parameter(torch.ones(d)))
            self.register_parameter(f"shift_{name}", nn.Parameter(torch.zeros(d)))

    def norm(self, x, name):
        gain, shift = getattr(self, f"gain_{name}"), getattr(self, f"shift_{name}")
        return F.layer_norm(x, x.shape[-1:], gain, shift, 1e-12)

    def attend(self, x, y, letter, mask):
        q, k, v, o = (getattr(self, f"{letter}{name}") for name in "qkvo")
        return attended(x @ q, y @ k, y @ v, self.heads, mask) @ o

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm(x + self.attend(x, x, "W", mask), "self")
        if memory is not None:
            x = self.norm(x + self.attend(x, memory, "U", memory_mask), "cross")
        return self.norm(x + F.gelu(x @ self.Wi + self.bi) @ self.Wf + self.bf, "ff")


class Kernels(nn.Module):
    """Embeddings plus learned positions are normed; the output is a bare kernel."""

    def __init__(self, d=16, heads=4, vocab=31, length=19):
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        for stack in (self.encoder, self.decoder):
            stack.word, stack.place = nn.Embedding(vocab, d), nn.Embedding(length, d)
            stack.start = nn.LayerNorm(d, eps=1e-12)
            for i in range(2):
                stack.add_module(f"layer{i}", KernelLayer(d, heads, stack is self.decoder))
        self.to_words = nn.Parameter(torch.randn(d, vocab))
        self.words_bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, src, tgt):
        see, back = masks(src, tgt)
        x, y = (
            stack.start(stack.word(ids) + stack.place.weight[: ids.shape[1]])
            for stack, ids in ((self.encoder, src), (self.decoder, tgt))
        )
        x = through((self.encoder.layer0, self.encoder.layer1), x, see)
        y = through((self.decoder.layer0, self.decoder.layer1), y, back, x, see)
        return y @ self.to_words + self.words_bias


# Letters: projections a, b, c, d, norms n1 to n4, of which n4 is the memory's; no positions.


class LetterAttention(nn.Module):
    def __init__(self, n, h):
        super().__init__()
        self.h = h
        for name in "abcd":
            self.add_module(name, nn.Linear(n, n, bias=name == "d"))

    def forward(self, x, y, mask):
        return self.d(attended(self.a(x), self.b(y), self.c(y), self.h, mask))


class LetterLayer(nn.Module):
    def __init__(self, n, h, m, decoder):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(n, eps=1e-3), nn.LayerNorm(n, eps=1e-3)
        self.s = LetterAttention(n, h)
        if decoder:
            self.n3, self.n4 = nn.LayerNorm(n, eps=1e-3), nn.LayerNorm(n, eps=1e-3)
            self.t = LetterAttention(n, h)
        self.e, self.f = nn.Linear(n, m), nn.Linear(m, n)

    def forward(self, x, mask, memory=None, memory_mask=None):
        y = self.n2(x)
        x = x + self.s(y, y, mask)
        if memory is not None:
            x = x + self.t(self.n3(x), self.n4(memory), memory_mask)
        return x + self.f(F.silu(self.e(self.n1(x))))


class Letters(nn.Module):
    def __init__(self, n=42, h=6, m=50):
        super().__init__()
        self.enc_layers = nn.ModuleList(LetterLayer(n, h, m, False) for _ in range(3))
        self.dec_layers = nn.ModuleList(LetterLayer(n, h, m, True) for _ in range(2))
        self.u, self.w = nn.Embedding(59, n), nn.Embedding(67, n)
        self.z = nn.Linear(n, 67)

    def forward(self, src, tgt):
        see, back = masks(src, tgt)
        x, y = self.u(src) * 42**0.5, self.w(tgt) * 42**0.5
        x = through(self.enc_layers, x, see)
        return self.z(through(self.dec_layers, y, back, x, see))
