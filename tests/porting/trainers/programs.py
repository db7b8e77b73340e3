"""The models of four training programs written anew, with the names of their code.

Each is built from the program's own settings, returns logits [B, T, V] for ids [B, S] and [B, T],
and `save` writes the files that the program leaves. Position tables are computed in float64.
"""

import argparse
import math
from functools import partial

import torch
import yaml
from torch import nn

from tests.convert.families.bart_lineage import tensor2tensor_sinusoids
from tests.convert.foreign import Attention, StdNorm
from tests.porting.models import masks, waves

WORDS = tuple(f"w{index}" for index in range(33))
ACTIVATIONS = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_accurate": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gated-gelu": nn.functional.gelu,
    "swish": nn.functional.silu,
    "silu": nn.functional.silu,
}


class Part(nn.Module):
    """A module of named parts."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


class Numbered(Attention):
    """Attention whose projections are a list."""

    def __init__(self, width, heads):
        super().__init__(width, heads, ())
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def projections(self):
        return self.linears


class Model(nn.Module):
    """What the four have in common: residual connections before or after a norm.

    Subclasses have `embed(stack, ids)`, `head(x)` and `sublayers(layer)`: self-attention, attention
    to the memory and the feed-forward network, each after its norm.
    """

    pad, pre = 1, True

    def layers(self, stack):
        return getattr(self, stack).layers

    def final(self, stack):
        return getattr(getattr(self, stack), "layer_norm", None)

    def run(self, stack, ids, mask, memory=None, memory_mask=None):
        x = self.embed(stack, ids)
        for layer in self.layers(stack):
            (norm, attend), *cross, (last_norm, feed_forward) = self.sublayers(layer)
            steps = [(norm, lambda y, f=attend: f(y, y, mask))]
            steps += [(norm, lambda y, f=f: f(y, memory, memory_mask)) for norm, f in cross]
            for norm, function in (*steps, (last_norm, feed_forward)):
                x = x + function(norm(x)) if self.pre else norm(x + function(x))
        return x if self.final(stack) is None else self.final(stack)(x)

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt, self.pad)
        memory = self.run("encoder", src, src_mask)
        return self.head(self.run("decoder", tgt, tgt_mask, memory, src_mask))


class AnnotatedTransformer(Model):
    pad = 2

    def __init__(self, layers=(1, 2), width=20, inner=28, heads=4, sizes=(37, 31)):
        super().__init__()
        self.width = width

        def norm():
            return StdNorm(width, 1e-6, "a_2", "b_2")

        def layer(attentions):
            parts = {name: Numbered(width, heads) for name in attentions}
            inside = Part(w_1=nn.Linear(width, inner), w_2=nn.Linear(inner, width))
            connections = nn.ModuleList(Part(norm=norm()) for _ in range(len(attentions) + 1))
            return Part(**parts, feed_forward=inside, sublayer=connections)

        names = {"encoder": ("self_attn",), "decoder": ("self_attn", "src_attn")}
        for (stack, attentions), count in zip(names.items(), layers, strict=True):
            blocks = nn.ModuleList(layer(attentions) for _ in range(count))
            setattr(self, stack, Part(layers=blocks, norm=norm()))
        for name, size in zip(("src_embed", "tgt_embed"), sizes, strict=True):
            table = Part(pe=waves(5000, width)[None])
            parts = [Part(lut=nn.Embedding(size, width)), table]
            setattr(self, name, nn.ModuleList(parts))
        self.generator = Part(proj=nn.Linear(width, sizes[1]))

    def embed(self, stack, ids):
        words, table = self.src_embed if stack == "encoder" else self.tgt_embed
        return words.lut(ids) * math.sqrt(self.width) + table.pe[:, : ids.shape[1]]

    def final(self, stack):
        return getattr(self, stack).norm

    def sublayers(self, layer):
        inside = layer.feed_forward
        attentions = [
            getattr(layer, name) for name in ("self_attn", "src_attn") if hasattr(layer, name)
        ]
        functions = (*attentions, lambda x: inside.w_2(inside.w_1(x).relu()))
        return zip((part.norm for part in layer.sublayer), functions, strict=True)

    def head(self, x):
        return self.generator.proj(x)

    def save(self, folder):
        torch.save(self.state_dict(), folder / "multi30k_model_final.pt")
        return folder / "multi30k_model_final.pt"


FAIRSEQ = {
    **{
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in {
            "embed_dim": 20,
            "ffn_embed_dim": 28,
            "attention_heads": 4,
            "normalize_before": False,
            "learned_pos": False,
        }.items()
    },
    "encoder_layers": 1,
    "decoder_layers": 2,
    "max_source_positions": 23,
    "max_target_positions": 23,
    "dropout": 0.2,
    "source_lang": "de",
    "target_lang": "en",
}


class Fairseq(Model):
    def __init__(self, **given):
        super().__init__()
        self.settings = s = FAIRSEQ | given
        self.words = WORDS, WORDS if s.get("share_all_embeddings") else WORDS[:27]
        width, inner = s["encoder_embed_dim"], s["encoder_ffn_embed_dim"]
        names = ("q_proj", "k_proj", "v_proj", "out_proj")

        def layer(attentions):
            parts = {"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)}
            for name in attentions:
                parts[name] = Attention(width, s["encoder_attention_heads"], names)
                parts[f"{name}_layer_norm"] = nn.LayerNorm(width)
            return Part(**parts, final_layer_norm=nn.LayerNorm(width))

        attentions = {"encoder": ("self_attn",), "decoder": ("self_attn", "encoder_attn")}
        for stack, words in zip(attentions, self.words, strict=True):
            blocks = [layer(attentions[stack]) for _ in range(s[f"{stack}_layers"])]
            parts = {"layers": nn.ModuleList(blocks), "version": torch.tensor([3.0])}
            parts["embed_tokens"] = nn.Embedding(4 + len(words), width)
            if s[f"{stack}_learned_pos"]:
                parts["embed_positions"] = nn.Embedding(23 + 2, width)
            if s.get("layernorm_embedding"):
                parts["layernorm_embedding"] = nn.LayerNorm(width)
            if s[f"{stack}_normalize_before"]:
                parts["layer_norm"] = nn.LayerNorm(width)
            setattr(self, stack, Part(**parts))
        if s.get("share_all_embeddings"):
            self.decoder.embed_tokens = self.encoder.embed_tokens
        self.decoder.output_projection = nn.Linear(width, 4 + len(self.words[1]), bias=False)
        if s.get("share_all_embeddings") or s.get("share_decoder_input_output_embed"):
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight

    @property
    def pre(self):
        return self.settings["encoder_normalize_before"]

    def embed(self, stack, ids):
        part = getattr(self, stack)
        x = part.embed_tokens(ids)
        if not self.settings.get("no_scale_embedding"):
            x = x * math.sqrt(x.shape[-1])
        if not self.settings.get("no_token_positional_embeddings"):
            real = ids != self.pad
            rows = self.pad + real * real.cumsum(1)
            if hasattr(part, "embed_positions"):
                x = x + part.embed_positions(rows)
            else:
                x = x + tensor2tensor_sinusoids(99, x.shape[-1]).to(x)[rows]
        return part.layernorm_embedding(x) if hasattr(part, "layernorm_embedding") else x

    def sublayers(self, layer):
        activation = ACTIVATIONS[self.settings.get("activation_fn", "relu")]
        for name in ("self_attn", "encoder_attn"):
            if hasattr(layer, name):
                yield getattr(layer, f"{name}_layer_norm"), getattr(layer, name)
        yield layer.final_layer_norm, lambda x: layer.fc2(activation(layer.fc1(x)))

    def head(self, x):
        return self.decoder.output_projection(x)

    def save(self, folder, newer=True):
        """Write the checkpoint of version 0.12, or that of the versions before 0.10."""
        for language, words in zip(("de", "en"), self.words, strict=True):
            lines = [f"{word} {99 - index}\n" for index, word in enumerate(words)]
            (folder / f"dict.{language}.txt").write_text("".join(lines))
        settings = argparse.Namespace(**self.settings, arch="transformer", criterion=None)
        task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
        state = {"model": self.state_dict(), "args": None if newer else settings}
        if newer:
            state["cfg"] = {"_name": None, "model": settings, "task": task}
        state["optimizer_history"] = [{"num_updates": 7, "optimizer_name": "FairseqAdam"}]
        state["last_optimizer_state"] = {"state": {0: {"exp_avg": torch.ones(5)}}}
        torch.save(state, folder / "checkpoint_best.pt")
        return folder / "checkpoint_best.pt"


class JoeyNMT(Model):
    def __init__(self, layer_norm="pre", activation="relu", scale=False, **tied):
        super().__init__()
        width, inner, heads = 20, 28, 4
        both = {"type": "transformer", "hidden_size": width, "ff_size": inner}
        both |= {"num_heads": heads, "layer_norm": layer_norm, "activation": activation}
        both |= {"embeddings": {"embedding_dim": width, "scale": scale}, "dropout": 0.2}
        self.settings = {"encoder": both | {"num_layers": 1}, **tied}
        self.settings["decoder"] = both | {"num_layers": 2}
        specials = ("<unk>", "<pad>", "<s>", "</s>")
        self.words = specials + WORDS, specials + WORDS[: None if tied else 27]
        self.scale = math.sqrt(width) if scale else 1.0
        names = ("q_layer", "k_layer", "v_layer", "output_layer")

        def norm():
            return nn.LayerNorm(width, eps=1e-6)

        def layer(**parts):
            empty = nn.Identity()
            steps = [nn.Linear(width, inner), empty, empty, nn.Linear(inner, width)]
            inside = Part(pwff_layer=nn.ModuleList(steps), layer_norm=norm())
            return Part(**parts, feed_forward=inside)

        def attention():
            return Attention(width, heads, names)

        def stack(layers):
            final = {"layer_norm": norm()} if layer_norm == "pre" else {}
            table = Part(pe=waves(5000, width)[None])
            return Part(layers=nn.ModuleList(layers), pe=table, **final)

        self.encoder = stack([layer(src_src_att=attention(), layer_norm=norm())])
        attentions = ("trg_trg_att", "src_trg_att")
        norms = ("x_layer_norm", "dec_layer_norm")
        self.decoder = stack(
            layer(**{name: attention() for name in attentions}, **{name: norm() for name in norms})
            for _ in range(2)
        )
        self.src_embed = Part(lut=nn.Embedding(len(self.words[0]), width))
        self.trg_embed = Part(lut=nn.Embedding(len(self.words[1]), width))
        if tied.get("tied_embeddings"):
            self.trg_embed = self.src_embed
        self.decoder.output_layer = nn.Linear(width, len(self.words[1]), bias=False)
        if tied.get("tied_softmax"):
            self.decoder.output_layer.weight = self.trg_embed.lut.weight

    @property
    def pre(self):
        return self.settings["encoder"]["layer_norm"] == "pre"

    def embed(self, stack, ids):
        table = self.src_embed if stack == "encoder" else self.trg_embed
        return table.lut(ids) * self.scale + getattr(self, stack).pe.pe[:, : ids.shape[1]]

    def sublayers(self, layer):
        activation = ACTIVATIONS[self.settings["encoder"]["activation"]]
        if hasattr(layer, "src_src_att"):
            yield layer.layer_norm, layer.src_src_att
        else:
            yield layer.x_layer_norm, layer.trg_trg_att
            yield layer.dec_layer_norm, layer.src_trg_att
        first, _, _, last = layer.feed_forward.pwff_layer
        yield layer.feed_forward.layer_norm, lambda x: last(activation(first(x)))

    def head(self, x):
        return self.decoder.output_layer(x)

    def save(self, folder, **changed):
        settings = {"name": "test", "data": {"src": {"lang": "de"}}, "model": self.settings}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings | changed))
        for name, words in zip(("src_vocab.txt", "trg_vocab.txt"), self.words, strict=True):
            (folder / name).write_text("\n".join(words) + "\n")
        state = {"model_state": self.state_dict(), "scheduler_state": None}
        state |= {"optimizer_state": {"state": {}}, "stats_state": {"best_ckpt_score": math.inf}}
        torch.save(state, folder / "best.ckpt")
        return folder / "best.ckpt"


OPENNMT = {
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "position_encoding": True,
    "enc_hid_size": 20,
    "dec_hid_size": 20,
    "enc_layers": 1,
    "dec_layers": 2,
    "heads": 4,
    "transformer_ff": 28,
    "dropout": [0.2],
    "attention_dropout": [0.1],
}


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class OpenNMT(Model):
    def __init__(self, qkv_bias=False, ffn_bias=True, **given):
        super().__init__()
        self.settings = s = OPENNMT | given
        specials = ("<unk>", "<blank>", "<s>", "</s>")
        shared = s.get("share_embeddings")
        self.words = specials + WORDS, specials + WORDS[: None if shared else 27]
        width, inner, epsilon = 20, 28, s.get("norm_eps", 1e-6)
        names = ("linear_query", "linear_keys", "linear_values", "final_linear")
        gated = s.get("pos_ffn_activation_fn") in ("silu", "gated-gelu")

        def norm():
            kind = RMSNorm if s.get("layer_norm") == "rms" else nn.LayerNorm
            return kind(width, eps=epsilon)

        def inside():
            parts = {"w_1": nn.Linear(width, inner, ffn_bias)}
            parts |= {"w_3": nn.Linear(width, inner, ffn_bias)} if gated else {}
            return Part(**parts, w_2=nn.Linear(inner, width, ffn_bias), layer_norm=norm())

        def layer(attentions, norms):
            parts = {name: Attention(width, 4, names, qkv_bias) for name in attentions}
            return Part(**parts, feed_forward=inside(), **{name: norm() for name in norms})

        encoder = [layer(["self_attn"], ["layer_norm"])]
        norms = ("layer_norm_1", "layer_norm_2")
        decoder = [layer(("self_attn", "context_attn"), norms) for _ in range(2)]
        concatenated = s.get("position_encoding_type") == "SinusoidalConcat"
        table = (tensor2tensor_sinusoids if concatenated else waves)(5000, width)[:, None]

        def embeddings(words):
            tables = nn.ModuleList([nn.Embedding(len(words), width)])
            return Part(make_embedding=Part(emb_luts=tables, pe=Part(pe=table.clone())))

        source, target = map(embeddings, self.words)
        encoder, decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.encoder = Part(embeddings=source, transformer=encoder, layer_norm=norm())
        self.decoder = Part(embeddings=target, transformer_layers=decoder, layer_norm=norm())
        own = target.make_embedding.emb_luts[0]
        if shared:
            own.weight = source.make_embedding.emb_luts[0].weight
        self.generator = nn.Linear(width, len(self.words[1]))
        if s.get("share_decoder_embeddings"):
            self.generator.weight = own.weight

    def layers(self, stack):
        return self.encoder.transformer if stack == "encoder" else self.decoder.transformer_layers

    def embed(self, stack, ids):
        part = getattr(self, stack).embeddings.make_embedding
        x = part.emb_luts[0](ids)
        return x * math.sqrt(x.shape[-1]) + part.pe.pe[: ids.shape[1], 0]

    def sublayers(self, layer):
        activation = ACTIVATIONS[self.settings.get("pos_ffn_activation_fn", "relu")]
        part = layer.feed_forward

        def inside(x):
            hidden = activation(part.w_1(x))
            return part.w_2(hidden * part.w_3(x) if hasattr(part, "w_3") else hidden)

        if hasattr(layer, "context_attn"):
            yield layer.layer_norm_1, layer.self_attn
            yield layer.layer_norm_2, layer.context_attn
        else:
            yield layer.layer_norm, layer.self_attn
        yield part.layer_norm, inside

    def head(self, x):
        return self.generator(x)

    def save(self, folder, version=3, **changed):
        state = self.state_dict()
        generator = {name: state.pop(f"generator.{name}") for name in ("weight", "bias")}
        if version == 2:
            generator = {f"0.{name}": tensor for name, tensor in generator.items()}
        source, target = map(list, self.words)
        vocab = {"src": source, "tgt": target, "data_task": "seq2seq", "decoder_start_token": "<s>"}
        options = argparse.Namespace(**(self.settings | changed))
        saved = {"model": state, "generator": generator, "vocab": vocab, "opt": options}
        torch.save({**saved, "optim": {"training_step": 7}}, folder / "model_step_7.pt")
        return folder / "model_step_7.pt"


PRE_TIED = {"encoder_normalize_before": True, "decoder_normalize_before": True}
PRE_TIED |= {"share_decoder_input_output_embed": True, "activation_fn": "gelu_accurate"}
LEARNED_SHARED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
LEARNED_SHARED |= {"share_all_embeddings": True, "layernorm_embedding": True}
LEARNED_SHARED |= {"no_scale_embedding": True, "activation_fn": "gelu"}
GATED_SHARED = {"pos_ffn_activation_fn": "gated-gelu", "layer_norm": "rms", "norm_eps": 1e-5}
GATED_SHARED |= {"share_embeddings": True, "share_decoder_embeddings": True}
GATED_SHARED |= {"position_encoding_type": "SinusoidalConcat"}
# Name of the trainer, and what builds a model of it.
CASES = {
    "annotated": ("annotated_transformer", AnnotatedTransformer),
    "fairseq post": ("fairseq", Fairseq),
    "fairseq pre tied": ("fairseq", partial(Fairseq, **PRE_TIED)),
    "fairseq learned shared": ("fairseq", partial(Fairseq, **LEARNED_SHARED)),
    "fairseq without positions": (
        "fairseq",
        partial(Fairseq, no_token_positional_embeddings=True),
    ),
    "joeynmt pre": ("joeynmt", JoeyNMT),
    "joeynmt post scaled": (
        "joeynmt",
        partial(JoeyNMT, "post", "gelu", scale=True, tied_softmax=False),
    ),
    "joeynmt pre tied": (
        "joeynmt",
        partial(JoeyNMT, "pre", "swish", tied_softmax=True, tied_embeddings=True),
    ),
    "opennmt": ("opennmt_py", OpenNMT),
    "opennmt biases gelu tied": (
        "opennmt_py",
        partial(OpenNMT, True, pos_ffn_activation_fn="gelu", share_decoder_embeddings=True),
    ),
    "opennmt gated rms shared": ("opennmt_py", partial(OpenNMT, ffn_bias=False, **GATED_SHARED)),
}
