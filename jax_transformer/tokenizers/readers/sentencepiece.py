"""Sentencepiece models whose pieces have other ids: the tokenizers of Marian, M2M100 and mBART.

Kudo and Richardson 2018, "SentencePiece". Marian has a model for each language (source.spm and
target.spm) and the ids of vocab.json, or of a vocabulary for each language. M2M100 has the ids of
vocab.json; those of mBART are one above those of its model (fairseq). Ids and decoded text are
those of transformers 5.23, except that MBartTokenizer does not normalise text: this tokenizer does,
by the model, as mBART was trained.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.class_settings import (
    FLAGS,
    NEEDED,
    TOKENIZER_CONFIG,
    class_settings,
    content,
    extra_tokens,
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
from jax_transformer.tokenizers.segmenters import SentencePieceSegmenter, Words
from jax_transformer.tokenizers.tokenizer import DEFAULTS, Tokenizer

SENTENCEPIECE = "sentencepiece"  # the kind
MARIAN_NPZ = "marian_npz"  # the rule of Marian's own folders, `readers.marian`
TARGET_VOCABULARY = "target_vocab.json"  # only where the languages have a vocabulary each
FILES = {
    "marian": ("source.spm", "target.spm", VOCABULARY),
    "m2m_100": (MBART_MODEL, VOCABULARY),
    "mbart": (MBART_MODEL,),
    MARIAN_NPZ: (VOCABULARY,),
}
# Files that a tokenizer of a rule may lack.
OPTIONAL = {
    "marian": (TARGET_VOCABULARY,),
    MARIAN_NPZ: ("source.spm", "target.spm", TARGET_VOCABULARY),
}


def read_sentencepiece(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in sentencepiece models and vocabularies; see `Tokenizer.build`."""
    values = DEFAULTS | settings
    rule = values["rule"]
    names, optional = {*FILES.get(rule, ())}, {*OPTIONAL.get(rule, ())}
    if not names or not names <= set(contents) <= names | optional:
        raise InputError(
            f"{name}: a sentencepiece tokenizer by the rule {rule!r} is "
            f"{', '.join(sorted(names))}, but not {', '.join(sorted(contents))}"
        )
    model_files = FILES["marian"][:2] if rule in OPTIONAL else (MBART_MODEL,) * 2
    source, target = (
        read_model(contents[file], f"{name}/{file}") if file in contents else Words()
        for file in model_files
    )
    if rule == "mbart":
        ids = fairseq_ids(contents[MBART_MODEL], f"{name}/{MBART_MODEL}")
    else:
        ids = read_vocabulary(contents[VOCABULARY], f"{name}/{VOCABULARY}")
    target_ids, joiner = ids, source  # as in transformers, which joins by the source's model
    if TARGET_VOCABULARY in contents:
        path = f"{name}/{TARGET_VOCABULARY}"
        target_ids, joiner = read_vocabulary(contents[TARGET_VOCABULARY], path), target
    build = functools.partial(
        SentencePieceSegmenter,
        added=values["added_tokens"],
        ordinary=values["ordinary_tokens"],
        unk_id=values["unk_id"],
        rule=rule,
    )
    segmenters = (
        build(model=source, ids=ids, joiner=source, is_source=True),
        build(model=target, ids=target_ids, joiner=joiner),
    )
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
    settings = class_settings(folder / VOCABULARY, source, config)
    tokens = special_tokens(values)
    needed = {tokens[key]: source[tokens[key]] for key in NEEDED}
    for token, token_id in needed.items() if target else ():
        if target[0].get(token) != token_id:
            raise InputError(
                f"{folder}: {token!r} must have one id, but has {token_id} in {VOCABULARY} and "
                f"{target[0].get(token)} in {TARGET_VOCABULARY}"
            )
    settings |= {"class_name": "MarianTokenizer", "rule": "marian"}
    settings |= added_settings(values, source, needed, path)
    if target and config is not None:
        settings["tgt_vocab_size"] = config.tgt_vocab_size
    return read_sentencepiece(contents, settings, str(folder))


def added_settings(
    values: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    known: Mapping[str, int],
    path: Path,
    by_flag: bool = False,
) -> dict[str, Any]:
    """Return the settings of the tokens that are added to a vocabulary.

    Args:
        values: The content of tokenizer_config.json.
        known: The ids of the special tokens that the class has; those of other special tokens that
            the vocabulary lacks follow its own.
        path: The file, for error messages.
        by_flag: Whether a token with the flag "special" is special, and not only one that is listed
            among the special ones: as in the classes of the library tokenizers.
    """
    ids, added, special = {**vocabulary, **known}, dict(known), {*known}
    for token_id, token in (values.get("added_tokens_decoder") or {}).items():
        if (text := content(token)) in known:
            continue
        if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise InputError(
                f"{path}: the token {text!r:.60} has lstrip, rstrip or single_word, which are "
                "not supported; remove them"
            )
        added[text] = ids[text] = int(token_id)
        special |= {text} if by_flag and token.get("special") else set()
    for text in map(content, extra_tokens(values)):
        added.setdefault(text, ids.setdefault(text, len(ids)))
        special.add(text)
    ordinary = [token for token in added if token not in special]
    return {"added_tokens": added, "ordinary_tokens": ordinary}


def written_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json must say so that transformers reads a tokenizer's files."""
    added = tokenizer.settings["added_tokens"]
    tokens = {token_id: token for token, token_id in reversed(added.items())}
    named = {f"{key}_token": tokens[getattr(tokenizer, f"{key}_id")] for key in NEEDED}
    ordinary = tokenizer.settings.get("ordinary_tokens", [])
    more = {token: i for token, i in added.items() if token not in named.values()}
    special = [token for token in more if token not in ordinary]
    flags = dict.fromkeys(FLAGS, False)
    decoder = {
        str(i): {**flags, "content": token, "special": token in special}
        for token, i in more.items()
    }
    written = {**named, "added_tokens_decoder": decoder, "extra_special_tokens": special}
    if tokenizer.settings["rule"] == "marian":
        written["separate_vocabs"] = TARGET_VOCABULARY in tokenizer.contents
    return {key: value for key, value in written.items() if value not in ({}, [])}
