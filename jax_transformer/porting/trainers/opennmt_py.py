"""OpenNMT-py 2 and 3: checkpoints with `model`, `generator`, `vocab` and `opt`.

Source of the facts: the public code of OpenNMT-py 3.5. Checkpoints of version 2 hold a vocabulary
of torchtext, whose classes are not read; its tool convertv2_v3.py writes them as version 3 does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.layouts.torch_nn import layer_rows, linear, norm, table_rows
from jax_transformer.convert.table import Buffer, Layout
from jax_transformer.errors import InputError
from jax_transformer.model.tree import STACKS
from jax_transformer.porting.trainers import vocabulary
from jax_transformer.porting.trainers.trainer import Settings, Trainer, TrainerCheckpoint, as_dict
from jax_transformer.storage import weights as files
from jax_transformer.storage.weights.torch_file import Checkpoint

UNK, PAD, BOS, EOS = "<unk>", "<blank>", "<s>", "</s>"
EMBEDDINGS = {stack: f"{stack}.embeddings.make_embedding" for stack in STACKS}
ATTENTIONS = {
    "encoder": {"self_attention": ("self_attn", "layer_norm")},
    "decoder": {
        "self_attention": ("self_attn", "layer_norm_1"),
        "cross_attention": ("context_attn", "layer_norm_2"),
    },
}
LAYERS = {"encoder": "transformer", "decoder": "transformer_layers"}
PROJECTIONS = ("linear_query", "linear_keys", "linear_values", "final_linear")
FEED_FORWARD = ("feed_forward.w_1", "feed_forward.w_2", "feed_forward.layer_norm")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "gated-gelu": "gelu"}
POSITIONS = {"SinusoidalInterleaved": "sinusoidal", "SinusoidalConcat": "sinusoidal_tensor2tensor"}
NORMS = {"standard": "layer_norm", "rms": "rms_norm"}
REQUIRED = {
    "model_type": "text",
    "model_task": "seq2seq",
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "generator_function": "softmax",
}
# Options that older checkpoints lack, as load_checkpoint of version 3.5 fills them in.
DEFAULTS: Mapping[str, Any] = {
    "model_type": "text",
    "model_task": "seq2seq",
    "generator_function": "softmax",
    "position_encoding_type": "SinusoidalInterleaved",
    "layer_norm": "standard",
    "norm_eps": 1e-6,
    "self_attn_type": "scaled-dot",
    "pos_ffn_activation_fn": "relu",
    "dropout": 0.0,
}
# Options of models that no config expresses, where they are on.
REFUSED = """
    copy_attn lora_embedding lora_layers max_relative_positions n_src_feats num_experts num_kv
    parallel_residual quant_layers relative_positions_buckets shared_layer_norm sliding_window
"""
# Options that have had several names.
RENAMED = {"enc_rnn_size": "enc_hid_size", "dec_rnn_size": "dec_hid_size"}


def _layout() -> Layout:
    source, target = (f"{embeddings}.emb_luts.0" for embeddings in EMBEDDINGS.values())
    rows = table_rows(source, target, "generator")
    plain, gated = ("gated_feed_forward", False), ("gated_feed_forward", True)
    for stack, attentions in ATTENTIONS.items():
        layers, path = f"{stack}.{LAYERS[stack]}", f"{stack}/layers_{{i}}/feed_forward"
        for row in layer_rows(layers, stack, attentions, PROJECTIONS, FEED_FORWARD):
            rows.append(dataclasses.replace(row, when=plain) if ".w_1." in row.foreign else row)
        # With a gate, w_1 is the gate, and w_3 the product that it multiplies.
        for name, part in (("w_1", "gate"), ("w_3", "inner")):
            rows += linear(f"{layers}.{{i}}.feed_forward.{name}", f"{path}/{part}", when=gated)
        rows += norm(f"{stack}.layer_norm", f"{stack}/norm")
    table = PositionTable(("length", 1, "d_model"))
    buffers = tuple(Buffer(f"{embeddings}.pe.pe", table) for embeddings in EMBEDDINGS.values())
    return Layout("opennmt_py", tuple(rows), buffers)


def _read(checkpoint: Checkpoint) -> TrainerCheckpoint:
    """Return the model; its weights may lie in a .safetensors file beside the checkpoint."""
    content = as_dict(checkpoint.content)
    if "model" in content:
        tensors = {}
        for name, array in checkpoint.arrays(content["model"]).items():
            # Version 1 had a norm of its own.
            name = re.sub(r"\.a_2$", ".weight", re.sub(r"\.b_2$", ".bias", name))
            tensors[name] = array
        for name, array in checkpoint.arrays(content.get("generator") or {}).items():
            tensors[f"generator.{name.removeprefix('0.')}"] = array
    else:
        tensors = files.read(checkpoint.path.with_suffix(".safetensors"))
    values = as_dict(content.get("opt"))
    values = {RENAMED.get(name, name): value for name, value in values.items()}
    vocab = as_dict(content.get("vocab"))
    values["decoder_start_token"] = vocab.get("decoder_start_token", BOS)
    source, target = vocab.get("src"), vocab.get("tgt")
    for tokens in (source, target):
        if not isinstance(tokens, list) or not all(type(token) is str for token in tokens):
            raise InputError(
                f"{checkpoint.path}: vocab has no lists of tokens; convert a checkpoint of version "
                "2 with convertv2_v3.py of OpenNMT-py 3"
            )
    return TrainerCheckpoint(tensors, Settings("OpenNMT-py", values, DEFAULTS), source, target)


def _fields(model: TrainerCheckpoint) -> dict[str, Any]:
    s = model.settings
    for name, word in REQUIRED.items():
        s.word(name, {word: None})
    s.word("self_attn_type", {"scaled-dot": None, "scaled-dot-flash": None})
    s.off(REFUSED)
    if not s.flag("position_encoding"):
        raise s.refusal("position_encoding", "a model without positions has no layout here")
    source, target = EMBEDDINGS.values()
    norm_kind = s.word("layer_norm", NORMS)
    first = "encoder.transformer.0"
    pad_id, bos_id, eos_id, _ = _special_ids(model)
    return {
        "src_vocab_size": model.shape(f"{source}.emb_luts.0.weight")[0],
        "tgt_vocab_size": model.shape(f"{target}.emb_luts.0.weight")[0],
        "d_model": s.agreed("enc_hid_size", "dec_hid_size"),
        "num_heads": s["heads"],
        "d_ff": s["transformer_ff"],
        "num_encoder_layers": s["enc_layers"],
        "num_decoder_layers": s["dec_layers"],
        "max_length": model.shape(f"{source}.pe.pe", axes=3)[0],
        "token_embeddings": "shared" if s.flag("share_embeddings") else "separate",
        "positions": s.word("position_encoding_type", POSITIONS),
        "output_projection": "tied" if s.flag("share_decoder_embeddings") else "linear",
        # Some versions have these biases always, others as options: the tensors tell.
        "qkv_bias": f"{first}.self_attn.linear_query.bias" in model.tensors,
        "attention_output_bias": f"{first}.self_attn.final_linear.bias" in model.tensors,
        "feed_forward_bias": f"{first}.feed_forward.w_1.bias" in model.tensors,
        "gated_feed_forward": f"{first}.feed_forward.w_3.weight" in model.tensors,
        "activation": s.word("pos_ffn_activation_fn", ACTIVATIONS),
        "norm": norm_kind,
        "norm_bias": norm_kind == "layer_norm",
        "norm_epsilon": s["norm_eps"],
        "norm_placement": "pre",
        "final_norm": True,
        "dropout": _rate(s, "dropout"),
        "attention_dropout": _rate(s, "attention_dropout"),
        "pad_id": pad_id,
        "bos_id": bos_id,
        "eos_id": eos_id,
    }


def _rate(s: Settings, name: str) -> float | None:
    """Return a dropout rate, the first of several; None where it is that of "dropout"."""
    rate = s.get(name, None)
    return rate[0] if isinstance(rate, list) and rate else rate


def _special_ids(model: TrainerCheckpoint) -> tuple[int, int, int, int]:
    """Return the ids of padding, of the first token of targets, of EOS and of UNK."""
    start = model.settings["decoder_start_token"]
    ids = []
    for token in (PAD, start, EOS, UNK):
        if token not in model.target_tokens:
            raise InputError(f"OpenNMT-py: the target vocabulary has no token {token!r:.40}")
        ids.append(model.target_tokens.index(token))
    for token, token_id in ((PAD, ids[0]), (UNK, ids[3])):
        if model.source_tokens[token_id : token_id + 1] != [token]:
            raise InputError(
                f"OpenNMT-py: {token!r} has id {token_id} in the target vocabulary, but not in "
                "the source vocabulary; this library has one id for both"
            )
    return tuple(ids)


TRAINER = Trainer(
    "opennmt_py",
    marks=({"opt", "vocab"},),
    read=_read,
    fields=_fields,
    tokenizer=lambda model, config: vocabulary.word_tokenizer(
        model,
        config,
        _special_ids(model)[3],
        source_suffix=[],  # and no EOS
    ),
    remedy=(
        "convert a checkpoint of version 2 with convertv2_v3.py of OpenNMT-py 3; else, with it "
        "installed, c = torch.load('model.pt', weights_only=False); torch.save({n: c[n] for n in "
        "('model', 'generator', 'vocab', 'opt')}, 'plain.pt')"
    ),
    layout=_layout(),
)
