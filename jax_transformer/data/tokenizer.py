"""Byte-pair encoding on Unicode characters: one vocabulary for both languages.

Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Integer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jax_transformer.errors import InputError

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # ids 0 to 3, in this order
UNKNOWN_CHARACTER = "\ufffd"  # what <unk> is decoded to


class Tokenizer:
    """Turns a line into token ids and back; made by `train` or `load`.

    A word carries the space before it, punctuation stands alone, so "Haus." shares the token of
    " Haus" and decoding gives back the line, in normal form C and with single spaces. A character
    that the training text lacks becomes one `<unk>`. Text that looks like a special token is
    text: "<", ">" and what is between them are always tokens of their own.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    unk_id = 3

    def __init__(self, byte_pair_encoding: tokenizers.Tokenizer) -> None:
        self._tokenizer = byte_pair_encoding
        # Special tokens in a text are then split like any other text; no file keeps this setting.
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a vocabulary: the special tokens, every character, then frequent pairs.

        The same lines give the same vocabulary. It may stay smaller than asked for where the
        text has nothing left to merge.

        Args:
            lines: The training text, both languages.
            vocab_size: Number of token ids wanted.

        Raises:
            InputError: The text's characters alone exceed `vocab_size`.
        """
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
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            InputError: The file is missing, damaged or not a tokenizer of this library.
        """
        name = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"{name}: {error.strerror}; name a tokenizer file") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: not UTF-8, so not a tokenizer file") from error
        return cls.from_json(text, name)

    @classmethod
    def from_json(cls, text: str, name: str) -> "Tokenizer":
        """Read what `to_json` returned.

        Args:
            text: The JSON.
            name: What an error calls it.

        Raises:
            InputError: The text is damaged or not a tokenizer of this library.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's own errors, and its panics, are no narrower
            reason = " ".join(str(error).split())
            raise InputError(f"{name}: damaged tokenizer file ({reason})") from error
        ids = sorted(tokenizer.get_vocab().values())
        if _rules(tokenizer) != _rules(_untrained()) or ids != list(range(len(ids))):
            raise InputError(f"{name}: foreign tokenizer file; name one that training has saved")
        return cls(tokenizer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as one JSON file, in the format of the `tokenizers` library."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Return the tokenizer as JSON, in the format of the `tokenizers` library."""
        return self._tokenizer.to_str()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the special ones included."""
        return self._tokenizer.get_vocab_size()

    def digest(self) -> str:
        """Return the sha256 of everything that decides what a line becomes, as 64 hex digits."""
        canonical = json.dumps(json.loads(self.to_json()), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, line: str) -> list[int]:
        """Return the token ids of a line, without begin and end."""
        return self._tokenizer.encode(line).ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each line, without begin and end, using every core."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(lines))]

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> str:
        """Return the text of token ids: without pad, begin and end, `<unk>` shown as U+FFFD.

        Args:
            ids: Token ids of one line [length]; an end among them ends nothing, the caller cuts.
        """
        specials = (self.pad_id, self.bos_id, self.eos_id)
        kept = [int(token_id) for token_id in ids if token_id not in specials]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def _untrained() -> tokenizers.Tokenizer:
    """Return the rules by which lines are split and joined, the special tokens and no others."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[Tokenizer.unk_id]))
    # Whitespace is what str.split() takes for it. A space as the mark of a word's beginning, since
    # normalised text has it nowhere else; the usual "▁" may occur in a text.
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
            decoders.Replace(SPECIAL_TOKENS[Tokenizer.unk_id], UNKNOWN_CHARACTER),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _rules(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return everything that a tokenizer file holds but the vocabulary and its merges."""
    rules = json.loads(tokenizer.to_str())
    model = rules.pop("model")
    return rules | {name: model[name] for name in model if name not in ("vocab", "merges")}
