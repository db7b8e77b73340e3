"""A sentencepiece model with language codes: the tokenizers of M2M100 and of mBART.

Kudo and Richardson 2018, "SentencePiece". The ids of pieces are those of vocab.json (M2M100) or one
above those of the model (mBART, as fairseq has them). For M2M100 ids and decoded text are those of
M2M100Tokenizer in transformers 5.23. MBartTokenizer of transformers 5.23 does not normalise text;
this tokenizer does, by the sentencepiece model, as the text that mBART was trained on.
"""

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Integer

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.languages import Languages
from jax_transformer.tokenizers.sentencepiece_model import (
    FAIRSEQ,
    MARK,
    read_model,
    read_vocabulary,
)
from jax_transformer.tokenizers.storage import check_settings
from jax_transformer.tokenizers.tokenizer import clean_up_spaces

MODEL = "sentencepiece.bpe.model"
VOCABULARY = "vocab.json"
DEFAULTS: dict[str, Any] = {
    "pad_id": None,
    "bos_id": None,
    "eos_id": None,
    "unk_id": None,
    "special_tokens": {},
    "vocab_size": None,
    "languages": None,
    "clean_up_spaces": False,
}


class SentencePieceLanguages:
    """The `Tokenizer` of sentencepiece.bpe.model, with vocab.json or without.

    Special tokens in a line, as `</s>`, become special ids, as in transformers.

    Attributes:
        pad_id: Id of padding.
        bos_id: Id that the decoder reads before the first token of a target.
        eos_id: Id that ends the text of a source and of a target.
        unk_id: Id of pieces that the vocabulary lacks.
        languages: The language codes that it knows and is set to.
    """

    kind = "sentencepiece_languages"

    def __init__(
        self, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> None:
        """Read the files.

        Args:
            contents: The files by name.
            settings: Values that differ from `DEFAULTS`: the special ids, all of which must be
                given; `special_tokens`, the ids of tokens that are found in a line before it is
                split into pieces, and that decoding leaves out; `vocab_size`, the number of ids of
                the model; and `languages`, as of `Languages.to_json`.
            name: What contains the files, for error messages.

        Raises:
            InputError: A file is missing or damaged, or an id is outside the vocabulary.
        """
        if not {MODEL} <= set(contents) <= {MODEL, VOCABULARY}:
            raise InputError(
                f"{name}: a tokenizer of this kind is {MODEL}, with or without vocab.json"
            )
        self._contents = dict(contents)
        self._name = name
        self._model = read_model(contents[MODEL], f"{name}/{MODEL}")
        if VOCABULARY in contents:
            self._ids = read_vocabulary(contents[VOCABULARY], f"{name}/{VOCABULARY}")
        else:
            self._ids = fairseq_ids(contents[MODEL], f"{name}/{MODEL}")
        self._set_up(settings)

    def _set_up(self, settings: Mapping[str, Any]) -> None:
        """Set what the settings decide."""
        name = self._name
        self._settings = check_settings(settings, DEFAULTS, name)
        self.languages = Languages.from_json(self._settings["languages"] or {}, name)
        self._special = self._settings["special_tokens"]
        own_ids = [self._settings[f"{key}_id"] for key in ("pad", "bos", "eos", "unk")]
        ids = [*own_ids, *self._special.values(), *self.languages.ids.values()]
        size = self._settings["vocab_size"]
        if any(type(i) is not int or not 0 <= i < size for i in (*ids, *self._ids.values())):
            raise InputError(
                f"{name}: the tokenizer has ids that are not from 0 to {size - 1}, those of the "
                "model; use the tokenizer that the model was trained with"
            )
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = own_ids
        if self.languages.start_id is not None:
            self.bos_id = self.languages.start_id
        self._tokens = {token_id: token for token, token_id in self._ids.items()}
        self._special_ids = {*self._special.values()}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._specials = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def with_languages(self, languages: Languages) -> "SentencePieceLanguages":
        """Return this tokenizer with other languages."""
        changed = copy.copy(self)
        changed._set_up(self.settings() | {"languages": languages.to_json()})
        return changed

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "SentencePieceLanguages":
        """Return the tokenizer from what `files` and `settings` returned."""
        return cls(contents, settings, name)

    def files(self) -> dict[str, bytes]:
        """Return the files as they were read."""
        return dict(self._contents)

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from `DEFAULTS`."""
        return {name: v for name, v in self._settings.items() if v != DEFAULTS[name]}

    @property
    def src_vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self._settings["vocab_size"]

    @property
    def tgt_vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self._settings["vocab_size"]

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        digest = hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode())
        digest.update(json.dumps(self._ids, sort_keys=True).encode())
        digest.update(self._contents[MODEL])
        return digest.hexdigest()

    def encode_source(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line with EOS and the code of its language.

        Args:
            lines: The lines.
            max_length: Most ids of a line; the end of the text of a longer line is cut off.

        Raises:
            InputError: The language of the sources is not known.
        """
        return self._encode(lines, "source", max_length)

    def encode_target(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line with EOS and the code of its language, as `encode_source`."""
        return self._encode(lines, "target", max_length)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> str:
        """Return the text of a target [length], without special tokens.

        An id that no token has, as the made-up words of M2M100, is "<unk>", as in transformers.
        """
        kept = [token_id for token_id in map(int, ids) if token_id not in self._special_ids]
        if VOCABULARY in self._contents:
            text = self._joined_by_model(kept)
        else:  # as the library tokenizers joins tokens, which MBartTokenizer uses
            first, rest = (self._tokens.get(i, "") for i in kept[:1]), kept[1:]
            text = "".join(first).replace(MARK, "")
            text += "".join(self._tokens.get(i, "") for i in rest).replace(MARK, " ")
        return clean_up_spaces(text) if self._settings["clean_up_spaces"] else text

    def _joined_by_model(self, ids: Sequence[int]) -> str:
        """Return the text of ids as M2M100Tokenizer joins it."""
        text, part = "", []
        for token_id in ids:
            if token_id in self._tokens:
                part.append(self._tokens[token_id])
            else:
                text += self._model.decode_pieces(part) + "<unk>"
                part = []
        return (text + self._model.decode_pieces(part)).strip()

    def source_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token with the space that it begins with; `</s>` as "</s>"."""
        tokens = self._tokens | {token_id: token for token, token_id in self._special.items()}
        return [tokens.get(token_id, "<unk>").replace(MARK, " ") for token_id in map(int, ids)]

    target_texts = source_texts

    def _encode(
        self, lines: Sequence[str], side: Literal["source", "target"], max_length: int | None
    ) -> list[list[int]]:
        prefix, suffix = self.languages.affixes(side, self.eos_id)
        most = None if max_length is None else max(0, max_length - len(prefix) - len(suffix))
        parts = [[part for part in self._specials.split(line) if part] for line in lines]
        texts = [text for line in parts for text in line if text not in self._special]
        pieces = iter(self._model.encode(texts, out_type=str))
        encoded = []
        for line in parts:
            ids: list[int] = []
            for part in line:
                if part in self._special:
                    ids.append(self._special[part])
                else:
                    ids += [self._ids.get(piece, self.unk_id) for piece in next(pieces)]
            encoded.append([*prefix, *ids[:most], *suffix])
        return encoded


def fairseq_ids(content: bytes, name: str) -> dict[str, int]:
    """Return the id of each piece of a sentencepiece model, as fairseq counts them.

    Args:
        content: The model.
        name: Its name in error messages.

    Raises:
        InputError: The model is damaged.
    """
    model = read_model(content, name)
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    return {token: number for number, token in enumerate([*FAIRSEQ, *pieces])}
