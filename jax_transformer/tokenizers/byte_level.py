"""vocab.json and merges.txt: byte-level byte-pair encoding, as BART and Blenderbot have it.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". The ids and the decoded
text are those of RobertaTokenizer and BlenderbotTokenizer in transformers 5.23.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.sentencepiece_model import read_vocabulary
from jax_transformer.tokenizers.tokenizer_json import DEFAULTS, TokenizerJson

VOCABULARY = "vocab.json"
MERGES = "merges.txt"
FILES = (VOCABULARY, MERGES)


class ByteLevelTokenizer(TokenizerJson):
    """The `Tokenizer` of vocab.json and merges.txt; the rest is as for `TokenizerJson`."""

    kind = "byte_level"
    DEFAULTS: ClassVar[Mapping[str, Any]] = DEFAULTS | {
        "add_prefix_space": False,
        "special_tokens": [],
        "mask_token": None,
    }

    def __init__(
        self, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> None:
        """Read the files.

        Args:
            contents: The files by name.
            settings: As for `TokenizerJson`; `add_prefix_space`: whether a line that begins with
                no space gets one; `special_tokens`: those that are found in a line, of which the
                vocabulary need not have all; `mask_token`: the one of them that includes the space
                before it.
            name: What contains the files, for error messages.

        Raises:
            InputError: A file is missing or damaged, or an id is not in the vocabulary.
        """
        if set(contents) != set(FILES):
            raise InputError(f"{name}: a tokenizer of this kind is {' and '.join(FILES)}")
        self._contents = dict(contents)
        given = self.DEFAULTS | settings
        vocabulary = read_vocabulary(contents[VOCABULARY], f"{name}/{VOCABULARY}")
        merges = _read_merges(contents[MERGES], f"{name}/{MERGES}")
        tokenizer = _tokenizer(vocabulary, merges, f"{name}/{MERGES}", given["add_prefix_space"])
        mask = given["mask_token"]
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, lstrip=token == mask)
                for token in given["special_tokens"]
            ]
        )
        self._set_up(tokenizer, settings, name)

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "ByteLevelTokenizer":
        """Return the tokenizer from what `files` and `settings` returned."""
        return cls(contents, settings, name)

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        content = {
            "settings": self.settings(),
            "vocabulary": json.loads(self._contents[VOCABULARY]),
            "merges": self._contents[MERGES].decode(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tokenizer(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], name: str, prefix_space: bool
) -> tokenizers.Tokenizer:
    """Return the tokenizer as transformers builds it.

    Raises:
        InputError: The merges are not those of the vocabulary.
    """
    try:
        model = models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="")
    except Exception as error:  # the library has no narrower type
        raise InputError(f"{name}: does not belong to {VOCABULARY} ({error!s:.80})") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_merges(content: bytes, name: str) -> list[tuple[str, str]]:
    """Return the pairs of a merges.txt in order.

    Raises:
        InputError: A line is no pair.
    """
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8; copy the file again") from error
    pairs = []
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r")
        if line and not line.startswith("#version"):
            pair = line.split(" ")
            if len(pair) != 2:
                raise InputError(f"{name}:{number}: {line[:40]!r} is no pair; copy the file again")
            pairs.append((pair[0], pair[1]))
    return pairs
