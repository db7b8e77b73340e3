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
from tests.convert.foreign import StdNorm, attend, merge, split
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


STACKS = ("encoder", "decoder")


class Model(nn.Module):
    """What the four have in common: the names of modules, of the encoder before the decoder.

    Attributes:
        lists: Of the layers; what follows is inside a layer.
        attentions: To the stack itself, and to the memory; `projections` are query, key, value and
            output.
        products: Of the feed-forward network: inner, outer, and that beside the gate.
        norms: Of the attentions and of the network.
        tables: Of the words; `head` is the output projection.
        ends: The norms behind the layers.
        positions: Buffers with tables of positions.
        pre: Whether norms are before the residual connections.
        final: Whether norms are behind the layers.
        scaled: Whether vectors of words are multiplied by sqrt(width).
    """

    lists = tuple(f"{stack}.layers" for stack in STACKS)
    ends, positions = tuple(f"{stack}.layer_norm" for stack in STACKS), ()
    pad, width, heads, inner, depth = 1, 20, 4, 28, (1, 2)
    pre, final, scaled, activation = True, True, True, "relu"
    head_bias, attention_bias, network_bias = True, True, True

    def build(self, sizes):
        """Make all modules for vocabularies of two sizes."""
        width = self.width
        for stack in (0, 1):
            for layer in range(self.depth[stack]):
                for name in self.attentions[stack]:
                    for projection in self.projections:
                        part = nn.Linear(width, width, self.attention_bias)
                        self.put(self.inside(stack, layer, f"{name}.{projection}"), part)
                for place, name in enumerate(self.products):
                    ends = (self.inner, width) if place == 1 else (width, self.inner)
                    part = nn.Linear(*ends, self.network_bias)
                    self.put(self.inside(stack, layer, name), part)
                for name in self.norms[stack]:
                    self.put(self.inside(stack, layer, name), self.norm())
            if self.final:
                self.put(self.ends[stack], self.norm())
            self.put(self.tables[stack], nn.Embedding(sizes[stack], width))
        for name in self.positions:
            self.put(name, self.table())
        self.put(self.head, nn.Linear(width, sizes[1], self.head_bias))

    def norm(self):
        return nn.LayerNorm(self.width)

    def table(self):
        return waves(5000, self.width)[None]

    def inside(self, stack, layer, name):
        return f"{self.lists[stack]}.{layer}.{name}"

    def put(self, path, part):
        """Put a module or a buffer at a path of attributes; modules around it are made."""
        module, (*outer, last) = self, path.split(".")
        for name in outer:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module._modules[name]
        if isinstance(part, nn.Module):
            module.add_module(last, part)
        else:
            module.register_buffer(last, part)

    def tie(self, path, other):
        self.get_submodule(path).weight = self.get_submodule(other).weight

    def placed(self, x, stack, ids):
        table = self.get_buffer(self.positions[stack])
        return x + table.reshape(-1, self.width)[: ids.shape[1]]

    def embed(self, stack, ids):
        x = self.get_submodule(self.tables[stack])(ids)
        return self.placed(x * math.sqrt(self.width) if self.scaled else x, stack, ids)

    def attention(self, path, x, y, mask):
        query, key, value, output = (
            self.get_submodule(f"{path}.{name}") for name in self.projections
        )
        heads = (split(part, self.heads) for part in (query(x), key(y), value(y)))
        return output(merge(attend(*heads, mask)))

    def network(self, paths, x):
        inner, outer, *gate = map(self.get_submodule, paths)
        hidden = ACTIVATIONS[self.activation](inner(x))
        return outer(hidden * gate[0](x) if gate else hidden)

    def run(self, stack, ids, mask, memory=None, seen=None):
        x = self.embed(stack, ids)
        for layer in range(self.depth[stack]):
            place = partial(self.inside, stack, layer)
            inner, *crossing = map(place, self.attentions[stack])
            steps = [lambda y, path=inner: self.attention(path, y, y, mask)]
            steps += [
                lambda y, path=path: self.attention(path, y, memory, seen) for path in crossing
            ]
            steps.append(partial(self.network, [place(name) for name in self.products]))
            for step, name in zip(steps, self.norms[stack], strict=True):
                norm = self.get_submodule(place(name))
                x = x + step(norm(x)) if self.pre else norm(x + step(x))
        return self.get_submodule(self.ends[stack])(x) if self.final else x

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt, self.pad)
        memory = self.run(0, src, src_mask)
        return self.get_submodule(self.head)(self.run(1, tgt, tgt_mask, memory, src_mask))


class AnnotatedTransformer(Model):
    pad = 2
    attentions = (("self_attn",), ("self_attn", "src_attn"))
    norms = tuple(tuple(f"sublayer.{n}.norm" for n in range(count)) for count in (2, 3))
    projections = tuple(f"linears.{n}" for n in range(4))
    products = ("feed_forward.w_1", "feed_forward.w_2")
    tables = ("src_embed.0.lut", "tgt_embed.0.lut")
    ends = ("encoder.norm", "decoder.norm")
    head = "generator.proj"
    positions = ("src_embed.1.pe", "tgt_embed.1.pe")

    def __init__(self):
        super().__init__()
        self.build((37, 31))

    def norm(self):
        return StdNorm(self.width, 1e-6, "a_2", "b_2")

    def save(self, folder):
        torch.save(self.state_dict(), folder / "multi30k_model_final.pt")
        return folder / "multi30k_model_final.pt"


FAIRSEQ = {
    **{
        f"{stack}_{name}": value
        for stack in STACKS
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
    attentions = (("self_attn",), ("self_attn", "encoder_attn"))
    norms = (
        ("self_attn_layer_norm", "final_layer_norm"),
        ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    )
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    products = ("fc1", "fc2")
    tables = ("encoder.embed_tokens", "decoder.embed_tokens")
    head = "decoder.output_projection"
    head_bias = False

    def __init__(self, **given):
        super().__init__()
        self.settings = s = FAIRSEQ | given
        shared = s.get("share_all_embeddings")
        self.words = WORDS, WORDS if shared else WORDS[:27]
        self.pre = self.final = s["encoder_normalize_before"]
        self.scaled = not s.get("no_scale_embedding")
        self.activation = s.get("activation_fn", "relu")
        self.build([4 + len(words) for words in self.words])
        for stack in STACKS:
            self.put(f"{stack}.version", torch.tensor([3.0]))
            if s[f"{stack}_learned_pos"]:
                self.put(f"{stack}.embed_positions", nn.Embedding(23 + 2, self.width))
            if s.get("layernorm_embedding"):
                self.put(f"{stack}.layernorm_embedding", self.norm())
        if shared:
            self.decoder.embed_tokens = self.encoder.embed_tokens
        if shared or s.get("share_decoder_input_output_embed"):
            self.tie(self.head, "decoder.embed_tokens")

    def placed(self, x, stack, ids):
        part = getattr(self, STACKS[stack])
        if not self.settings.get("no_token_positional_embeddings"):
            real = ids != self.pad
            rows = self.pad + real * real.cumsum(1)
            if hasattr(part, "embed_positions"):
                x = x + part.embed_positions(rows)
            else:
                x = x + tensor2tensor_sinusoids(99, self.width).to(x)[rows]
        return part.layernorm_embedding(x) if hasattr(part, "layernorm_embedding") else x

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
    attentions = (("src_src_att",), ("trg_trg_att", "src_trg_att"))
    norms = (
        ("layer_norm", "feed_forward.layer_norm"),
        ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm"),
    )
    projections = ("q_layer", "k_layer", "v_layer", "output_layer")
    products = ("feed_forward.pwff_layer.0", "feed_forward.pwff_layer.3")
    tables = ("src_embed.lut", "trg_embed.lut")
    head = "decoder.output_layer"
    positions, head_bias = ("encoder.pe.pe", "decoder.pe.pe"), False

    def __init__(self, layer_norm="pre", activation="relu", scale=False, **tied):
        super().__init__()
        both = {"type": "transformer", "hidden_size": self.width, "ff_size": self.inner}
        both |= {"num_heads": self.heads, "layer_norm": layer_norm, "activation": activation}
        both |= {"embeddings": {"embedding_dim": self.width, "scale": scale}, "dropout": 0.2}
        self.settings = {"encoder": both | {"num_layers": 1}, **tied}
        self.settings["decoder"] = both | {"num_layers": 2}
        specials = ("<unk>", "<pad>", "<s>", "</s>")
        self.words = specials + WORDS, specials + WORDS[: None if tied else 27]
        self.pre = self.final = layer_norm == "pre"
        self.scaled, self.activation = scale, activation
        self.build([*map(len, self.words)])
        if tied.get("tied_embeddings"):
            self.trg_embed = self.src_embed
        if tied.get("tied_softmax"):
            self.tie(self.head, "trg_embed.lut")

    def norm(self):
        return nn.LayerNorm(self.width, eps=1e-6)

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


class OpenNMT(Model):
    lists = ("encoder.transformer", "decoder.transformer_layers")
    attentions = (("self_attn",), ("self_attn", "context_attn"))
    norms = (
        ("layer_norm", "feed_forward.layer_norm"),
        ("layer_norm_1", "layer_norm_2", "feed_forward.layer_norm"),
    )
    projections = ("linear_query", "linear_keys", "linear_values", "final_linear")
    products = ("feed_forward.w_1", "feed_forward.w_2")
    tables = tuple(f"{stack}.embeddings.make_embedding.emb_luts.0" for stack in STACKS)
    head = "generator"
    positions = tuple(f"{stack}.embeddings.make_embedding.pe.pe" for stack in STACKS)

    def __init__(self, qkv_bias=False, ffn_bias=True, **given):
        super().__init__()
        self.settings = s = OPENNMT | given
        specials = ("<unk>", "<blank>", "<s>", "</s>")
        shared = s.get("share_embeddings")
        self.words = specials + WORDS, specials + WORDS[: None if shared else 27]
        self.attention_bias, self.network_bias = qkv_bias, ffn_bias
        self.activation = s.get("pos_ffn_activation_fn", "relu")
        if self.activation in ("silu", "gated-gelu"):
            self.products = (*self.products, "feed_forward.w_3")
        self.build([*map(len, self.words)])
        if shared:
            self.tie(self.tables[1], self.tables[0])
        if s.get("share_decoder_embeddings"):
            self.tie(self.head, self.tables[1])

    def norm(self):
        kind = nn.RMSNorm if self.settings.get("layer_norm") == "rms" else nn.LayerNorm
        return kind(self.width, eps=self.settings.get("norm_eps", 1e-6))

    def table(self):
        concatenated = self.settings.get("position_encoding_type") == "SinusoidalConcat"
        return (tensor2tensor_sinusoids if concatenated else waves)(5000, self.width)[:, None]

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
POST_SCALED = {"layer_norm": "post", "activation": "gelu", "scale": True, "tied_softmax": False}
TIED = {"activation": "swish", "tied_softmax": True, "tied_embeddings": True}
BIASES = {"qkv_bias": True, "pos_ffn_activation_fn": "gelu", "share_decoder_embeddings": True}
GATED_SHARED = {"ffn_bias": False, "layer_norm": "rms", "norm_eps": 1e-5}
GATED_SHARED |= {"pos_ffn_activation_fn": "gated-gelu", "share_embeddings": True}
GATED_SHARED |= {"share_decoder_embeddings": True, "position_encoding_type": "SinusoidalConcat"}
PROGRAMS = {
    "annotated_transformer": AnnotatedTransformer,
    "fairseq": Fairseq,
    "joeynmt": JoeyNMT,
    "opennmt_py": OpenNMT,
}
# The trainer, and the settings of a model of it.
CASES = {
    "annotated": ("annotated_transformer", {}),
    "fairseq post": ("fairseq", {}),
    "fairseq pre tied": ("fairseq", PRE_TIED),
    "fairseq learned shared": ("fairseq", LEARNED_SHARED),
    "fairseq without positions": ("fairseq", {"no_token_positional_embeddings": True}),
    "joeynmt pre": ("joeynmt", {}),
    "joeynmt post scaled": ("joeynmt", POST_SCALED),
    "joeynmt pre tied": ("joeynmt", TIED),
    "opennmt": ("opennmt_py", {}),
    "opennmt biases gelu tied": ("opennmt_py", BIASES),
    "opennmt gated rms shared": ("opennmt_py", GATED_SHARED),
}
