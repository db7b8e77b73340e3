"""JoeyNMT 2: checkpoints beside config.yaml, src_vocab.txt and trg_vocab.txt.

Source of the facts: the public code of JoeyNMT 2.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.layouts.torch_nn import layer_rows, norm
from jax_transformer.convert.table import Buffer, Layout
from jax_transformer.errors import InputError
from jax_transformer.model.tree import STACKS
from jax_transformer.porting.trainers import vocabulary
from jax_transformer.porting.trainers.trainer import Model, Settings, Trainer, as_dict, table_rows
from jax_transformer.storage.reading import MAX_TOKENIZER, read_text
from jax_transformer.storage.weights.torch_file import Checkpoint

if TYPE_CHECKING:
    from jax_transformer.tokenizers import Tokenizer

SETTINGS_FILE = "config.yaml"
VOCABULARIES = ("src_vocab.txt", "trg_vocab.txt")
PROJECTIONS = ("q_layer", "k_layer", "v_layer", "output_layer")
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


def _layout() -> Layout:
    rows = table_rows("src_embed.lut.weight", "trg_embed.lut.weight", "decoder.output_layer")
    attentions = {
        "encoder": {"self_attention": ("src_src_att", "layer_norm")},
        "decoder": {
            "self_attention": ("trg_trg_att", "x_layer_norm"),
            "cross_attention": ("src_trg_att", "dec_layer_norm"),
        },
    }
    inside = ("pwff_layer.0", "pwff_layer.3", "layer_norm")
    feed_forward = tuple(f"feed_forward.{name}" for name in inside)
    for stack, modules in attentions.items():
        rows += layer_rows(f"{stack}.layers", stack, modules, PROJECTIONS, feed_forward)
        rows += norm(f"{stack}.layer_norm", f"{stack}/norm")
    tables = tuple(Buffer(f"{stack}.pe.pe", PositionTable()) for stack in STACKS)
    return Layout("joeynmt", tuple(rows), tables)


def _read(checkpoint: Checkpoint) -> Model:
    """Return the model; its settings and vocabularies lie in the folder of the checkpoint."""
    folder = checkpoint.path.parent
    file = folder / SETTINGS_FILE
    try:
        from jax_transformer.storage.yaml_file import read_yaml
    except ImportError as error:
        raise InputError(f"{file}: needs pyyaml; install jax-transformer[train]") from error
    whole = as_dict(read_yaml(file, vocabulary.MISSING))
    if not isinstance(whole.get("model"), dict):
        raise InputError(f"{file}: has no section 'model'; it is not the settings of JoeyNMT")
    data = as_dict(whole.get("data"))
    symbols = as_dict(data.get("special_symbols"))
    values = _flat({**as_dict(whole.get("model")), "special_symbols": symbols, "data": data})
    content = as_dict(checkpoint.content)
    files = [folder / name for name in VOCABULARIES]
    tokens: list[list[str] | None] = [None, None]
    if all(path.is_file() for path in files):
        tokens = [read_text(path, vocabulary.MISSING, MAX_TOKENIZER).splitlines() for path in files]
    tensors = checkpoint.arrays(content.get("model_state"))
    return Model(tensors, Settings(str(file), values, DEFAULTS), *tokens, folder)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names; three sections deep, as JoeyNMT's are."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and prefix.count(".") < 2:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _fields(model: Model) -> dict[str, Any]:
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


def _placement(model: Model) -> str:
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


def _tokenizer(model: Model, config: TransformerConfig) -> Tokenizer | None:
    if (tokenizer := _text_tokenizer(model, config)) is not None:
        return tokenizer
    unk_id = model.settings["special_symbols.unk_id"]
    return vocabulary.word_tokenizer(model, config, unk_id, source_suffix=[config.eos_id])


def _text_tokenizer(model: Model, config: TransformerConfig) -> Tokenizer | None:
    """Return the tokenizer of text; None where sentencepiece is not all that made the tokens.

    JoeyNMT copies the sentencepiece models into the folder of the checkpoint. It looks the pieces
    up in its own vocabularies, and lets the models use only pieces that are there.
    """
    if model.source_tokens is None or model.target_tokens is None:
        return None
    files = [_model_file(model, side) for side in ("src", "trg")]
    if None in files:
        return None
    from jax_transformer.tokenizers import READERS, read_files

    unk_id = model.settings["special_symbols.unk_id"]
    vocabulary.check_vocabularies(model, config, unk_id)
    contents, both = {}, (model.source_tokens, model.target_tokens)
    for name, file, tokens in zip(("source.spm", "target.spm"), files, both, strict=True):
        contents[name] = read_files(model.folder, [file])[file]
        if not _is_whole(contents[name], file, tokens):
            return None
    for name, tokens in zip(("vocab.json", "target_vocab.json"), both, strict=True):
        contents[name] = json.dumps({token: i for i, token in enumerate(tokens)}).encode()
    if model.target_tokens == model.source_tokens:
        del contents["target_vocab.json"]
    ids = {name: getattr(config, name) for name in ("pad_id", "eos_id", "bos_id")}
    settings = {
        **ids,
        "rule": "marian",
        "unk_id": unk_id,
        "source_suffix": [config.eos_id],
        "target_suffix": [config.eos_id],
        "added_tokens": {model.target_tokens[i]: i for i in (*ids.values(), unk_id)},
    }
    return READERS["sentencepiece"](contents, settings, str(model.folder))


def _model_file(model: Model, side: str) -> str | None:
    """Return the name of a side's sentencepiece model; None where there is more to its text."""
    start, values = f"data.{side}.", model.settings.values
    text = {key.removeprefix(start): values[key] for key in values if key.startswith(start)}
    tokenizer = as_dict(text.get("tokenizer_cfg"))
    kind = text.get("tokenizer_type", text.get("bpe_type", "sentencepiece"))
    split_before = str(tokenizer.get("pretokenizer", "none")).lower() != "none"
    name = Path(str(tokenizer.get("model_file", ""))).name
    if text.get("level") != "bpe" or kind != "sentencepiece" or split_before:
        return None
    if text.get("lowercase") or text.get("normalize") or not (model.folder / name).is_file():
        return None
    return name


def _is_whole(content: bytes, name: str, tokens: Sequence[str]) -> bool:
    """Return whether every piece of a model is in the vocabulary, so that it can use them all.

    Pieces of one character are used in any case. Pieces of bytes lose their meaning in JoeyNMT.
    """
    from jax_transformer.tokenizers.readers.model_files import read_model

    processor = read_model(content, name)
    ids = range(processor.get_piece_size())
    if any(map(processor.is_byte, ids)):
        return False
    ordinary = (i for i in ids if not processor.is_control(i) and not processor.is_unknown(i))
    pieces = {piece for piece in map(processor.id_to_piece, ordinary) if len(piece) > 1}
    return pieces <= set(tokens)


TRAINER = Trainer(
    "joeynmt",
    _layout(),
    marks=({"model_state"},),
    read=_read,
    fields=_fields,
    tokenizer=_tokenizer,
    remedy=(
        "with JoeyNMT installed, c = torch.load('best.ckpt', weights_only=False); "
        "torch.save({'model_state': c['model_state']}, 'plain.ckpt')"
    ),
)
