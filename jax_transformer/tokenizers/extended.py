"""More tokens for the tokenizer of a Hugging Face folder: behind its own, whose ids stay.

Characters and pieces of words go into the vocabulary itself, because an added token would lose the
spaces beside it. Each has a character that the tokenizer lacked, so other text keeps its ids. Codes
of languages and whole tokens are added tokens, as `add_tokens` of transformers makes them.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.storage.marian_files import SPLITTERS
from jax_transformer.storage.writing import json_bytes
from jax_transformer.tokenizers.readers.class_settings import (
    CODE,
    EXTRA,
    FLAGS,
    TOKENIZER_CONFIG,
)
from jax_transformer.tokenizers.readers.classes import written_settings
from jax_transformer.tokenizers.readers.library import TOKENIZER_JSON, UNIGRAM
from jax_transformer.tokenizers.readers.model_files import (
    PIECES,
    TOKENIZER_FILE,
    VOCABULARY,
    read_model,
)
from jax_transformer.tokenizers.segmenters import MARK, LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import Tokenizer
from jax_transformer.tokenizers.trained import sentencepiece_pieces

LEAST = float("-inf")  # stands for the lowest score of the vocabulary
# By the rule of a tokenizer: how a language code is written as a token, and what a code is.
CODES = {
    "marian": (">>{}<<", re.compile(r"[\w-]+")),
    "m2m_100": ("__{}__", re.compile(r"[a-z]{2,3}")),
}


def known_codes(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the id of each language code."""
    if tokenizer.languages is not None:
        return tokenizer.languages.ids
    if tokenizer.settings.get("rule") != "marian":
        return {}
    return {token[2:-2]: i for token, i in tokenizer.source.segmenter.codes.items()}


def code_token(tokenizer: Tokenizer, code: str) -> str:
    """Return the token of a new language code, for example "__xh__" of M2M100.

    Raises:
        InputError: The model has no language codes, has this one, or has others than these.
    """
    codes = known_codes(tokenizer)
    written, form = CODES.get(tokenizer.settings.get("rule"), ("{}", CODE))
    example = next(iter(codes), None)
    if example is None:
        raise InputError(f"language {code!r:.40}: the model has no language codes; leave it out")
    if code in codes:
        raise InputError(f"language {code!r:.40} is there: its id is {codes[code]}; name a new one")
    if not form.fullmatch(code):
        raise InputError(f"language {code!r:.40}: a code of this model looks like {example}")
    return written.format(code)


def normalized(tokenizer: Tokenizer, line: str) -> str:
    """Return a line as the model of the vocabulary reads it."""
    segmenter = tokenizer.source.segmenter
    if not isinstance(segmenter, LibrarySegmenter):
        return segmenter.model.normalize(line).replace(MARK, " ")
    steps = segmenter.library.normalizer
    return line if steps is None else steps.normalize_str(line)


def new_pieces(
    tokenizer: Tokenizer, lines: Sequence[str], sentencepiece: int | None
) -> dict[str, float]:
    """Return the score of each unknown character of normalized lines, and of pieces that have one.

    Args:
        sentencepiece: Size of the sentencepiece model whose pieces they are; None gives none.
    """
    characters = sorted({character for line in lines for character in line})
    rows = [side.segmenter.encode(characters) for side in (tokenizer.source, tokenizer.target)]
    pairs = zip(characters, *rows, strict=True)
    pieces = {c: LEAST for c, *ids in pairs if any(tokenizer.unk_id in row for row in ids)}
    if spaces := [character for character in pieces if character.isspace()]:
        raise InputError(f"the character {spaces[0]!r} is a space and cannot be a token; remove it")
    library = getattr(tokenizer.source.segmenter, "library", None)
    kind = tokenizer.settings.get("class_name") if library is None else type(library.model).__name__
    kind = "Unigram" if tokenizer.settings.get("rule") == "marian" else kind
    if pieces and kind not in ("Unigram", "BPE"):
        raise InputError(
            f"the vocabulary of a {kind} takes no characters; name them as tokens (--tokens), "
            "which lose the spaces beside them"
        )
    if not pieces or sentencepiece is None:
        return pieces
    token_id, unknown = tokenizer.source.segmenter.token_id, {*pieces}
    learned = sentencepiece_pieces(lines, sentencepiece, model_type=kind.lower())
    return pieces | {
        piece: score
        for piece, score in learned
        if len(piece) > 1 and not unknown.isdisjoint(piece) and token_id(piece) is None
    }


def extended_files(
    tokenizer: Tokenizer,
    values: Mapping[str, Any],
    pieces: Mapping[str, float],
    codes: Sequence[str],
    tokens: Sequence[str],
) -> tuple[dict[str, bytes], dict[str, int]]:
    """Return the files of a tokenizer that change, and the id of each new token.

    Args:
        values: The content of its tokenizer_config.json, from `read_tokenizer_config`.
        pieces: What `new_pieces` returned.
        codes: New language codes.
        tokens: New tokens.
    """
    segmenter, contents = tokenizer.source.segmenter, tokenizer.contents
    new = [piece for piece in pieces if segmenter.token_id(piece) is None]
    ids = {token: i for i, token in enumerate([*new, *codes, *tokens], start=segmenter.size)}
    rule = tokenizer.settings.get("rule")
    if rule == "marian":
        words = [*new, *codes]  # codes are words of its vocabulary
        vocabulary = json.loads(contents[VOCABULARY]) | {word: ids[word] for word in words}
        files = {VOCABULARY: json_bytes(vocabulary)}
        for name in SPLITTERS:
            files[name] = _with_pieces(contents[name], pieces)
    else:
        words, files = [*pieces], {}
    flags = dict.fromkeys(FLAGS, False)
    added = {
        token: {"content": token, **flags, "special": token in codes}
        for token in ids
        if token not in words
    }
    if tokenizer.kind in (TOKENIZER_JSON, UNIGRAM):
        content = contents.get(TOKENIZER_FILE) or segmenter.library.to_str()
        library = json.loads(content)
        _add_pieces(library, pieces, ids)
        library["added_tokens"] += [{"id": ids[token], **said} for token, said in added.items()]
        files[TOKENIZER_FILE] = json_bytes(library)
    if added:
        # With those that are there: they would be counted from the new ones.
        written = written_settings(tokenizer)
        decoder = written.get("added_tokens_decoder", {}) | values.get("added_tokens_decoder", {})
        decoder |= {str(ids[token]): said for token, said in added.items()}
        if rule in ("m2m_100", "mbart"):
            extra = [*written.get(EXTRA[0], []), *codes]
            values = {key: values[key] for key in values if key not in EXTRA} | {EXTRA[0]: extra}
        values = {**values, "added_tokens_decoder": decoder}
        files[TOKENIZER_CONFIG] = json_bytes(values)
    return files, ids


def _with_pieces(model: bytes, pieces: Mapping[str, float]) -> bytes:
    """Return a sentencepiece model with those pieces that it lacks, behind its own."""
    read = read_model(model, "the sentencepiece model")
    least = min(read.get_score(i) for i in range(read.get_piece_size()))
    for piece, score in pieces.items():
        if read.piece_to_id(piece) == read.unk_id():
            # A message of protocol buffers may go on with more of a repeated field: of a piece, its
            # text (1) and its score (2). The pieces of a sentencepiece model have at most 16
            # characters, so each length is one byte.
            text, number = piece.encode(), struct.pack("<f", max(score, least))
            field = bytes([8 * 1 + 2, len(text), *text, 8 * 2 + 5, *number])
            model += bytes([8 * PIECES + 2, len(field), *field])
    return model


def _add_pieces(
    library: dict[str, Any], pieces: Mapping[str, float], ids: Mapping[str, int]
) -> None:
    """Put pieces into the vocabulary of a tokenizer.json, behind the tokens that were added."""
    if not pieces:
        return
    model = library["model"]
    vocabulary = model["vocab"]
    added = sorted(library["added_tokens"], key=lambda token: token["id"])
    # The library counts the ids of added tokens from the end of the vocabulary.
    if isinstance(vocabulary, list):
        least = min(score for _, score in vocabulary)
        present = {token for token, _ in vocabulary}
        vocabulary += [[x["content"], 0.0] for x in added if x["content"] not in present]
        vocabulary += [[piece, max(score, least)] for piece, score in pieces.items()]
        return
    vocabulary |= {token["content"]: token["id"] for token in added}
    vocabulary |= {piece: ids[piece] for piece in pieces}
    merges = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p))]
    merges = [[*pair] for pair in merges if vocabulary.keys() >= {*pair}]
    as_text = model["merges"] and isinstance(model["merges"][0], str)  # in older files
    model["merges"] += [" ".join(pair) for pair in merges] if as_text else merges
