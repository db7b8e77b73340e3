"""A tokenizer.json of the `tokenizers` library, with special ids around each line.

The file's own template is not used: it may hold the language that it was saved with. The ids before
and after the text of a source and of a target are settings, or follow from the languages.
"""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tokenizers
from jaxtyping import Integer

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.languages import Languages
from jax_transformer.tokenizers.storage import check_settings
from jax_transformer.tokenizers.tokenizer import LineError, clean_up_spaces

# Ids that a vocabulary may have: the library behind it takes memory for each, and aborts without.
MOST_IDS = 2**24
TOKENIZER_FILE = "tokenizer.json"
DEFAULTS: dict[str, Any] = {
    "pad_id": None,
    "bos_id": None,
    "eos_id": None,
    "unk_id": None,
    "source_prefix": [],
    "source_suffix": [],
    "target_prefix": [],
    "target_suffix": [],
    "clean_up_spaces": False,
    "vocab_size": None,
    "languages": None,
}
AFFIXES = ("source_prefix", "source_suffix", "target_prefix", "target_suffix")
# The usual names of special tokens, the most frequent name first.
USUAL_NAMES = {
    "pad_id": ("<pad>", "[PAD]", "<|pad|>", "<PAD>"),
    "bos_id": ("<s>", "<bos>", "[BOS]", "[CLS]", "<|startoftext|>"),
    "eos_id": ("</s>", "<eos>", "[EOS]", "[SEP]", "<|endoftext|>"),
    "unk_id": ("<unk>", "[UNK]", "<|unk|>", "<UNK>"),
}


class TokenizerJson:
    """The `Tokenizer` of a tokenizer.json.

    Special tokens in a line, as `</s>`, become special ids, as in transformers.

    Attributes:
        pad_id: Id of padding.
        bos_id: Id that the decoder reads before the first token of a target.
        eos_id: Id that ends every target.
        unk_id: Id of what the vocabulary lacks.
        languages: The language codes that it knows and is set to; None if it has none.
    """

    kind = "tokenizer_json"
    DEFAULTS: ClassVar[Mapping[str, Any]] = DEFAULTS

    def __init__(self, content: bytes, settings: Mapping[str, Any], name: str) -> None:
        """Read the file.

        Args:
            content: The file.
            settings: Values that differ from `DEFAULTS`: the special ids, all of which must be
                given, and the ids before (prefix) and after (suffix) the text of each line, or the
                languages (`Languages.to_json`) that decide them. `vocab_size` is the number of ids
                of the model: larger than the file's where the model's table is padded; smaller
                where it lacks the file's last special tokens.
            name: The name of the file in error messages.

        Raises:
            InputError: The file is damaged, or an id is not in its vocabulary.
        """
        self._contents = {TOKENIZER_FILE: content}
        self._set_up(parse(content, name), settings, name)

    def _set_up(
        self, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], name: str
    ) -> None:
        """Set every attribute but the contents."""
        self._name = name
        self._settings = check_settings(settings, self.DEFAULTS, name)
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._vocab_size = self._settings["vocab_size"] or size
        self._lacks_tokens = self._vocab_size < size
        special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        # A damaged file may name ids so high that no set holds all between.
        beyond = range(self._vocab_size, size)
        if len(beyond) > len(special) or not special.issuperset(beyond):
            raise InputError(
                f"{name}: has {size} ids, but the model {self._vocab_size}; use the tokenizer that "
                "the model was trained with"
            )
        self.languages = None
        if self._settings["languages"] is not None:
            self.languages = Languages.from_json(self._settings["languages"], name)
        given = {key: [self._settings[key]] for key in USUAL_NAMES}
        given |= {key: self._settings[key] for key in AFFIXES}
        given |= {"languages": list(self.languages.ids.values())} if self.languages else {}
        for key, ids in given.items():
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                    raise InputError(
                        f"{name}: {key}={self._settings[key]!r:.60} must be ids of the vocabulary, "
                        f"from 0 to {self._vocab_size - 1}"
                    )
        special_ids = (self._settings[key] for key in USUAL_NAMES)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = special_ids
        if self.languages is not None and self.languages.start_id is not None:
            self.bos_id = self.languages.start_id

    def with_languages(self, languages: Languages) -> "TokenizerJson":
        """Return this tokenizer with other languages."""
        changed = copy.copy(self)
        settings = self.settings() | {"languages": languages.to_json()}
        changed._set_up(self._tokenizer, settings, self._name)
        return changed

    @classmethod
    def with_usual_names(cls, content: bytes, name: str) -> "TokenizerJson":
        """Read a file whose special tokens have usual names; EOS ends sources and targets.

        Without a BOS token, padding is BOS, as in T5; without a token for what the vocabulary
        lacks, that is padding, too.

        Raises:
            InputError: The file is damaged, or has no token for padding or EOS.
        """
        vocabulary = cls.vocabulary(content, name)
        found = {
            key: next((vocabulary[token] for token in names if token in vocabulary), None)
            for key, names in USUAL_NAMES.items()
        }
        for key, meaning in (("pad_id", "padding"), ("eos_id", "the end of a line")):
            if found[key] is None:
                raise InputError(
                    f"{name}: has no token for {meaning}: none of {', '.join(USUAL_NAMES[key])}; "
                    "add one of them"
                )
        found = {key: found["pad_id"] if i is None else i for key, i in found.items()}
        ends = {"source_suffix": [found["eos_id"]], "target_suffix": [found["eos_id"]]}
        return cls(content, found | ends, name)

    @staticmethod
    def vocabulary(content: bytes, name: str) -> dict[str, int]:
        """Return the id of each token of a file.

        Raises:
            InputError: The file is damaged.
        """
        return parse(content, name).get_vocab(with_added_tokens=True)

    @staticmethod
    def template(content: bytes, name: str) -> tuple[list[str], list[str]]:
        """Return the tokens that a file's own template puts before and after the text of a line.

        Raises:
            InputError: The file is damaged.
        """
        tokenizer = parse(content, name)
        whole = tokenizer.encode("a").tokens
        text = tokenizer.encode("a", add_special_tokens=False).tokens
        starts = [i for i in range(len(whole)) if whole[i : i + len(text)] == text]
        start = starts[0] if starts else 0
        return whole[:start], whole[start + len(text) :]

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "TokenizerJson":
        """Return the tokenizer from what `files` and `settings` returned."""
        if set(contents) != {TOKENIZER_FILE}:
            raise InputError(f"{name}: a tokenizer of this kind is {TOKENIZER_FILE} alone")
        return cls(contents[TOKENIZER_FILE], settings, f"{name}/{TOKENIZER_FILE}")

    def files(self) -> dict[str, bytes]:
        """Return what was read."""
        return dict(self._contents)

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from `DEFAULTS`."""
        return {name: v for name, v in self._settings.items() if v != self.DEFAULTS[name]}

    @property
    def src_vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self._vocab_size

    @property
    def tgt_vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self._vocab_size

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        given = {name: value for name, value in self._settings.items() if value is not None}
        content = {"settings": given, "tokenizer": json.loads(self._contents[TOKENIZER_FILE])}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def encode_source(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line between prefix and suffix; uses every CPU core.

        Args:
            lines: The lines.
            max_length: Most ids of a line; the end of the text of a longer line is cut off.
        """
        return self._encode(lines, "source", max_length)

    def encode_target(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line between prefix and suffix, as `encode_source`."""
        return self._encode(lines, "target", max_length)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> str:
        """Return the text of a target [length], without special tokens."""
        text = self._tokenizer.decode([int(token_id) for token_id in ids])
        return clean_up_spaces(text) if self._settings["clean_up_spaces"] else text

    def source_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token with the space that it begins with; `</s>` as "</s>"."""
        # Decoding removes the space of the first token, so another token comes before each.
        before = self._tokenizer.decode([self.eos_id], skip_special_tokens=False)
        pairs = [[self.eos_id, int(token_id)] for token_id in ids]
        texts = self._tokenizer.decode_batch(pairs, skip_special_tokens=False)
        return [text.removeprefix(before) for text in texts]

    target_texts = source_texts

    def _encode(self, lines: Sequence[str], side: str, max_length: int | None) -> list[list[int]]:
        if self.languages is None:
            prefix, suffix = self._settings[f"{side}_prefix"], self._settings[f"{side}_suffix"]
        else:
            prefix, suffix = self.languages.affixes(side, self.eos_id)
        most = None if max_length is None else max(0, max_length - len(prefix) - len(suffix))
        encodings = self._tokenizer.encode_batch_fast(list(lines), add_special_tokens=False)
        if self._lacks_tokens:
            for row, encoding in enumerate(encodings):
                if max(encoding.ids, default=0) >= self._vocab_size:
                    token = self._tokenizer.id_to_token(max(encoding.ids))
                    raise LineError(row, f"has the token {token!r}, which the model lacks")
        return [[*prefix, *encoding.ids[:most], *suffix] for encoding in encodings]


def parse(content: str | bytes, name: str) -> tokenizers.Tokenizer:
    """Return the tokenizer that a tokenizer.json describes.

    Args:
        content: The file.
        name: The name of the file in error messages.

    Raises:
        InputError: The content is damaged, or an id in it is above `MOST_IDS`.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8, so not a tokenizer file") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's errors and panics have no narrower type
        reason = " ".join(str(error).split())
        raise InputError(f"{name}: damaged tokenizer file ({reason:.200})") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MOST_IDS:
        raise InputError(f"{name}: damaged tokenizer file (an id is {largest})")
    return tokenizer
