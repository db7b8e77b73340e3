"""fairseq's `transformer`: checkpoints with `args` or `cfg`, and dict.LANGUAGE.txt beside them.

Source of the facts: the public code of fairseq 0.12. Its positions count the tokens that are not
padding, from the row after that of padding on: sources that are padded on the left, as fairseq
does by default, and on the right, as here, give the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.convert.buffers import FixedBuffer
from jax_transformer.convert.families.bart_lineage import stack_rows
from jax_transformer.convert.layouts.torch_nn import table_rows
from jax_transformer.convert.table import Buffer, Layout
from jax_transformer.errors import InputError
from jax_transformer.model.tree import STACKS
from jax_transformer.porting.trainers import vocabulary
from jax_transformer.porting.trainers.trainer import Settings, Trainer, TrainerCheckpoint, as_dict
from jax_transformer.storage.reading import MAX_TOKENIZER, read_text
from jax_transformer.storage.weights.torch_file import Checkpoint

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
_, PAD, EOS, UNK = range(4)
OVERWRITE = "#fairseq:overwrite"
# What the architecture "transformer" takes an absent setting for; older checkpoints lack some.
DEFAULTS: Mapping[str, Any] = {
    "activation_fn": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "relu_dropout": 0.0,
    "encoder_embed_dim": 512,
    "encoder_ffn_embed_dim": 2048,
    "encoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_layers": 6,
    "decoder_attention_heads": 8,
    "max_source_positions": 1024,
    "max_target_positions": 1024,
}
# Settings of models that no config expresses, where they are on.
REFUSED = """
    adaptive_input adaptive_softmax_cutoff base_layers char_inputs cross_self_attention
    decoder_layerdrop decoder_layers_to_keep decoder_xformers_att_config encoder_layerdrop
    encoder_layers_to_keep encoder_xformers_att_config merge_src_tgt_embed no_cross_attention
    no_decoder_final_norm quant_noise_pq quant_noise_scalar scale_attn scale_fc scale_heads
    scale_resids tie_adaptive_proj tie_adaptive_weights
"""
ACTIVATIONS = {"relu": "relu", "gelu": "gelu"}
ACTIVATIONS |= {"gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
# Names of older versions, which fairseq itself renames when it loads them.
_OLD_NORM = re.compile(r"^(encoder|decoder)\.layers\.(\d+)\.layer_norms\.(\d)\.(weight|bias)$")
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
_FUSED = re.compile(r"^(.*_attn)\.in_proj_(weight|bias)$")
VERSION = FixedBuffer("triangle", (1,), "float32", (3.0, 3.0))
LAYOUT = Layout(
    "fairseq",
    rows=(
        *table_rows("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"),
        *stack_rows(""),
    ),
    buffers=tuple(Buffer(f"{stack}.version", VERSION) for stack in STACKS),
    unused=tuple(
        f"{stack}.embed_positions.{name}"  # of tables that are computed
        for stack in STACKS
        for name in ("_float_tensor", "weights")
    ),
)


def _read(checkpoint: Checkpoint) -> TrainerCheckpoint:
    """Return the model; the newer `cfg` counts where the file has both."""
    content = as_dict(checkpoint.content)
    whole = as_dict(content.get("cfg"))
    values = as_dict(whole.get("model")) or as_dict(content.get("args"))
    task = as_dict(whole.get("task")) or values
    for part in ("encoder", "decoder", "quant_noise"):  # newer versions nest them
        nested = as_dict(values.get(part))
        values |= {f"{part}_{name}": value for name, value in nested.items()}
    if not values:
        raise InputError(f"{checkpoint.path}: holds no settings under 'cfg' or 'args'")
    tensors = _renamed(checkpoint.arrays(content.get("model")))
    return TrainerCheckpoint(
        tensors,
        Settings("fairseq", values, DEFAULTS),
        source_tokens=_tokens(checkpoint.path, task, "source"),
        target_tokens=_tokens(checkpoint.path, task, "target"),
    )


def _renamed(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors by the names of version 0.12."""
    renamed = {}
    for name, array in tensors.items():
        if match := _OLD_NORM.match(name):
            stack, layer, index, leaf = match.groups()
            if int(index) < len(_OLD_NORMS[stack]):
                name = f"{stack}.layers.{layer}.{_OLD_NORMS[stack][int(index)]}.{leaf}"
        elif name == "decoder.embed_out":
            name = "decoder.output_projection.weight"
        if (match := _FUSED.match(name)) and array.shape and array.shape[0] % 3 == 0:
            for letter, part in zip("qkv", np.split(array, 3), strict=True):
                renamed[f"{match[1]}.{letter}_proj.{match[2]}"] = part
        else:
            renamed[name] = array
    return renamed


def _tokens(path: Path, task: Mapping[str, Any], side: str) -> list[str] | None:
    """Return the tokens of a dictionary beside the checkpoint, or in the folder of the data."""
    language = task.get(f"{side}_lang")
    if not isinstance(language, str) or "/" in language or not language.isprintable():
        return None
    file = path.parent / f"dict.{language}.txt"
    return read_dictionary(file) if file.is_file() else None


def read_dictionary(path: Path) -> list[str]:
    """Return the token of each id of a dictionary, a file of lines "token count"."""
    tokens = list(SPECIAL_TOKENS)
    known = set(tokens)
    lines = read_text(path, vocabulary.MISSING, MAX_TOKENIZER).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        token, _, count = line.rstrip().rpartition(" ")
        replaces = count == OVERWRITE
        if replaces:
            token, _, count = token.rpartition(" ")
        if not token or not count.isdecimal():
            raise InputError(f"{path}: line {number} is no token with its count")
        if token in known and not replaces:
            raise InputError(f"{path}: line {number} repeats a token; remove one of them")
        known.add(token)
        tokens.append(token)
    return tokens


def _fields(model: TrainerCheckpoint) -> dict[str, Any]:
    s = model.settings
    s.off(REFUSED)
    widths = _present(s, "decoder_embed_dim", "decoder_input_dim", "decoder_output_dim")
    pre = s.flag("encoder_normalize_before", "decoder_normalize_before")
    shared = s.flag("share_all_embeddings")
    tied = shared or s.flag("share_decoder_input_output_embed")
    learned = s.flag("encoder_learned_pos", "decoder_learned_pos")
    positions = "learned" if learned else "sinusoidal_tensor2tensor"
    if s.flag("no_token_positional_embeddings"):
        positions = "none"
    return {
        "src_vocab_size": model.shape("encoder.embed_tokens.weight")[0],
        "tgt_vocab_size": model.shape("decoder.embed_tokens.weight")[0],
        "d_model": s.agreed("encoder_embed_dim", *widths),
        "num_heads": s.agreed("encoder_attention_heads", "decoder_attention_heads"),
        "d_ff": s.agreed("encoder_ffn_embed_dim", *_present(s, "decoder_ffn_embed_dim")),
        "num_encoder_layers": s["encoder_layers"],
        "num_decoder_layers": s["decoder_layers"],
        "max_length": _max_length(s, positions),
        "token_embeddings": "shared" if shared else "separate",
        "embedding_scale": "none" if s.flag("no_scale_embedding") else "sqrt_d_model",
        "positions": positions,
        "position_offset": 0 if positions == "none" else PAD + 1,
        "embedding_norm": s.flag("layernorm_embedding"),
        "output_projection": "tied" if tied else "linear",
        "output_bias": False,
        "activation": s.word("activation_fn", ACTIVATIONS),
        "norm_placement": "pre" if pre else "post",
        "final_norm": pre,
        "dropout": s["dropout"],
        "attention_dropout": s["attention_dropout"],
        "activation_dropout": s["activation_dropout"] or s["relu_dropout"] or 0.0,
        "initialization": "vaswani2017",
        "pad_id": PAD,
        "bos_id": EOS,  # targets begin with the token that ends them
        "eos_id": EOS,
    }


def _present(settings: Settings, *names: str) -> list[str]:
    """Return those of the decoder's settings that are there; the others are the encoder's."""
    return [name for name in names if settings.values.get(name) is not None]


def _max_length(settings: Settings, positions: str) -> int:
    """Return the longest source or target: a learned table has as many rows for both."""
    if positions == "learned":
        return settings.agreed("max_source_positions", "max_target_positions")
    sides = ("max_source_positions", "max_target_positions")
    for side in sides:
        if type(settings[side]) is not int:
            raise settings.refusal(side, "it must be a whole number")
    return max(settings[side] for side in sides)


TRAINER = Trainer(
    "fairseq",
    marks=({"model", "cfg"}, {"model", "args"}),
    read=_read,
    fields=_fields,
    tokenizer=lambda model, config: vocabulary.word_tokenizer(
        model, config, UNK, source_suffix=[EOS], any_whitespace=True
    ),
    remedy=(
        "with fairseq installed, c = torch.load('checkpoint.pt', weights_only=False); cfg = "
        "c.get('cfg'); cfg = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else cfg; "
        "torch.save({'model': c['model'], 'cfg': cfg, 'args': c.get('args')}, 'plain.pt')"
    ),
    layout=LAYOUT,
)
