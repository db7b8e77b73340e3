"""Tokenizers by kind, and how any of them is written and read: a description and its files."""

import base64
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from jax_transformer.errors import InputError, one_line
from jax_transformer.storage.marian_files import SPLITTERS
from jax_transformer.tokenizers.readers import library
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    VOCABULARY,
    read_model,
    read_vocabulary,
)
from jax_transformer.tokenizers.segmenters import SentencePieceSegmenter, Words
from jax_transformer.tokenizers.tokenizer import DEFAULTS, TOKENIZER_IDS, Tokenizer
from jax_transformer.tokenizers.trained import BYTE_PAIR, read_byte_pair

SEPARATE = "separate"
SIDES = ("source", "target")
SENTENCEPIECE = "sentencepiece"  # the kind
MARIAN_NPZ = "marian_npz"  # the rule of Marian's own folders, `readers.marian`
TARGET_VOCABULARY = "target_vocab.json"  # only where the languages have a vocabulary each
SENTENCEPIECE_FILES = {
    "marian": (*SPLITTERS, VOCABULARY),
    "m2m_100": (MBART_MODEL, VOCABULARY),
    "mbart": (MBART_MODEL,),
    MARIAN_NPZ: (VOCABULARY,),
}
# Files that a tokenizer of a rule may lack.
OPTIONAL_FILES = {
    "marian": (TARGET_VOCABULARY,),
    MARIAN_NPZ: (*SPLITTERS, TARGET_VOCABULARY),
}


def separate(source: Tokenizer, target: Tokenizer) -> Tokenizer:
    """Return a tokenizer that encodes sources by one tokenizer and targets by another."""
    for name in TOKENIZER_IDS:
        ids = getattr(source, name), getattr(target, name)
        if ids[0] != ids[1]:
            raise InputError(
                f"{name} is {ids[0]} in the source's tokenizer and {ids[1]} in the target's; "
                "use tokenizers whose special ids agree"
            )
    parts = dict(zip(SIDES, (source, target), strict=True))
    contents = {
        f"{side}_{name}": content
        for side, tokenizer in parts.items()
        for name, content in tokenizer.contents.items()
    }
    settings = {side: describe(tokenizer) for side, tokenizer in parts.items()}
    return dataclasses.replace(
        target,
        kind=SEPARATE,
        contents=contents,
        settings=settings,
        source=source.source,
        languages=None,
    )


def _read_separate(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    if set(settings) != set(SIDES):
        raise InputError(f"{name}: separate tokenizers are described as source and target")

    def of_side(side: str) -> Tokenizer:
        names = {f"{side}_{file}": file for file in settings[side].get("files", ())}
        files = {names[file]: content for file, content in contents.items() if file in names}
        return from_description(settings[side], files, f"{name} ({side})")

    return separate(of_side("source"), of_side("target"))


def read_sentencepiece(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer of Marian, M2M100 or mBART, whose pieces have other ids than a model's.

    The models are those of sentencepiece (Kudo and Richardson 2018). Marian has one for each
    language (source.spm and target.spm) and the ids of vocab.json, or of a vocabulary for each
    language. M2M100 has the ids of vocab.json; those of mBART are one above those of its model
    (fairseq). Ids and decoded text are those of transformers 5.23, except that MBartTokenizer does
    not normalise text: this tokenizer does, by the model, as mBART was trained. Arguments as of
    `Tokenizer.build`.
    """
    values = DEFAULTS | settings
    rule = values["rule"]
    names, optional = ({*files.get(rule, ())} for files in (SENTENCEPIECE_FILES, OPTIONAL_FILES))
    if not names or not names <= set(contents) <= names | optional:
        raise InputError(
            f"{name}: a sentencepiece tokenizer by the rule {rule!r} is "
            f"{', '.join(sorted(names))}, but not {', '.join(sorted(contents))}"
        )
    model_files = SPLITTERS if rule in OPTIONAL_FILES else (MBART_MODEL,) * 2
    source, target = (
        read_model(contents[file], f"{name}/{file}") if file in contents else Words()
        for file in model_files
    )
    if rule == "mbart":
        ids = fairseq_ids(source)
    else:
        ids = read_vocabulary(contents[VOCABULARY], f"{name}/{VOCABULARY}")
    # As in transformers, which joins by the source's model.
    target_ids, joiner = ids, target if rule == MARIAN_NPZ else source
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


def fairseq_ids(model: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """Return the id of each piece of a sentencepiece model, as fairseq counts them."""
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    return {token: number for number, token in enumerate([*FAIRSEQ, *pieces])}


# Each returns the tokenizer, given its files by name, its settings, and the name of what contains
# them for error messages. It refuses files that are missing or damaged.
Reader = Callable[[Mapping[str, bytes], Mapping[str, Any], str], Tokenizer]
READERS: dict[str, Reader] = {
    BYTE_PAIR: read_byte_pair,
    **library.READERS,
    SENTENCEPIECE: read_sentencepiece,
    SEPARATE: _read_separate,
}


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what identifies a tokenizer besides its files, ready for JSON."""
    return {"kind": tokenizer.kind, "files": sorted(tokenizer.contents), **tokenizer.settings}


def from_description(
    description: Mapping[str, Any], contents: Mapping[str, bytes], name: str
) -> Tokenizer:
    """Return the tokenizer from what `describe` returned and the content of its files."""
    settings = dict(description)
    kind, wanted = settings.pop("kind", None), settings.pop("files", ())
    if kind not in READERS:
        raise InputError(f"{name}: the tokenizer's kind {kind!r} is none of {', '.join(READERS)}")
    files = {file: content for file, content in contents.items() if file in wanted}
    return READERS[kind](files, settings, name)


def to_text(tokenizer: Tokenizer) -> str:
    """Return a tokenizer as JSON: what `describe` returns, and the content of its files."""
    files = {name: base64.b64encode(data).decode() for name, data in tokenizer.contents.items()}
    return json.dumps({"tokenizer": describe(tokenizer), "files": files})


def from_text(text: str | bytes, name: str) -> Tokenizer:
    """Return the tokenizer that `to_text` has written; error messages begin with `name`."""
    try:
        read = json.loads(text)
        files = {name: base64.b64decode(data) for name, data in read["files"].items()}
        return from_description(read["tokenizer"], files, name)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = one_line(repr(error), 200)
        raise InputError(f"{name}: is not a tokenizer ({reason}); delete it") from error


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer's files into an existing folder."""
    for name, content in tokenizer.contents.items():
        (folder / name).write_bytes(content)
