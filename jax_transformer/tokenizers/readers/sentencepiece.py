"""Sentencepiece models whose pieces have other ids: the tokenizers of Marian, M2M100 and mBART.

Kudo and Richardson 2018, "SentencePiece". Marian has a model for each language; the ids are those
of vocab.json, which both languages share, or of a vocabulary for each language. The ids of M2M100
are those of vocab.json, those of mBART one above those of its model, as fairseq has them. Ids and
decoded text are those of MarianTokenizer and M2M100Tokenizer in transformers 5.23. MBartTokenizer
does not normalise text; this tokenizer does, by the model, as the text that mBART was trained on.
"""

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
SOURCE_MODEL, TARGET_MODEL = "source.spm", "target.spm"
TARGET_VOCABULARY = "target_vocab.json"  # only where the languages have a vocabulary each
FILES = {
    "marian": (SOURCE_MODEL, TARGET_MODEL, VOCABULARY),
    "m2m_100": (MBART_MODEL, VOCABULARY),
    "mbart": (MBART_MODEL,),
}


def read_sentencepiece(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in sentencepiece models and their vocabularies.

    The settings are those of `Tokenizer.build`, and `rule`: a name in `FILES`, which decides the
    files; `added_tokens`: the ids of tokens that are found in a line before it is split into
    pieces; `ordinary_tokens`: those of them that decoding does not leave out.
    """
    values = DEFAULTS | settings
    rule, added, ordinary = values["rule"], values["added_tokens"], values["ordinary_tokens"]
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
    unk_id = values["unk_id"]
    segmenters = (
        SentencePieceSegmenter(
            *(source, ids, added, ordinary, unk_id, rule), joiner=source, is_source=True
        ),
        SentencePieceSegmenter(
            *(target, target_ids, added, ordinary, unk_id, rule), joiner=joiner, is_source=False
        ),
    )
    return Tokenizer.build(SENTENCEPIECE, contents, settings, name, segmenters)


def fairseq_ids(content: bytes, name: str) -> dict[str, int]:
    """Return the id of each piece of a sentencepiece model, as fairseq counts them."""
    model = read_model(content, name)
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    return {token: number for number, token in enumerate([*FAIRSEQ, *pieces])}
