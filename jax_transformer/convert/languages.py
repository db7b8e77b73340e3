"""Language codes of a model: those of a Hugging Face folder, and those that it is written with."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.generation_config import GENERATION_FILE
from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.writing import json_bytes
from jax_transformer.tokenizers import Languages, Tokenizer
from jax_transformer.tokenizers.readers.class_settings import TOKENIZER_CONFIG

# What the classes of transformers take for src_lang where it is null: mBART, NLLB, M2M100.
USUAL_SOURCES = ("en_XX", "eng_Latn", "en")


def generation_key(languages: Languages) -> str:
    """Return the generation default whose value is the id of the target's code."""
    return "decoder_start_token_id" if languages.starts else "forced_bos_token_id"


def with_generated_language(
    tokenizer: Tokenizer, generation: Mapping[str, Any], config: TransformerConfig, name: str
) -> Tokenizer:
    """Return a tokenizer whose target is the language that the generation defaults name."""
    languages = tokenizer.languages
    key = generation_key(languages)
    token_id = generation.get(key)
    if token_id is None and languages.starts:
        token_id = config.bos_id
    code = _code(languages, token_id)
    if code is None:
        return tokenizer
    if languages.target not in (None, code):
        raise InputError(
            f"{name}: tgt_lang={languages.target!r}, but {key}={token_id} is {code!r}; name the "
            "target's code by --target-lang (in Python target_lang)"
        )
    return tokenizer.with_languages(None, code, name)


def generating(
    config: TransformerConfig, generation: Mapping[str, Any], tokenizer: Tokenizer, name: str
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the config and the options of `generate` that give the tokenizer's target language.

    Where its code starts the decoder it is the config's `bos_id`, else the `forced_first_token`.
    """
    languages, options = tokenizer.languages, dict(generation)
    if languages is None or not config.generates:
        return config, options
    try:
        code_id = languages.ids[languages.known("target")]
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if languages.starts:
        options.pop("start_token", None)
        return dataclasses.replace(config, bos_id=code_id), options
    return config, options | {"forced_first_token": code_id}


def language_files(contents: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return a folder's files with the languages of a tokenizer; what agrees keeps its bytes."""
    languages, files = tokenizer.languages, dict(contents)
    if languages is None:
        return files
    name = GENERATION_FILE if GENERATION_FILE in files else CONFIG_FILE
    defaults, key = json.loads(files[name]), generation_key(languages)
    generated = _code(languages, defaults.get(key))
    if languages.target is not None and generated != languages.target:
        files[name] = json_bytes(defaults | {key: languages.ids[languages.target]})
    values = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    source, target = values.get("src_lang"), values.get("tgt_lang")
    usual = source is None and languages.source in USUAL_SOURCES
    changed = {}
    if source != languages.source and not usual:
        changed["src_lang"] = languages.source
    if target != languages.target and (target is not None or generated != languages.target):
        changed["tgt_lang"] = languages.target
    if changed:
        files[TOKENIZER_CONFIG] = json_bytes(values | changed)
    return files


def _code(languages: Languages, token_id: object) -> str | None:
    return next((code for code, i in languages.ids.items() if i == token_id), None)
