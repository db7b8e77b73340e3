"""Foreign models built of torch's attention, or whose norms and residuals lie in wrappers."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.convert.foreign import interleaved_positions
from tests.porting.fused_models import attended, masks, past, through

# UnnormedDecoder: torch's attention inside own layers; the encoder ends in a norm, the decoder not.


class Stage(nn.Module):
    def __init__(self, channels, heads, cross):
        super().__init__()
        self.pre = nn.LayerNorm(channels)
        self.mha = nn.MultiheadAttention(channels, heads, batch_first=True)
        if cross:
            self.pre_cross = nn.LayerNorm(channels)
            self.mha_cross = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.pre_mlp = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels)
        )

    def forward(self, x, pad, later=None, memory=None, memory_pad=None):
        y = self.pre(x)
        x = x + self.mha(y, y, y, key_padding_mask=pad, attn_mask=later, need_weights=False)[0]
        if memory is not None:
            y = self.pre_cross(x)
            y, _ = self.mha_cross(y, memory, memory, key_padding_mask=memory_pad)
            x = x + y
        return x + self.mlp(self.pre_mlp(x))


class UnnormedDecoder(nn.Module):
    """PAD is 1; the feed-forward network is as wide as the model."""

    def __init__(self, channels=30, heads=6):
        super().__init__()
        self.source, self.target = nn.Embedding(37, channels), nn.Embedding(61, channels)
        self.register_buffer("position_encoding", interleaved_positions(27, channels)[None])
        self.encode = nn.Module()
        self.encode.stages = nn.ModuleList(Stage(channels, heads, False) for _ in range(2))
        self.encode.ln_post = nn.LayerNorm(channels)
        self.decode = nn.Module()
        self.decode.stages = nn.ModuleList(Stage(channels, heads, True) for _ in range(3))
        self.classify = nn.Linear(channels, 61, bias=False)

    def forward(self, src, tgt):
        src_pad, tgt_pad = src == 1, tgt == 1
        x = self.source(src) * math.sqrt(30) + self.position_encoding[:, : src.shape[1]]
        memory = self.encode.ln_post(through(self.encode.stages, x, src_pad))
        y = self.target(tgt) * math.sqrt(30) + self.position_encoding[:, : tgt.shape[1]]
        later = ~past(tgt.shape[1])[0, 0]
        return self.classify(through(self.decode.stages, y, tgt_pad, later, memory, src_pad))


# SequenceFirst: everything is [L, B, D], the output too; post-norm.


class SequencePositions(nn.Module):
    def __init__(self, d_model, max_len=34):
        super().__init__()
        self.dropout = nn.Dropout(p=0.1)
        self.register_buffer("pe", interleaved_positions(max_len, d_model)[:, None])

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


class SequenceLayer(nn.Module):
    """Norms `ln_a` to `ln_c` are used in the order c, a, b (encoder: b, a)."""

    def __init__(self, d_model, nhead, width, decoder):
        super().__init__()
        self.ln_a, self.ln_b = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.lin_b = nn.Linear(width, d_model)
        self.lin_a = nn.Linear(d_model, width)
        if decoder:
            self.ln_c = nn.LayerNorm(d_model)
            self.xattn = nn.MultiheadAttention(d_model, nhead)
        self.attn = nn.MultiheadAttention(d_model, nhead)

    def forward(self, x, pad, later=None, memory=None, memory_pad=None):
        y, _ = self.attn(x, x, x, attn_mask=later, key_padding_mask=pad)
        if memory is None:
            x = self.ln_b(x + y)
            return self.ln_a(x + self.lin_b(self.lin_a(x).relu()))
        x = self.ln_c(x + y)
        y, _ = self.xattn(x, memory, memory, key_padding_mask=memory_pad)
        x = self.ln_a(x + y)
        return self.ln_b(x + self.lin_b(self.lin_a(x).relu()))


class SequenceFirst(nn.Module):
    """Takes ids [B, S] and [B, T] and returns logits [T, B, V]."""

    def __init__(self, d_model=22, nhead=2, width=34):
        super().__init__()
        self.positional = SequencePositions(d_model)
        self.emb_src, self.emb_trg = nn.Embedding(39, d_model), nn.Embedding(45, d_model)
        self.down = nn.ModuleList(SequenceLayer(d_model, nhead, width, True) for _ in range(2))
        self.up = nn.ModuleList(SequenceLayer(d_model, nhead, width, False) for _ in range(3))
        self.fc = nn.Linear(d_model, 45)
        self.d_model = d_model

    def forward(self, src, tgt):
        x = self.positional(self.emb_src(src.T) * math.sqrt(self.d_model))
        x = through(self.up, x, src == 0)
        y = self.positional(self.emb_trg(tgt.T) * math.sqrt(self.d_model))
        later = ~past(tgt.shape[1])[0, 0]
        return self.fc(through(self.down, y, tgt == 0, later, x, src == 0))


# NormInside: the attention module adds its input and norms the sum itself.


class AttentionWithNorm(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head = n_head
        for name in ("w_qs", "w_ks", "w_vs", "fc"):
            self.add_module(name, nn.Linear(d_model, d_model, bias=False))
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q, k, v, mask):
        heads = attended(self.w_qs(q), self.w_ks(k), self.w_vs(v), self.n_head, mask)
        return self.layer_norm(self.fc(heads) + q)


class NetworkWithNorm(nn.Module):
    def __init__(self, d_in, d_hid):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_in, d_hid), nn.Linear(d_hid, d_in)
        self.layer_norm = nn.LayerNorm(d_in, eps=1e-6)

    def forward(self, x):
        return self.layer_norm(self.w_2(F.relu(self.w_1(x))) + x)


class StackOfNorms(nn.Module):
    def __init__(self, vocab, d_model, n_head, d_inner, n_layers, decoder):
        super().__init__()
        self.word_emb = nn.Embedding(vocab, d_model, padding_idx=0)
        self.register_buffer("pos_table", interleaved_positions(44, d_model)[None])
        self.layer_stack = nn.ModuleList(nn.Module() for _ in range(n_layers))
        for layer in self.layer_stack:
            layer.slf_attn = AttentionWithNorm(n_head, d_model)
            if decoder:
                layer.enc_attn = AttentionWithNorm(n_head, d_model)
            layer.pos_ffn = NetworkWithNorm(d_model, d_inner)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, ids, mask, memory=None, memory_mask=None):
        x = self.layer_norm(self.word_emb(ids) + self.pos_table[:, : ids.shape[1]])
        for layer in self.layer_stack:
            x = layer.slf_attn(x, x, x, mask)
            if memory is not None:
                x = layer.enc_attn(x, memory, memory, memory_mask)
            x = layer.pos_ffn(x)
        return x


class NormInside(nn.Module):
    """One table for both sides and the output, whose input is scaled down."""

    def __init__(self, n_vocab=57, d_model=40, n_head=2, d_inner=62):
        super().__init__()
        self.encoder = StackOfNorms(n_vocab, d_model, n_head, d_inner, 2, False)
        self.decoder = StackOfNorms(n_vocab, d_model, n_head, d_inner, 2, True)
        self.word_prj = nn.Linear(d_model, n_vocab, bias=False)
        self.word_prj.weight = self.decoder.word_emb.weight
        self.encoder.word_emb.weight = self.decoder.word_emb.weight
        self.d_model = d_model

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt)
        memory = self.encoder(src, src_mask)
        hidden = self.decoder(tgt, tgt_mask, memory, src_mask)
        return self.word_prj(hidden) * self.d_model**-0.5


# Wrapped: lists of lists, a norm around a function; heads wider together than the model.


class Normed(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class WideAttention(nn.Module):
    def __init__(self, dim, heads, dim_head):
        super().__init__()
        self.heads = heads
        self.to_kv = nn.Linear(dim, 2 * heads * dim_head, bias=False)
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))

    def forward(self, x, mask, context=None):
        k, v = self.to_kv(x if context is None else context).chunk(2, dim=-1)
        return self.to_out(attended(self.to_q(x), k, v, self.heads, mask))


class GatedHalves(nn.Module):
    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return F.gelu(gate) * x


def gated_network(dim, inner):
    """The two inner projections are one matrix (2 inner, dim)."""
    return nn.Sequential(
        nn.Linear(dim, 2 * inner), GatedHalves(), nn.Dropout(0.1), nn.Linear(inner, dim)
    )


class Wrapped(nn.Module):
    def __init__(self, dim=26, heads=3, dim_head=8, inner=38, max_seq_len=21):
        super().__init__()
        self.src_emb, self.tgt_emb = nn.Embedding(35, dim), nn.Embedding(49, dim)
        self.src_pos = nn.Parameter(torch.randn(1, max_seq_len, dim))
        self.tgt_pos = nn.Parameter(torch.randn(1, max_seq_len, dim))

        def layer(cross):
            blocks = [WideAttention(dim, heads, dim_head) for _ in range(1 + cross)]
            return nn.ModuleList(Normed(dim, fn) for fn in (*blocks, gated_network(dim, inner)))

        self.enc, self.dec = nn.Module(), nn.Module()
        self.enc.layers = nn.ModuleList(layer(False) for _ in range(2))
        self.dec.layers = nn.ModuleList(layer(True) for _ in range(2))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 49))
        self.enc.norm = nn.LayerNorm(dim)

    def forward(self, src, tgt):
        mask = (src != 0)[:, None, None]
        x = self.src_emb(src) + self.src_pos[:, : src.shape[1]]
        for attn, ff in self.enc.layers:
            x = attn(x, mask=mask) + x
            x = ff(x) + x
        x = self.enc.norm(x)
        y = self.tgt_emb(tgt) + self.tgt_pos[:, : tgt.shape[1]]
        for attn, cross_attn, ff in self.dec.layers:
            y = attn(y, mask=past(tgt.shape[1])) + y
            y = cross_attn(y, mask=mask, context=x) + y
            y = ff(y) + y
        return self.to_logits(y)
