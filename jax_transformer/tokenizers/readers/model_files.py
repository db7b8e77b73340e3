"""Files of tokenizers, read with care, and what they may make of a text.

A valid file could fill the memory or end the process. While it reads a file, the library
`tokenizers` runs the normalizer on added tokens, and it frees a vocabulary by recursion over the
characters of a token. So a file is checked before.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sentencepiece
import tokenizers
from tokenizers import normalizers

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.reading import MAX_TOKENIZER, parse_json, read_bytes
from jax_transformer.tokenizers.segmenters import library_faults

# Fields of the message ModelProto; a model without the last two has been cut off.
PIECES, TRAINER_SETTINGS, NORMALIZER = 1, 2, 3
CHARACTER_MAP = 2  # field of the message NormalizerSpec
TOKENIZER_FILE = "tokenizer.json"
VOCABULARY, MERGES, WORD_PIECES = "vocab.json", "merges.txt", "vocab.txt"
T5_MODEL = "spiece.model"
MBART_MODEL = "sentencepiece.bpe.model"  # of mBART-50, M2M100 and NLLB, too
# The first tokens of fairseq, in the place of the first three pieces of a model: <unk>, <s>, </s>.
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
# What a file may make of a text.
MOST_REPLACEMENTS = 256  # of a part of a tokenizer.json
MOST_MAPS = 2  # steps of a part that write several characters for one, whatever the character
MOST_GROWTH = 64  # characters that are made of one; compatible forms of Unicode have 18
LONGEST_TOKEN = 2**14  # characters
INNER = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of files in a folder; refuse one that is missing or too large."""
    fault = "cannot be read; a tokenizer file must be there"
    return {name: read_bytes(folder / name, fault, MAX_TOKENIZER) for name in names}


def read_model(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Return a sentencepiece model."""
    try:
        fields = [(field, type(value)) for field, value in _fields(content)]
        # A file that was cut off between two fields is still a message, but lacks fields.
        if not {(field, bytes) for field in (PIECES, TRAINER_SETTINGS, NORMALIZER)} <= {*fields}:
            raise ValueError("a field is missing")
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        model.id_to_piece([*range(model.get_piece_size())])  # every piece is text
        characters = character_map(content)
    except (IndexError, RuntimeError, OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{name}: is not a sentencepiece model, or is damaged; copy the file again"
        ) from error
    if characters:
        check_character_map(characters, f"{name}: the normalizer")
    return model


def character_map(content: bytes) -> bytes | None:
    """Return the compiled map of characters in a sentencepiece model."""
    settings = dict(_fields(content))[NORMALIZER]
    return dict(_fields(settings)).get(CHARACTER_MAP)


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field of a protocol buffer message."""
    position = 0

    def number() -> int:
        nonlocal position
        value, shift = 0, 0
        while True:
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while position < len(content):
        field, wire_type = divmod(number(), 8)
        if wire_type not in (0, 2):
            raise ValueError(f"field {field} is of wire type {wire_type}")
        value = number()
        if wire_type == 2:
            position += value
            if position > len(content):
                raise ValueError("the last field is longer than the message")
            value = content[position - value : position]
        yield field, value


def read_vocabulary(content: bytes, name: str) -> dict[str, int]:
    """Return the id of each token."""
    vocabulary = parse_json(content, name)
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise InputError(
                f"{name}: is not a vocabulary: the id of {token[:40]!r} is {token_id!r:.40}; an id "
                "is a whole number from 0 on"
            )
    return vocabulary


def check_tokenizer_json(text: str, name: str) -> None:
    """Refuse a tokenizer.json that is damaged, has a huge token or makes too much of a text."""
    with library_faults(f"{name}: damaged tokenizer file"):
        described = msgspec.json.decode(text, type=dict[str, Any])
        parts = {part: described.get(part) for part in INNER}
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        usual = {"version": "1.0", "model": empty, **parts}
        # The library writes each part in its usual form.
        library = tokenizers.Tokenizer.from_str(json.dumps(usual))
        written = json.loads(library.to_str())
    for part, key in INNER.items():
        if written[part] is not None:
            _check_steps([*_steps(written[part], key)], f"{name}: the {part}")
    model = described.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
        check_tokens((pair[0] for pair in vocabulary if isinstance(pair, list) and pair), name)


def check_tokens(tokens: Iterable[Any], name: str) -> None:
    """Refuse a token of more than `LONGEST_TOKEN` characters."""
    for token in tokens:
        if isinstance(token, str) and len(token) > LONGEST_TOKEN:
            raise InputError(
                f"{name}: the token {shorten(token)} has {len(token):,} characters, more than "
                f"{LONGEST_TOKEN:,}; take it out of the vocabulary"
            )


def check_character_map(content: bytes, name: str) -> None:
    """Refuse a compiled map that writes more than `MOST_GROWTH` characters for one.

    Args:
        content: `precompiled_charsmap` of sentencepiece: a number of four bytes, as many bytes of a
            trie, and the texts that are written, each with a zero behind it.
    """
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    longest = max(len(text.decode("utf-8", "replace")) for text in texts)
    if longest > MOST_GROWTH:
        raise InputError(
            f"{name} writes {longest:,} characters for one, more than {MOST_GROWTH}; remove that "
            "rule of its normalization"
        )


def _steps(step: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part of a tokenizer.json in order, those of inner sequences too."""
    if step["type"] == "Sequence":
        for inner in step[key]:
            yield from _steps(inner, key)
    else:
        yield step


def _check_steps(steps: Sequence[Mapping[str, Any]], name: str) -> None:
    """Refuse steps that make many characters of one: a long chain would fill the memory."""
    for kind in ("Precompiled", "ByteLevel"):
        if (count := sum(step["type"] == kind for step in steps)) > MOST_MAPS:
            raise InputError(f"{name} has {count:,} steps of type {kind}; keep one of them")
    for step in steps:
        if step["type"] == "Precompiled":
            characters = msgspec.convert(step["precompiled_charsmap"], bytes)
            check_character_map(characters, name)
    replacements = [step for step in steps if step["type"] == "Replace"]
    if len(replacements) > MOST_REPLACEMENTS:
        raise InputError(
            f"{name} has {len(replacements):,} replacements, above {MOST_REPLACEMENTS}"
        )
    _check_growth(replacements, name)


def _check_growth(steps: Sequence[Mapping[str, Any]], name: str) -> None:
    """Refuse replacements that lengthen each other's text.

    What a pattern matches goes through all steps: the text of a pattern, or, for a regular
    expression, what it writes for one character at least.
    """
    replace, texts = [], []
    for step in steps:
        pattern, content = step["pattern"].get("String"), step["content"]
        matched = pattern or tokenizers.Regex(step["pattern"].get("Regex", ""))
        replace.append(normalizers.Replace(matched, content).normalize_str)
        texts.append((pattern, len(pattern)) if pattern else (content, 1))
    for start, characters in texts:
        grown, most = start, MOST_GROWTH * characters
        for function in replace:
            if len(grown) <= most:
                grown = function(grown)
        if len(grown) > most:
            raise InputError(
                f"{name} writes more than {most:,} characters for {shorten(start)}; remove the "
                "replacements that lengthen each other's text"
            )
