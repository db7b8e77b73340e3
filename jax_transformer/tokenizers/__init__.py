"""Tokenizers by kind, and how any of them is written and read: a description and its files."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from jax_transformer.errors import InputError, one_line
from jax_transformer.tokenizers.byte_level import ByteLevelTokenizer
from jax_transformer.tokenizers.byte_pair import BytePairTokenizer
from jax_transformer.tokenizers.languages import Languages, with_languages
from jax_transformer.tokenizers.sentencepiece_languages import SentencePieceLanguages
from jax_transformer.tokenizers.sentencepiece_unigram import SentencePieceUnigram
from jax_transformer.tokenizers.sentencepiece_vocabulary import SentencePieceTokenizer
from jax_transformer.tokenizers.separate import SeparateTokenizers
from jax_transformer.tokenizers.storage import read_files, write_files
from jax_transformer.tokenizers.tokenizer import LineError, Tokenizer
from jax_transformer.tokenizers.tokenizer_json import TokenizerJson

__all__ = [
    "TOKENIZERS",
    "ByteLevelTokenizer",
    "BytePairTokenizer",
    "Languages",
    "LineError",
    "SentencePieceLanguages",
    "SentencePieceTokenizer",
    "SentencePieceUnigram",
    "SeparateTokenizers",
    "Tokenizer",
    "TokenizerJson",
    "describe",
    "from_description",
    "from_text",
    "read_files",
    "to_text",
    "with_languages",
    "write_files",
]

TOKENIZERS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (
        BytePairTokenizer,
        ByteLevelTokenizer,
        SentencePieceTokenizer,
        SentencePieceLanguages,
        SentencePieceUnigram,
        TokenizerJson,
        SeparateTokenizers,
    )
}


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what identifies a tokenizer beside its files, ready for JSON."""
    return {"kind": tokenizer.kind, "files": sorted(tokenizer.files()), **tokenizer.settings()}


def from_description(
    description: Mapping[str, Any], contents: Mapping[str, bytes], name: str
) -> Tokenizer:
    """Return the tokenizer from what `describe` returned and the content of its files.

    Args:
        description: The description.
        contents: The files by name.
        name: What contains the files, for error messages.

    Raises:
        InputError: The kind is unknown, or a file is missing or damaged.
    """
    settings = dict(description)
    kind = settings.pop("kind", None)
    if kind not in TOKENIZERS:
        raise InputError(
            f"{name}: the tokenizer's kind {kind!r} is none of {', '.join(TOKENIZERS)}"
        )
    wanted = settings.pop("files")
    files = {file: content for file, content in contents.items() if file in wanted}
    return TOKENIZERS[kind].from_files(files, settings, name)


def to_text(tokenizer: Tokenizer) -> str:
    """Return a tokenizer as JSON: what `describe` returns, and the content of its files."""
    files = {name: base64.b64encode(data).decode() for name, data in tokenizer.files().items()}
    return json.dumps({"tokenizer": describe(tokenizer), "files": files})


def from_text(text: str | bytes, name: str) -> Tokenizer:
    """Return the tokenizer that `to_text` has written.

    Raises:
        InputError: The text is damaged; the message begins with `name`.
    """
    try:
        read = json.loads(text)
        files = {name: base64.b64decode(data) for name, data in read["files"].items()}
        return from_description(read["tokenizer"], files, name)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = one_line(repr(error), 200)
        raise InputError(f"{name}: is no tokenizer ({reason}); delete it") from error
