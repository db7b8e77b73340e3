"""The model of a run: its shape as settings, and the model or the tokenizer that it starts from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_transformer.adapters import lora
from jax_transformer.config import SPECIAL_IDS, TransformerConfig
from jax_transformer.config.declared import checked, declarations
from jax_transformer.convert import huggingface
from jax_transformer.convert.families import FAMILIES, get_family
from jax_transformer.convert.families.family import notes
from jax_transformer.convert.generation_config import names_length
from jax_transformer.convert.huggingface import is_huggingface, read_config
from jax_transformer.convert.origin import Origin
from jax_transformer.convert.origin import read_origin as read_huggingface_origin
from jax_transformer.convert.report import ConversionError
from jax_transformer.errors import InputError
from jax_transformer.model.checks import check_generates, check_text
from jax_transformer.model.transformer import Params
from jax_transformer.runs.state import RunSettings
from jax_transformer.storage.folder import CONFIG_FILE, model_folder_of
from jax_transformer.storage.hub import local_folder
from jax_transformer.storage.marian_files import SPM, is_marian
from jax_transformer.tokenizers import BYTE_PAIR_IDS, Tokenizer, parse_byte_pair, read_files
from jax_transformer.tokenizers.readers.classes import read_marian
from jax_transformer.tokenizers.readers.library import read_usual_names
from jax_transformer.tokenizers.readers.marian import read_marian_tokenizer
from jax_transformer.translation.model_folder import (
    GENERATION,
    TrainedModel,
    load,
    load_tokenizer,
    read_origin,
)

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "source.spm"
VOCABULARY_SIZES = ("src_vocab_size", "tgt_vocab_size")
DECIDED = VOCABULARY_SIZES + SPECIAL_IDS  # by the tokenizer
# Fields that change no parameter and no output: a run that starts from a model may change them.
DROPOUT_RATES = ("dropout", "attention_dropout", "activation_dropout")


def undecided_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that its tokenizer does not decide."""
    return {name: value for name, value in fields.items() if name not in DECIDED}


def preset_fields(preset: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset in some sizes; fields that the preset itself names win over the sizes."""
    fields = TransformerConfig.preset(preset).to_dict()
    return undecided_fields({**fields, **sizes, **TransformerConfig.preset_fields(preset)})


def check_model(model: Mapping[str, Any], vocab_size: int) -> TransformerConfig:
    """Return the shape of the model before there is a tokenizer of at most `vocab_size` entries."""
    config = _resolved(model, BYTE_PAIR_IDS | dict.fromkeys(VOCABULARY_SIZES, vocab_size))
    check_text(config)  # a model of sound needs the tokens of Whisper
    return config


def model_config(
    model: Mapping[str, Any], tokenizer: Tokenizer | TransformerConfig
) -> TransformerConfig:
    """Return the shape of the model, with the vocabulary of a tokenizer or of another config."""
    return _resolved(model, {name: getattr(tokenizer, name) for name in DECIDED})


def check_same_model(
    model: Mapping[str, Any], preset: str | None, config: TransformerConfig, name: str
) -> None:
    """Refuse settings of another model than `config`, which messages call `name`."""
    declared = declarations(TransformerConfig)
    kept = declared.keys() - {*DROPOUT_RATES}
    by_preset = {} if preset is None else TransformerConfig.preset_fields(preset)
    for field in sorted(kept & by_preset.keys() - {*DECIDED}):
        if by_preset[field] != getattr(config, field):
            raise InputError(
                f"preset={preset!r} has {field}={by_preset[field]!r}, but the model in {name} has "
                f"{getattr(config, field)!r}; leave preset out"
            )
    for field in sorted(kept & model.keys()):
        value = getattr(config, field)
        if checked(field, model[field], declared[field]) != value:  # a list may be a tuple
            raise InputError(
                f"{field}={model[field]!r} is not that of the model in {name}, which has "
                f"{value!r}; leave {field} out"
            )


def _resolved(model: Mapping[str, Any], by_tokenizer: Mapping[str, int]) -> TransformerConfig:
    decided = {name: by_tokenizer[name] for name in DECIDED}
    for name, value in decided.items():
        if model.get(name, value) != value:
            remedy = " or set vocab_size" if name in VOCABULARY_SIZES else ""
            raise InputError(
                f"{name}={model[name]} contradicts the tokenizer, which has {value}; leave {name} "
                f"out{remedy}"
            )
    config = TransformerConfig(**{**model, **decided})
    check_generates(config)
    return config


def read_initial_model(
    folder: Path,
    ignore_generation_config: bool = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> tuple[TrainedModel, Origin | None, tuple[str, ...]]:
    """Read the model that a run starts from, of this library or of Hugging Face.

    Returns:
        The model, whose parameters are float32 and on the host; the Hugging Face folder that it
        comes from, where it does; and lines for the reader: what was converted, and what is not
        carried over or not applied.
    """
    folder = local_folder(folder)
    try:
        model = load(
            folder,
            ignore_generation_config=ignore_generation_config,
            source_lang=source_lang,
            target_lang=target_lang,
        ).for_text(str(folder), or_sound=True)
    except ConversionError as error:
        fault = error.report.faults[0]
        raise InputError(
            f"{folder}: the weights are not those of config.json: {fault.name}: {fault.kind} "
            f"{fault.detail}".rstrip()
        ) from error
    for name in SPECIAL_IDS:
        tokenizer_id, model_id = getattr(model.tokenizer, name), getattr(model.config, name)
        if tokenizer_id != model_id:
            raise InputError(
                f"{folder}: the tokenizer has {name}={tokenizer_id}, but the model {model_id}"
            )
    report = []
    if is_huggingface(folder):
        origin, left = read_huggingface_origin(folder)
        if left:
            report.append(f"{folder}: not carried over: {', '.join(left)}")
        family = get_family(origin.model_type)
        report += [f"{folder}: {note}" for note in notes(family, origin.config)]
        # Else validation texts would end at transformers' 20 tokens, and be scored so.
        if not (ignore_generation_config or names_length(folder)):
            unlimited = {k: v for k, v in model.generation.items() if k != "max_new_tokens"}
            model = model._replace(generation=unlimited)
    else:
        origin = read_origin(folder)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} - {"float32"}
    if dtypes:
        names = ", ".join(sorted(dtypes))
        report.append(f"{folder}: parameters converted from {names} to float32")
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), model.params)
    return model._replace(params=params), origin, tuple(report)


def trained_model(settings: RunSettings, params: Params) -> TrainedModel:
    """Return the model of a run with some of its parameters, an adapter merged, as a folder has."""
    generation = GENERATION if settings.generation is None else settings.generation
    return TrainedModel(settings.config, lora.merge(params), settings.tokenizer, generation)


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json with usual names of special tokens, or in a folder.

    The folder has such a file, or source.spm, target.spm and vocab.json, or is that of a model of
    this library, of Marian or of a known family of Hugging Face, whose weights are not read. A
    sentencepiece model in .spm is a vocabulary of Marian.
    """
    if path.suffix == SPM and os.path.isfile(path):
        return read_marian_tokenizer([path, path])
    # Unlike Path.is_dir, it takes a name of any length.
    if not (os.path.isdir(path) or is_marian(path)):
        return _read_file(path.parent, path.name)
    path = model_folder_of(path)
    if (path / CONFIG_FILE).exists() or is_marian(path):
        if not is_huggingface(path):
            return load_tokenizer(path)
        family = FAMILIES.get(read_config(path)["model_type"])
        if family is not None and family.tokenizer is not None:
            return huggingface.load_tokenizer(path)[1]
    if (path / SENTENCEPIECE_FILE).exists():
        return read_marian(path)
    if (path / TOKENIZER_FILE).exists():
        return _read_file(path, TOKENIZER_FILE)
    raise InputError(
        f"{path}: holds no tokenizer: neither {TOKENIZER_FILE} nor {SENTENCEPIECE_FILE}; name the "
        "folder of a model or of a tokenizer, or a tokenizer.json"
    )


def _read_file(folder: Path, name: str) -> Tokenizer:
    content = read_files(folder, [name])[name]
    try:
        return parse_byte_pair(content, str(folder / name))
    except InputError:  # a tokenizer of another program, or a damaged one
        return read_usual_names(content, str(folder / name))
