"""JoeyNMT 2: checkpoints beside config.yaml, src_vocab.txt and trg_vocab.txt.

Source of the facts: the public code of JoeyNMT 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.layouts.torch_nn import layer_rows, norm, table_rows
from jax_transformer.convert.table import Buffer, Layout
from jax_transformer.errors import InputError, naming_the_extra
from jax_transformer.model.tree import STACKS
from jax_transformer.porting.trainers import vocabulary
from jax_transformer.porting.trainers.trainer import Settings, Trainer, TrainerCheckpoint, as_dict
from jax_transformer.storage.reading import MAX_TOKENIZER, read_text
from jax_transformer.storage.weights.torch_file import Checkpoint

SETTINGS_FILE = "config.yaml"
VOCABULARIES = ("src_vocab.txt", "trg_vocab.txt")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
# What an absent setting means; the settings of a stack are joined by dots.
DEFAULTS: Mapping[str, Any] = {
    "encoder.type": "recurrent",
    "decoder.type": "transformer",
    "encoder.num_layers": 8,
    "decoder.num_layers": 4,
    "encoder.num_heads": 4,
    "decoder.num_heads": 8,
    **{
        f"{stack}.{name}": value
        for stack in STACKS
        for name, value in {
            "hidden_size": 512,
            "ff_size": 2048,
            "dropout": 0.1,
            "alpha": 1.0,
            "activation": "relu",
            "embeddings.embedding_dim": 64,
        }.items()
    },
    "special_symbols.unk_id": 0,
    "special_symbols.pad_id": 1,
    "special_symbols.bos_id": 2,
    "special_symbols.eos_id": 3,
}


ATTENTIONS = {
    "encoder": {"self_attention": ("src_src_att", "layer_norm")},
    "decoder": {
        "self_attention": ("trg_trg_att", "x_layer_norm"),
        "cross_attention": ("src_trg_att", "dec_layer_norm"),
    },
}
PROJECTIONS = ("q_layer", "k_layer", "v_layer", "output_layer")
FEED_FORWARD = (
    "feed_forward.pwff_layer.0",
    "feed_forward.pwff_layer.3",
    "feed_forward.layer_norm",
)


def _layout() -> Layout:
    rows = table_rows("src_embed.lut", "trg_embed.lut", "decoder.output_layer")
    for stack, attentions in ATTENTIONS.items():
        rows += layer_rows(f"{stack}.layers", stack, attentions, PROJECTIONS, FEED_FORWARD)
        rows += norm(f"{stack}.layer_norm", f"{stack}/norm")
    buffers = tuple(Buffer(f"{stack}.pe.pe", PositionTable()) for stack in STACKS)
    return Layout("joeynmt", tuple(rows), buffers)


def _read(checkpoint: Checkpoint) -> TrainerCheckpoint:
    """Return the model; its settings and vocabularies lie in the folder of the checkpoint."""
    folder = checkpoint.path.parent
    file = folder / SETTINGS_FILE
    with naming_the_extra(str(file)):
        from jax_transformer.storage.yaml_file import read_yaml
    whole = as_dict(read_yaml(file, vocabulary.MISSING))
    if not isinstance(whole.get("model"), dict):
        raise InputError(f"{file}: has no section 'model'; it is not the settings of JoeyNMT")
    symbols = as_dict(as_dict(whole.get("data")).get("special_symbols"))
    values = _flat({**as_dict(whole.get("model")), "special_symbols": symbols})
    content = as_dict(checkpoint.content)
    files = [folder / name for name in VOCABULARIES]
    source = target = None
    if all(path.is_file() for path in files):
        source, target = (
            read_text(path, vocabulary.MISSING, MAX_TOKENIZER).splitlines() for path in files
        )
    tensors = checkpoint.arrays(content.get("model_state"))
    return TrainerCheckpoint(tensors, Settings(str(file), values, DEFAULTS), source, target)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names; three sections deep, as JoeyNMT's are."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and prefix.count(".") < 2:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _fields(model: TrainerCheckpoint) -> dict[str, Any]:
    s = model.settings
    for stack in STACKS:
        s.word(f"{stack}.type", {"transformer": None})
        s.word(f"{stack}.activation", ACTIVATIONS)
        if s[f"{stack}.alpha"] != 1:
            raise s.refusal(f"{stack}.alpha", "residuals have the weight 1 in this library")
    shared, tied = s.flag("tied_embeddings"), s.flag("tied_softmax")
    tables = STACKS[:1] if shared else STACKS
    scaled = s.flag(*(f"{stack}.embeddings.scale" for stack in tables))
    widths = [f"{stack}.embeddings.embedding_dim" for stack in tables]
    placement = _placement(model)
    return {
        "src_vocab_size": model.shape("src_embed.lut.weight")[0],
        "tgt_vocab_size": model.shape("trg_embed.lut.weight")[0],
        "d_model": s.agreed("encoder.hidden_size", "decoder.hidden_size", *widths),
        "num_heads": s.agreed("encoder.num_heads", "decoder.num_heads"),
        "d_ff": s.agreed("encoder.ff_size", "decoder.ff_size"),
        "num_encoder_layers": s["encoder.num_layers"],
        "num_decoder_layers": s["decoder.num_layers"],
        "max_length": model.shape("encoder.pe.pe", axes=3)[1],
        "token_embeddings": "shared" if shared else "separate",
        "embedding_scale": "sqrt_d_model" if scaled else "none",
        "output_projection": "tied" if tied else "linear",
        "output_bias": False,
        "activation": ACTIVATIONS[s.agreed("encoder.activation", "decoder.activation")],
        "norm_epsilon": 1e-6,
        "norm_placement": placement,
        "final_norm": placement == "pre",
        "dropout": s["encoder.dropout"],
        "pad_id": s["special_symbols.pad_id"],
        "bos_id": s["special_symbols.bos_id"],
        "eos_id": s["special_symbols.eos_id"],
    }


def _placement(model: TrainerCheckpoint) -> str:
    """Return where the norms are.

    JoeyNMT 2.0 has no such setting and norms before each sublayer. Version 2.3 without the
    setting builds an encoder of one kind and a decoder of the other.
    """
    s = model.settings
    names = [f"{stack}.layer_norm" for stack in STACKS]
    absent = [name for name in names if name not in s.values]
    if absent == names and all(f"{name}.weight" in model.tensors for name in names):
        return "pre"
    if absent:
        raise InputError(
            f"{s.origin}: model.{absent[0]} is absent, which in JoeyNMT 2.3 means 'pre' in the "
            "encoder, without a norm at its end, and 'post' in the decoder: this library has "
            "no such model"
        )
    for name in names:
        s.word(name, {"pre": None, "post": None})
    return s.agreed(*names)


TRAINER = Trainer(
    "joeynmt",
    marks=({"model_state"},),
    read=_read,
    fields=_fields,
    tokenizer=lambda model, config: vocabulary.word_tokenizer(
        model,
        config,
        model.settings["special_symbols.unk_id"],
        source_suffix=[config.eos_id],
    ),
    remedy=(
        "with JoeyNMT installed, c = torch.load('best.ckpt', weights_only=False); "
        "torch.save({'model_state': c['model_state']}, 'plain.ckpt')"
    ),
    layout=_layout(),
)
