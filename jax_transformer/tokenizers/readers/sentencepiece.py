"""Sentencepiece models whose pieces have other ids: the tokenizers of Marian, M2M100 and mBART.

Kudo and Richardson 2018, "SentencePiece". Marian has a model for each language (source.spm and
target.spm) and the ids of vocab.json, or of a vocabulary for each language. M2M100 has the ids of
vocab.json; those of mBART are one above those of its model (fairseq). Ids and decoded text are
those of transformers 5.23, except that MBartTokenizer does not normalise text: this tokenizer does,
by the model, as mBART was trained.
"""

import functools
from collections.abc import Mapping
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    VOCABULARY,
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
    """Return the tokenizer in sentencepiece models and vocabularies; see `Tokenizer.build`."""
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
