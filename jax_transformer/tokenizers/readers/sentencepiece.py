"""Sentencepiece models whose pieces have other ids: the tokenizers of Marian, M2M100 and mBART.

Kudo and Richardson 2018, "SentencePiece". Marian has a model for each language (source.spm and
target.spm); the ids are those of vocab.json, which both languages share, or of a vocabulary for
each language. The ids of M2M100 are those of vocab.json, those of mBART one above those of its
model, as fairseq has them. Ids and decoded text are those of MarianTokenizer and M2M100Tokenizer in
transformers 5.23. MBartTokenizer does not normalise text; this tokenizer does, by the model, as the
text that mBART was trained on.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.storage.faults import faults_named
from jax_transformer.tokenizers.readers.family_settings import (
    NEEDED,
    TOKENIZER_CONFIG,
    family_settings,
    read_tokenizer_config,
    special_tokens,
)
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    VOCABULARY,
    read_files,
    read_model,
    read_vocabulary,
)
from jax_transformer.tokenizers.segmenters import SentencePieceSegmenter
from jax_transformer.tokenizers.tokenizer import DEFAULTS, Tokenizer

SENTENCEPIECE = "sentencepiece"  # the kind
TARGET_VOCABULARY = "target_vocab.json"  # only where the languages have a vocabulary each
FILES = {
    "marian": ("source.spm", "target.spm", VOCABULARY),
    "m2m_100": (MBART_MODEL, VOCABULARY),
    "mbart": (MBART_MODEL,),
}


def read_sentencepiece(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in sentencepiece models and their vocabularies.

    The settings are those of `Tokenizer.build`, among them `rule`, a name in `FILES`, and what
    `SentencePieceSegmenter` needs.
    """
    values = DEFAULTS | settings
    rule = values["rule"]
    names = {*FILES.get(rule, ())}
    optional = {TARGET_VOCABULARY} if rule == "marian" else set()
    if not names or not names <= set(contents) <= names | optional:
        raise InputError(
            f"{name}: a sentencepiece tokenizer by the rule {rule!r} is "
            f"{', '.join(sorted(names))}, but not {', '.join(sorted(contents))}"
        )
    source_file, target_file = FILES["marian"][:2] if rule == "marian" else (MBART_MODEL,) * 2
    source = read_model(contents[source_file], f"{name}/{source_file}")
    target = read_model(contents[target_file], f"{name}/{target_file}")
    if rule == "mbart":
        ids = fairseq_ids(contents[MBART_MODEL], f"{name}/{MBART_MODEL}")
    else:
        ids = read_vocabulary(contents[VOCABULARY], f"{name}/{VOCABULARY}")
    target_ids, joiner = ids, source  # as in transformers, which joins by the source's model
    if TARGET_VOCABULARY in contents:
        path = f"{name}/{TARGET_VOCABULARY}"
        target_ids, joiner = read_vocabulary(contents[TARGET_VOCABULARY], path), target
    rules = (values[key] for key in ("added_tokens", "ordinary_tokens", "unk_id", "rule"))
    build = functools.partial(SentencePieceSegmenter, *rules)
    segmenters = build(source, ids, source, is_source=True), build(target, target_ids, joiner)
    return Tokenizer.build(SENTENCEPIECE, contents, settings, name, segmenters)


def fairseq_ids(content: bytes, name: str) -> dict[str, int]:
    """Return the id of each piece of a sentencepiece model, as fairseq counts them."""
    model = read_model(content, name)
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    return {token: number for number, token in enumerate([*FAIRSEQ, *pieces])}


def read_marian(folder: Path, config: TransformerConfig | None = None) -> Tokenizer:
    """Return the tokenizer in a folder; without a config padding is the start token of targets."""
    values, path = read_tokenizer_config(folder), folder / TOKENIZER_CONFIG
    for key in ("sp_model_kwargs", "split_special_tokens"):
        if values.get(key):
            raise InputError(f"{path}: {key}={values[key]!r:.60} is not supported; remove it")
    names = [VOCABULARY, TARGET_VOCABULARY] if values.get("separate_vocabs") else [VOCABULARY]
    contents = read_files(folder, dict.fromkeys((*FILES["marian"], *names)))
    source, *target = [read_vocabulary(contents[name], str(folder / name)) for name in names]
    settings = family_settings(folder / VOCABULARY, source, config)
    tokens = special_tokens(values)
    needed = {tokens[key]: source[tokens[key]] for key in NEEDED}
    for token, token_id in needed.items() if target else ():
        if target[0].get(token) != token_id:
            raise InputError(
                f"{folder}: {token!r} must have one id, but has {token_id} in {VOCABULARY} and "
                f"{target[0].get(token)} in {TARGET_VOCABULARY}"
            )
    faults = AttributeError, KeyError, TypeError, ValueError
    with faults_named(path, "is damaged; copy it again", *faults):
        added, special = _added_tokens(values, source, needed, path)
    settings |= {
        "rule": "marian",
        "added_tokens": needed | added,
        "ordinary_tokens": [token for token in added if token not in special],
    }
    return read_sentencepiece(contents, settings, str(folder))


def marian_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json must say so that transformers reads a tokenizer's files."""
    added = dict(tokenizer.settings["added_tokens"])
    tokens = {token_id: token for token, token_id in reversed(added.items())}
    named = {f"{key}_token": tokens[getattr(tokenizer, f"{key}_id")] for key in NEEDED}
    ordinary = tokenizer.settings.get("ordinary_tokens", [])
    more = {token: i for token, i in added.items() if token not in named.values()}
    special = [token for token in more if token not in ordinary]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    decoder = {
        str(i): {"content": token, **flags, "special": token in special}
        for token, i in more.items()
    }
    return {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": TARGET_VOCABULARY in tokenizer.contents,
        **named,
        **({"added_tokens_decoder": decoder} if decoder else {}),
        **({"extra_special_tokens": special} if special else {}),
    }


def _added_tokens(
    values: Mapping[str, Any], vocabulary: Mapping[str, int], needed: Mapping[str, int], path: Path
) -> tuple[dict[str, int], list[str]]:
    """Return the ids of the added tokens of a tokenizer_config.json, and which are special.

    The tokens in `needed` are left out; a special token that the vocabulary lacks gets the next id.
    """
    added, special = {}, []
    for token_id, token in values.get("added_tokens_decoder", {}).items():
        text = _content(token)
        if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise InputError(
                f"{path}: the token {text!r:.60} has lstrip, rstrip or single_word, which are "
                "not supported; remove them"
            )
        if text not in needed:
            added[text] = int(token_id)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = values.get(key) or ()
        for token in tokens.values() if isinstance(tokens, Mapping) else tokens:
            text, ids = _content(token), {**vocabulary, **added}
            if text not in needed:
                added.setdefault(text, ids.get(text, len(ids)))
                special.append(text)
    return added, special


def _content(token: str | Mapping[str, Any]) -> str:
    """Return the text of a token of tokenizer_config.json, which may be an object."""
    text = token if isinstance(token, str) else token["content"]
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a token")
    return text
