"""Two sentencepiece models and a vocabulary: the tokenizer of Marian models.

Kudo and Richardson 2018, "SentencePiece". A line is split into pieces by the sentencepiece model of
its language; the ids are those of vocab.json, which both languages share, or of a vocabulary for
each language. The ids and the decoded text are those of MarianTokenizer in transformers 5.23.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from jaxtyping import Integer

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import read_json
from jax_transformer.tokenizers.sentencepiece_model import MARK, read_model, read_vocabulary
from jax_transformer.tokenizers.storage import check_settings, read_files
from jax_transformer.tokenizers.tokenizer import LineError, clean_up_spaces

SOURCE_MODEL = "source.spm"
TARGET_MODEL = "target.spm"
VOCABULARY = "vocab.json"
TARGET_VOCABULARY = "target_vocab.json"  # only where the languages have a vocabulary each
FILES = (SOURCE_MODEL, TARGET_MODEL, VOCABULARY)
TOKENIZER_CONFIG = "tokenizer_config.json"
DEFAULTS: dict[str, Any] = {
    "bos_id": None,
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "added_tokens": {},
    "special_tokens": [],
    "clean_up_spaces": False,
}
MOST_CODES = 8  # language codes that a message shows


class SentencePieceTokenizer:
    """The `Tokenizer` of source.spm, target.spm and vocab.json.

    A line may begin with a language code such as `>>fra<<`, which is one token. Special tokens in
    a line, as `</s>`, become special ids, as in transformers.

    Attributes:
        pad_id: Id of the padding token.
        bos_id: Id that the decoder reads before the first token of a target.
        eos_id: Id of the token that ends every source and target.
        unk_id: Id of pieces that the vocabulary lacks.
    """

    kind = "sentencepiece_vocabulary"
    languages = None

    def __init__(
        self, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> None:
        """Read the files.

        Args:
            contents: The files by name: the two models, vocab.json and, where each language has
                its own vocabulary, target_vocab.json.
            settings: Values that differ from `DEFAULTS`. `bos_id` None is the id of padding.
                `added_tokens` has the ids of tokens that are found in a line before it is split
                into pieces; `special_tokens` are those of them that decoding leaves out.
            name: What contains the files, for error messages.

        Raises:
            InputError: A file is missing or damaged, or the files do not belong together.
        """
        if not set(FILES) <= set(contents) <= {*FILES, TARGET_VOCABULARY}:
            raise InputError(
                f"{name}: a sentencepiece tokenizer is {', '.join(FILES)} and, for two "
                f"vocabularies, {TARGET_VOCABULARY}, but not {', '.join(sorted(contents))}"
            )
        self._contents = dict(contents)
        self._settings = check_settings(settings, DEFAULTS, name)
        self._source_model = read_model(contents[SOURCE_MODEL], f"{name}/{SOURCE_MODEL}")
        self._target_model = read_model(contents[TARGET_MODEL], f"{name}/{TARGET_MODEL}")
        source = read_vocabulary(contents[VOCABULARY], f"{name}/{VOCABULARY}")
        target = source
        if TARGET_VOCABULARY in contents:
            target = read_vocabulary(contents[TARGET_VOCABULARY], f"{name}/{TARGET_VOCABULARY}")
        special = {key: self._settings[f"{key}_token"] for key in ("pad", "eos", "unk")}
        for file, vocabulary in ((VOCABULARY, source), (TARGET_VOCABULARY, target)):
            for token in special.values():
                if token not in vocabulary:
                    raise InputError(f"{name}/{file}: lacks the special token {token!r}; add it")
                if vocabulary[token] != source[token]:
                    raise InputError(
                        f"{name}: {token!r} must have one id, but has {source[token]} in "
                        f"{VOCABULARY} and {vocabulary[token]} in {TARGET_VOCABULARY}"
                    )
        self.pad_id, self.eos_id, self.unk_id = (source[token] for token in special.values())
        bos_id = self._settings["bos_id"]
        self.bos_id = self.pad_id if bos_id is None else bos_id
        added = {token: source[token] for token in special.values()}
        added |= self._settings["added_tokens"]
        self._codes = [token for token in source if _language_code(token) == (token, "")]
        self._source_ids, self._target_ids = source | added, target | added
        self._source_tokens, self._target_tokens = (
            {token_id: token for token, token_id in [*vocabulary.items(), *added.items()]}
            for vocabulary in (source, target)
        )
        self._special_ids = {
            self._source_ids[token]
            for token in (*special.values(), *self._settings["special_tokens"])
        }
        # The longest token first: one may begin with another.
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @classmethod
    def load(cls, folder: Path, bos_id: int | None = None) -> "SentencePieceTokenizer":
        """Read the files in a folder, with the settings in its tokenizer_config.json.

        Args:
            folder: The folder.
            bos_id: Id that the decoder reads before a target; None is the id of padding.

        Raises:
            InputError: A file is missing or damaged, the files do not belong together, or
                tokenizer_config.json has a setting that this library lacks.
        """
        values = {}
        path = folder / TOKENIZER_CONFIG
        if path.exists():
            values = read_json(path)
        names = [*FILES, TARGET_VOCABULARY] if values.get("separate_vocabs") else FILES
        contents = read_files(folder, names)
        vocabulary = read_vocabulary(contents[VOCABULARY], str(folder / VOCABULARY))
        settings = _from_tokenizer_config(values, vocabulary, str(path))
        return cls(contents, settings | {"bos_id": bos_id}, str(folder))

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "SentencePieceTokenizer":
        """Return the tokenizer from what `files` and `settings` returned."""
        return cls(contents, settings, name)

    def files(self) -> dict[str, bytes]:
        """Return the files as they were read."""
        return dict(self._contents)

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from `DEFAULTS`."""
        return {name: v for name, v in self._settings.items() if v != DEFAULTS[name]}

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the tokenizer_config.json with which transformers reads the files."""
        names = ("eos_token", "unk_token", "pad_token")
        special = self._settings["special_tokens"]
        ordinary = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        added = {
            str(token_id): {"content": token, **ordinary, "special": token in special}
            for token, token_id in self._settings["added_tokens"].items()
        }
        return {
            "tokenizer_class": "MarianTokenizer",
            "separate_vocabs": TARGET_VOCABULARY in self._contents,
            "clean_up_tokenization_spaces": self._settings["clean_up_spaces"],
            **{name: self._settings[name] for name in names},
            **({"added_tokens_decoder": added} if added else {}),
            **({"extra_special_tokens": special} if special else {}),
        }

    @property
    def src_vocab_size(self) -> int:
        """Number of token ids of a source: the largest id and 1."""
        return max(self._source_tokens) + 1

    @property
    def tgt_vocab_size(self) -> int:
        """Number of token ids of a target: the largest id and 1."""
        return max(self._target_tokens) + 1

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        digest = hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode())
        for name in sorted(self._contents):
            content = self._contents[name]
            if name in (VOCABULARY, TARGET_VOCABULARY):
                content = json.dumps(json.loads(content), sort_keys=True).encode()
            digest.update(f"{name} {len(content)} ".encode())
            digest.update(content)
        return digest.hexdigest()

    def encode_source(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line and EOS; uses every CPU core.

        Args:
            lines: The lines; a line may begin with a language code.
            max_length: Most ids of a line, EOS included; longer ones are cut before the EOS.

        Raises:
            LineError: A line begins with a language code that the model does not know.
        """
        for row, line in enumerate(lines):
            code, _ = _language_code(self._added.split(line, 1)[0])
            if code and code not in self._source_ids:
                raise LineError(
                    row,
                    f"begins with the language code {code[:60]!r}, but the model knows "
                    f"{self._known_codes()}",
                )
        return self._encode(lines, self._source_model, self._source_ids, max_length)

    def encode_target(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line and EOS, by the sentencepiece model of the target."""
        return self._encode(lines, self._target_model, self._target_ids, max_length)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> str:
        """Return the text of a target [length], without special tokens.

        As in transformers, the model of the source joins the pieces, except where source and
        target have a vocabulary each.
        """
        two_vocabularies = TARGET_VOCABULARY in self._contents
        model = self._target_model if two_vocabularies else self._source_model
        tokens = [
            self._token(int(token_id), self._target_tokens, model)
            for token_id in ids
            if int(token_id) not in self._special_ids
        ]
        text = model.decode_pieces(tokens).replace(MARK, " ").strip()
        return clean_up_spaces(text) if self._settings["clean_up_spaces"] else text

    def source_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a source with the space that it begins with."""
        return self._texts(ids, self._source_tokens, self._source_model)

    def target_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a target with the space that it begins with."""
        return self._texts(ids, self._target_tokens, self._target_model)

    def _encode(
        self,
        lines: Sequence[str],
        model: sentencepiece.SentencePieceProcessor,
        vocabulary: Mapping[str, int],
        max_length: int | None,
    ) -> list[list[int]]:
        """Return the ids of each line and EOS."""
        texts: list[str] = []
        sequences: list[list[int | None]] = []  # None is the place of the next of `texts`
        for line in lines:
            sequence: list[int | None] = []
            for part in self._added.split(line):
                if self._added.fullmatch(part):
                    sequence.append(vocabulary[part])
                elif part:
                    code, text = _language_code(part)
                    if code:
                        sequence.append(vocabulary.get(code, self.unk_id))
                    sequence.append(None)
                    texts.append(text)
            sequences.append(sequence)
        pieces = iter(model.encode(texts, out_type=str))
        most = None if max_length is None else max_length - 1
        return [
            [*list(self._ids(sequence, pieces, vocabulary))[:most], self.eos_id]
            for sequence in sequences
        ]

    def _ids(
        self,
        sequence: Sequence[int | None],
        pieces: Iterator[list[str]],
        vocabulary: Mapping[str, int],
    ) -> Iterator[int]:
        """Yield the ids of a line, given the pieces of its texts."""
        for token_id in sequence:
            if token_id is not None:
                yield token_id
            else:
                yield from (vocabulary.get(piece, self.unk_id) for piece in next(pieces))

    def _texts(
        self,
        ids: Sequence[int] | Integer[np.ndarray, "length"],
        tokens: Mapping[int, str],
        model: sentencepiece.SentencePieceProcessor,
    ) -> list[str]:
        return [self._token(int(token_id), tokens, model).replace(MARK, " ") for token_id in ids]

    def _token(
        self, token_id: int, tokens: Mapping[int, str], model: sentencepiece.SentencePieceProcessor
    ) -> str:
        """Return the token of an id; where the vocabulary has a gap, what transformers reads."""
        if token_id in tokens:
            return tokens[token_id]
        if 0 <= token_id < model.get_piece_size():
            return model.id_to_piece(token_id)
        return self._settings["unk_token"]

    def _known_codes(self) -> str:
        """Return the language codes of the vocabulary for a message."""
        if not self._codes:
            return "no language codes"
        more = len(self._codes) - MOST_CODES
        shown = ", ".join(self._codes[:MOST_CODES])
        return f"{shown} and {more} more" if more > 0 else shown


def _language_code(text: str) -> tuple[str, str]:
    """Return the language code at the beginning of a text ("" if there is none), and the rest."""
    end = text.find("<<") + 2
    return (text[:end], text[end:]) if text.startswith(">>") and end > 1 else ("", text)


def _from_tokenizer_config(
    values: Mapping[str, Any], vocabulary: Mapping[str, int], name: str
) -> dict[str, Any]:
    """Return the settings in a tokenizer_config.json.

    Args:
        values: Its content.
        vocabulary: The content of vocab.json; a special token that it lacks gets the next id.
        name: Its name in error messages.

    Raises:
        InputError: A value is damaged, or changes the ids in a way that this library lacks.
    """
    for key in ("sp_model_kwargs", "split_special_tokens"):
        if values.get(key):
            raise InputError(f"{name}: {key}={values[key]!r:.60} is not supported; remove it")
    try:
        settings: dict[str, Any] = {
            key: _content(values[key])
            for key in ("eos_token", "unk_token", "pad_token")
            if values.get(key) is not None
        }
        settings["clean_up_spaces"] = bool(values.get("clean_up_tokenization_spaces"))
        own = {settings.get(f"{key}_token", DEFAULTS[f"{key}_token"]) for key in ("eos", "unk")}
        own.add(settings.get("pad_token", DEFAULTS["pad_token"]))
        added, special = {}, []
        for token_id, token in values.get("added_tokens_decoder", {}).items():
            text = _content(token)
            if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
                raise InputError(
                    f"{name}: the token {text!r:.60} has lstrip, rstrip or single_word, which are "
                    "not supported; remove them"
                )
            if text not in own:
                added[text] = int(token_id)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = values.get(key) or ()
            for token in tokens.values() if isinstance(tokens, Mapping) else tokens:
                text, known = _content(token), {**vocabulary, **added}
                if text not in own:
                    added.setdefault(text, known.get(text, len(known)))
                    special.append(text)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: is damaged ({error!r:.80}); copy it again") from error
    return settings | {"added_tokens": added, "special_tokens": special}


def _content(token: str | Mapping[str, Any]) -> str:
    """Return the text of a token of tokenizer_config.json, which may be an object."""
    text = token if isinstance(token, str) else token["content"]
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no token")
    return text
