"""Byte-pair encoding on Unicode characters, with one vocabulary for both languages.

Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Integer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.storage import read_files
from jax_transformer.tokenizers.tokenizer_json import MOST_IDS, TOKENIZER_FILE, parse

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # ids 0 to 3, in this order
UNKNOWN_CHARACTER = "\ufffd"  # the text of <unk>


class BytePairTokenizer:
    """The `Tokenizer` that this library trains; create it with `train`, `load` or `from_json`.

    A word includes the space before it and a punctuation mark is a word by itself, so that "Haus."
    and " Haus" share a token. Decoding returns the line in Unicode normal form C with single
    spaces. A character that the training text lacks becomes one `<unk>`. A line may contain the
    text of a special token: "<", ">" and the letters between them are encoded as ordinary text.
    """

    kind = "byte_pair"
    languages = None
    pad_id = 0
    bos_id = 1
    eos_id = 2
    unk_id = 3

    def __init__(self, byte_pair_encoding: tokenizers.Tokenizer) -> None:
        self._tokenizer = byte_pair_encoding
        # Special tokens in a text are then split like any other text. No file stores this setting.
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "BytePairTokenizer":
        """Learn a vocabulary: the special tokens, every character, then frequent pairs.

        The same lines give the same vocabulary. It is smaller than `vocab_size` if the text has
        no pairs left to merge.

        Args:
            lines: The training text in both languages.
            vocab_size: Number of token ids.

        Raises:
            InputError: The text has more distinct characters than `vocab_size` allows, or
                `vocab_size` is above `MOST_IDS`.
        """
        if vocab_size > MOST_IDS:
            raise InputError(f"vocab_size={vocab_size} must be at most {MOST_IDS}")
        tokenizer = _untrained()
        trainer = trainers.BpeTrainer(
            vocab_size=max(vocab_size, 0),
            special_tokens=list(SPECIAL_TOKENS),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        if tokenizer.get_vocab_size() > vocab_size:
            raise InputError(
                f"vocab_size={vocab_size} must be at least {tokenizer.get_vocab_size()} for this "
                "text: its distinct characters and the special tokens"
            )
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "BytePairTokenizer":
        """Read the tokenizer.json in a folder.

        Raises:
            InputError: The file is missing, damaged or not a tokenizer of this library.
        """
        return cls.from_files(read_files(Path(folder), (TOKENIZER_FILE,)), {}, str(folder))

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> "BytePairTokenizer":
        """Read the text that `to_json` returned.

        Args:
            text: The JSON.
            name: The name of the text in error messages.

        Raises:
            InputError: The text is damaged or not a tokenizer of this library.
        """
        tokenizer = parse(text, name)
        ids = sorted(tokenizer.get_vocab().values())
        if _rules(tokenizer) != _rules(_untrained()) or ids != list(range(len(ids))):
            raise InputError(
                f"{name}: not a tokenizer of this library; use the file that training saved"
            )
        return cls(tokenizer)

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "BytePairTokenizer":
        """Read what `files` returned; `settings` is empty.

        Raises:
            InputError: The file is missing, damaged or not a tokenizer of this library.
        """
        if set(contents) != {TOKENIZER_FILE} or settings:
            raise InputError(f"{name}: a tokenizer of this library is {TOKENIZER_FILE} alone")
        return cls.from_json(contents[TOKENIZER_FILE], f"{name}/{TOKENIZER_FILE}")

    def files(self) -> dict[str, bytes]:
        """Return tokenizer.json, in the format of the `tokenizers` library."""
        return {TOKENIZER_FILE: self.to_json().encode()}

    def settings(self) -> dict[str, Any]:
        """Return nothing: tokenizer.json says everything."""
        return {}

    def to_json(self) -> str:
        """Return the tokenizer as JSON, in the format of the `tokenizers` library."""
        return self._tokenizer.to_str()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the special ones included."""
        return self._tokenizer.get_vocab_size()

    @property
    def src_vocab_size(self) -> int:
        """Number of token ids of a source."""
        return self.vocab_size

    @property
    def tgt_vocab_size(self) -> int:
        """Number of token ids of a target."""
        return self.vocab_size

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        canonical = json.dumps(json.loads(self.to_json()), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, line: str) -> list[int]:
        """Return the token ids of a line, without BOS and EOS."""
        return self._tokenizer.encode(line).ids

    def encode_source(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line and EOS; uses every CPU core.

        Args:
            lines: The lines.
            max_length: Most ids of a line, EOS included; longer ones are cut before the EOS.
        """
        most = None if max_length is None else max_length - 1
        encodings = self._tokenizer.encode_batch_fast(list(lines))
        return [[*encoding.ids[:most], self.eos_id] for encoding in encodings]

    encode_target = encode_source

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> str:
        """Return the text of token ids, without padding, BOS and EOS; `<unk>` becomes U+FFFD.

        Args:
            ids: Token ids of one line [length]. Tokens after an EOS are decoded too: the caller
                cuts them off.
        """
        specials = (self.pad_id, self.bos_id, self.eos_id)
        kept = [int(token_id) for token_id in ids if token_id not in specials]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def words(self, text: str) -> list[str]:
        """Return the words of a text, each of which is encoded by itself; spaces begin a word."""
        pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [word for word, _ in pieces]

    def source_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token with the space that it begins with; `<s>` as "<s>"."""
        # Decoding removes the space of the first token, so another token comes before each.
        return [
            SPECIAL_TOKENS[token_id]
            if token_id < len(SPECIAL_TOKENS)
            else self.decode([self.unk_id, token_id]).removeprefix(UNKNOWN_CHARACTER)
            for token_id in map(int, ids)
        ]

    target_texts = source_texts


def _untrained() -> tokenizers.Tokenizer:
    """Return a tokenizer with the rules that split and join lines and only the special tokens."""
    unknown = SPECIAL_TOKENS[BytePairTokenizer.unk_id]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=unknown))
    # Whitespace is what str.split() splits at. A space marks the beginning of a word, because
    # normalised text has spaces nowhere else; the usual mark "▁" may occur in a text.
    whitespace = tokenizers.Regex(r"[\s\x1c-\x1f]+")
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(whitespace, " "),
            normalizers.Strip(),
            normalizers.Prepend(" "),
        ]
    )
    word_or_symbol = tokenizers.Regex(r" ?(?:[^ \p{P}\p{S}]+|[\p{P}\p{S}])")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(word_or_symbol, "isolated")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(unknown, UNKNOWN_CHARACTER),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _rules(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return everything that a tokenizer file contains except the vocabulary and its merges."""
    rules = json.loads(tokenizer.to_str())
    model = rules.pop("model")
    return rules | {name: model[name] for name in model if name not in ("vocab", "merges")}
