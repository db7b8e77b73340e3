"""The text of JoeyNMT models that sentencepiece alone splits: a tokenizer of text as it is.

JoeyNMT copies the sentencepiece models into the folder of the checkpoint. It looks the pieces up in
its own vocabularies, and lets the models use only pieces that are there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jax_transformer.config import TransformerConfig
from jax_transformer.porting.trainers.trainer import Model, as_dict
from jax_transformer.porting.trainers.vocabulary import check_vocabularies

if TYPE_CHECKING:
    from jax_transformer.tokenizers import Tokenizer


def tokenizer(model: Model, config: TransformerConfig) -> Tokenizer | None:
    """Return the tokenizer of text; None where sentencepiece is not all that made the tokens."""
    if model.source_tokens is None or model.target_tokens is None:
        return None
    files = [_model_file(model, side) for side in ("src", "trg")]
    if None in files:
        return None
    from jax_transformer.tokenizers import READERS, read_files

    unk_id = model.settings["special_symbols.unk_id"]
    check_vocabularies(model, config, unk_id)
    contents, both = {}, (model.source_tokens, model.target_tokens)
    for name, file, tokens in zip(("source.spm", "target.spm"), files, both, strict=True):
        contents[name] = read_files(model.folder, [file])[file]
        if not _is_whole(contents[name], file, tokens):
            return None
    contents["vocab.json"] = _vocabulary(model.source_tokens)
    if model.target_tokens != model.source_tokens:
        contents["target_vocab.json"] = _vocabulary(model.target_tokens)
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
    values = model.settings.values
    own = as_dict(values.get(f"data.{side}.tokenizer_cfg"))
    kind = values.get(f"data.{side}.bpe_type", "sentencepiece")
    kind = values.get(f"data.{side}.tokenizer_type", kind)
    changed = values.get(f"data.{side}.lowercase") or values.get(f"data.{side}.normalize")
    split_before = str(own.get("pretokenizer", "none")).lower() != "none"
    name = Path(str(own.get("model_file", ""))).name
    if values.get(f"data.{side}.level") != "bpe" or kind != "sentencepiece":
        return None
    if changed or split_before or not name or not (model.folder / name).is_file():
        return None
    return name


def _is_whole(content: bytes, name: str, tokens: Sequence[str]) -> bool:
    """Return whether every piece of a model is in the vocabulary, so that it can use them all.

    Pieces of one character are used in any case. Pieces of bytes lose their meaning in JoeyNMT.
    """
    from jax_transformer.tokenizers.readers.model_files import read_model

    known, processor = set(tokens), read_model(content, name)
    for i in range(processor.get_piece_size()):
        piece = processor.id_to_piece(i)
        if processor.is_byte(i):
            return False
        ordinary = not processor.is_control(i) and not processor.is_unknown(i)
        if ordinary and len(piece) > 1 and piece not in known:
            return False
    return True


def _vocabulary(tokens: Sequence[str]) -> bytes:
    return json.dumps({token: i for i, token in enumerate(tokens)}).encode()
