"""Foreign models that keep query, key and value in one tensor, in five orders and orientations.

Every class is written as one author would write it, without this library in mind. They share no
code but the masks: authors do not agree on names either.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.convert.foreign import interleaved_positions


def past(length):
    """Return the mask [1, 1, T, T] that hides later positions, True = attend."""
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def heads_of(x, count):
    """Return [B, L, D] as [B, H, L, K]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def masks(src, tgt, pad=0):
    """Return the masks [B, 1, 1, S] and [B, 1, T, T], True = attend."""
    return (src != pad)[:, None, None], (tgt != pad)[:, None, None] & past(tgt.shape[1])


def through(layers, x, *others):
    """Return what leaves the last of some layers."""
    for layer in layers:
        x = layer(x, *others)
    return x


def attended(q, k, v, count, mask=None):
    """Return what `count` heads read [B, L, D]."""
    q, k, v = (heads_of(x, count) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


# FusedRows: one matrix (3D, D), in the order of query, key and value; no bias anywhere.


class BiaslessSelfAttention(nn.Module):
    def __init__(self, width, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, mask):
        return self.out(attended(*self.qkv(x).chunk(3, -1), self.n_head, mask))


class BiaslessCrossAttention(nn.Module):
    def __init__(self, width, n_head):
        super().__init__()
        self.n_head = n_head
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.q = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, memory, mask):
        return self.out(attended(self.q(x), *self.kv(memory).chunk(2, -1), self.n_head, mask))


class BiaslessBlock(nn.Module):
    def __init__(self, width, n_head, inner, cross):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.attn = BiaslessSelfAttention(width, n_head)
        if cross:
            self.ln_x = nn.LayerNorm(width, bias=False)
            self.cross = BiaslessCrossAttention(width, n_head)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        up, down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.mlp = nn.ModuleDict({"up": up, "down": down})

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = x + self.attn(self.ln_1(x), mask)
        if memory is not None:
            x = x + self.cross(self.ln_x(x), memory, memory_mask)
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.ln_2(x))))


class FusedRows(nn.Module):
    """Only the padding of the source is masked; one table for both sides and the output."""

    def __init__(self, width=32, n_head=4, vocab=53, block_size=23):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab, width)
        self.src_pos_emb = nn.Embedding(block_size, width)
        self.tgt_pos_emb = nn.Embedding(block_size, width)
        enc = (BiaslessBlock(width, n_head, 128, False) for _ in range(3))
        dec = (BiaslessBlock(width, n_head, 128, True) for _ in range(2))
        self.enc, self.dec = nn.Module(), nn.Module()
        self.enc.blocks, self.dec.blocks = nn.ModuleList(enc), nn.ModuleList(dec)
        self.enc.ln_f = nn.LayerNorm(width, bias=False)
        self.dec.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.tok_emb.weight

    def forward(self, src, tgt):
        src_mask = (src != 0)[:, None, None]
        x = self.tok_emb(src) + self.src_pos_emb.weight[: src.shape[1]]
        memory = self.enc.ln_f(through(self.enc.blocks, x, src_mask))
        y = self.tok_emb(tgt) + self.tgt_pos_emb.weight[: tgt.shape[1]]
        y = through(self.dec.blocks, y, past(tgt.shape[1]), memory, src_mask)
        return self.lm_head(self.dec.ln_f(y))


# KeysBeforeQueries: one matrix (3D, D), in the order of key, query and value.


class KeyQueryValue(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.kqv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, other, mask):
        kernels, biases = self.kqv.weight.chunk(3), self.kqv.bias.chunk(3)
        k, q, v = map(F.linear, (other, x, other), kernels, biases)
        return self.proj(attended(q, k, v, self.heads, mask))


class KeysBeforeQueriesLayer(nn.Module):
    """Its norms are defined in another order than they are used in."""

    def __init__(self, dim, heads, hidden, decoder):
        super().__init__()
        self.ff_norm = nn.LayerNorm(dim, eps=1e-6)
        self.mixer = KeyQueryValue(dim, heads)
        self.mixer_norm = nn.LayerNorm(dim, eps=1e-6)
        if decoder:
            self.reader_norm = nn.LayerNorm(dim, eps=1e-6)
            self.reader = KeyQueryValue(dim, heads)
        self.shrink = nn.Linear(hidden, dim)
        self.expand = nn.Linear(dim, hidden)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.mixer_norm(x + self.mixer(x, x, mask))
        if memory is not None:
            x = self.reader_norm(x + self.reader(x, memory, memory_mask))
        return self.ff_norm(x + self.shrink(self.expand(x).relu()))


class KeysBeforeQueries(nn.Module):
    """PAD is 1; a table of all sines, then all cosines, lies in a buffer [L, D]."""

    def __init__(self, dim=20, heads=5, hidden=36, words=41, longest=31):
        super().__init__()
        self.readers = nn.ModuleList(
            KeysBeforeQueriesLayer(dim, heads, hidden, False) for _ in range(2)
        )
        self.writers = nn.ModuleList(
            KeysBeforeQueriesLayer(dim, heads, hidden, True) for _ in range(3)
        )
        self.words_in, self.words_out = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.head = nn.Linear(dim, words)
        angle = torch.arange(longest)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("timing", torch.cat([angle.sin(), angle.cos()], 1))
        self.scale = math.sqrt(dim)

    def forward(self, src, tgt):
        see, back = masks(src, tgt, pad=1)
        x = self.words_in(src) * self.scale + self.timing[: src.shape[1]]
        y = self.words_out(tgt) * self.scale + self.timing[: tgt.shape[1]]
        return self.head(through(self.writers, y, back, through(self.readers, x, see), see))


# FusedColumns: matrices (D, 3D) that are multiplied from the right, as GPT-2's.


class Conv1D(nn.Module):
    def __init__(self, nx, nf):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class ColumnAttention(nn.Module):
    def __init__(self, nx, n_head, cross=False):
        super().__init__()
        self.n_head, self.cross = n_head, cross
        self.c_attn = Conv1D(nx, (2 if cross else 3) * nx)
        if cross:
            self.q_attn = Conv1D(nx, nx)
        self.c_proj = Conv1D(nx, nx)

    def forward(self, x, memory=None, bias=None):
        if self.cross:
            q, (k, v) = self.q_attn(x), self.c_attn(memory).chunk(2, dim=2)
        else:
            q, k, v = self.c_attn(x).chunk(3, dim=2)
        return self.c_proj(attended(q, k, v, self.n_head, bias))


class ColumnBlock(nn.Module):
    def __init__(self, nx, n_head, inner, cross):
        super().__init__()
        self.ln_1 = nn.LayerNorm(nx)
        self.attn = ColumnAttention(nx, n_head)
        self.ln_2 = nn.LayerNorm(nx)
        self.mlp = nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(nx, inner), Conv1D(inner, nx)
        if cross:
            self.crossattention = ColumnAttention(nx, n_head, cross=True)
            self.ln_cross_attn = nn.LayerNorm(nx)

    def forward(self, x, memory=None, bias=None):
        x = x + self.attn(self.ln_1(x), bias=bias)
        if memory is not None:
            x = x + self.crossattention(self.ln_cross_attn(x), memory)
        inner = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp.c_proj(inner)


class ColumnStack(nn.Module):
    def __init__(self, vocab, nx, n_head, inner, n_layer, n_positions, cross):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, nx), nn.Embedding(n_positions, nx)
        self.h = nn.ModuleList(ColumnBlock(nx, n_head, inner, cross) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(nx)

    def forward(self, ids, memory=None, bias=None):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        return self.ln_f(through(self.h, x, memory, bias))


class FusedColumns(nn.Module):
    """No padding is masked at all; the output is tied with the target's table."""

    def __init__(self):
        super().__init__()
        self.encoder = ColumnStack(37, 36, 3, 60, 2, 17, False)
        self.decoder = ColumnStack(43, 36, 3, 60, 2, 17, True)

    def forward(self, src, tgt):
        hidden = self.decoder(tgt, self.encoder(src), past(tgt.shape[1]))
        return hidden @ self.decoder.wte.weight.T


# FusedHeads: one matrix whose rows hold query, key and value of head 0, then of head 1, ...


class PerHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, cross=False):
        super().__init__()
        self.num_heads, self.cross = num_heads, cross
        if cross:
            self.q_proj = nn.Linear(embed_dim, embed_dim)
            self.kv_proj = nn.Linear(embed_dim, 2 * embed_dim)
        else:
            self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask, memory=None):
        if self.cross:
            q, fused = heads_of(self.q_proj(x), self.num_heads), self.kv_proj(memory)
            k, v = heads_of(fused, self.num_heads).chunk(2, -1)
        else:
            q, k, v = heads_of(self.qkv_proj(x), self.num_heads).chunk(3, -1)
        scores = (q @ k.mT / math.sqrt(k.shape[-1])).masked_fill(mask == 0, -9e15)
        weights = self.softmax(scores)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class PerHeadLayer(nn.Module):
    def __init__(self, input_dim, num_heads, feed_forward, decoder=False):
        super().__init__()
        self.self_attn = PerHeadAttention(input_dim, num_heads)
        if decoder:
            self.cross_attn = PerHeadAttention(input_dim, num_heads, cross=True)
            self.norm3 = nn.LayerNorm(input_dim)
        self.linear_net = nn.Sequential(
            nn.Linear(input_dim, feed_forward),
            nn.Dropout(0.1),
            nn.ReLU(inplace=True),
            nn.Linear(feed_forward, input_dim),
        )
        self.norm1, self.norm2 = nn.LayerNorm(input_dim), nn.LayerNorm(input_dim)

    def forward(self, x, mask, memory=None, memory_mask=None):
        y, heads = self.self_attn(x, mask)
        x = self.norm1(x + y)
        if memory is not None:
            y, heads = self.cross_attn(x, memory_mask, memory)
            x = self.norm3(x + y)
        return self.norm2(x + self.linear_net(x)), heads


class PerHeadNet(nn.Module):
    def __init__(self, dim=28, num_heads=7, feed_forward=44):
        super().__init__()
        self.embed = nn.ModuleDict({"src": nn.Embedding(43, dim), "tgt": nn.Embedding(47, dim)})
        self.register_buffer("pe", interleaved_positions(40, dim)[None], persistent=False)
        self.encoder = nn.ModuleList(PerHeadLayer(dim, num_heads, feed_forward) for _ in range(2))
        self.decoder = nn.ModuleList(
            PerHeadLayer(dim, num_heads, feed_forward, decoder=True) for _ in range(2)
        )
        self.output_net = nn.Linear(dim, 47)

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt)
        scale = self.pe.shape[-1] ** 0.5
        x = self.embed["src"](src) * scale + self.pe[:, : src.shape[1]]
        for layer in self.encoder:
            x, _ = layer(x, src_mask)
        y = self.embed["tgt"](tgt) * scale + self.pe[:, : tgt.shape[1]]
        for layer in self.decoder:
            y, heads = layer(y, tgt_mask, x, src_mask)
        return self.output_net(y), heads


class FusedHeads(nn.Module):
    """A trainer's module around the model; it returns what its heads read beside the logits."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.net = PerHeadNet()

    def forward(self, src, tgt):
        return self.model.net(src, tgt)
