"""Two tokenizers: one for sources and one for targets."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.tokenizer import Tokenizer

SPECIAL_IDS = ("pad_id", "bos_id", "eos_id", "unk_id")


class SeparateTokenizers:
    """The `Tokenizer` of a model whose source and target have their own vocabularies.

    Attributes:
        pad_id: Id of padding; like all special ids, the same in both tokenizers.
        bos_id: Id that the decoder reads before the first token of a target.
        eos_id: Id that ends every target.
        unk_id: Id of what the vocabulary lacks.
    """

    kind = "separate"
    languages = None

    def __init__(self, source: Tokenizer, target: Tokenizer) -> None:
        """Combine two tokenizers.

        Args:
            source: Encodes sources.
            target: Encodes and decodes targets.

        Raises:
            InputError: The special ids differ.
        """
        self._source, self._target = source, target
        for name in SPECIAL_IDS:
            ids = getattr(source, name), getattr(target, name)
            if ids[0] != ids[1]:
                raise InputError(
                    f"{name} is {ids[0]} in the source's tokenizer and {ids[1]} in the target's; "
                    "use tokenizers whose special ids agree"
                )
        self.pad_id, self.bos_id = source.pad_id, source.bos_id
        self.eos_id, self.unk_id = source.eos_id, source.unk_id

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "SeparateTokenizers":
        """Return the tokenizers from what `files` and `settings` returned."""
        from jax_transformer.tokenizers import from_description

        if set(settings) != {"source", "target"}:
            raise InputError(f"{name}: separate tokenizers are described as source and target")
        parts = [
            from_description(
                settings[side],
                {
                    file.removeprefix(f"{side}_"): content
                    for file, content in contents.items()
                    if file.startswith(f"{side}_")
                },
                f"{name} ({side})",
            )
            for side in ("source", "target")
        ]
        return cls(*parts)

    def files(self) -> dict[str, bytes]:
        """Return the files of both tokenizers, as source_... and target_..."""
        return {
            f"{side}_{name}": content
            for side, tokenizer in self._sides()
            for name, content in tokenizer.files().items()
        }

    def settings(self) -> dict[str, Any]:
        """Return the descriptions of both tokenizers."""
        from jax_transformer.tokenizers import describe

        return {side: describe(tokenizer) for side, tokenizer in self._sides()}

    @property
    def src_vocab_size(self) -> int:
        """Number of token ids of a source."""
        return self._source.src_vocab_size

    @property
    def tgt_vocab_size(self) -> int:
        """Number of token ids of a target."""
        return self._target.tgt_vocab_size

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        digests = f"{self._source.digest()} {self._target.digest()}"
        return hashlib.sha256(digests.encode()).hexdigest()

    def encode_source(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line by the source's tokenizer."""
        return self._source.encode_source(lines, max_length)

    def encode_target(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line by the target's tokenizer."""
        return self._target.encode_target(lines, max_length)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> str:
        """Return the text of a target [length], without special tokens."""
        return self._target.decode(ids)

    def source_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a source by itself, to show it."""
        return self._source.source_texts(ids)

    def target_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a target by itself, to show it."""
        return self._target.target_texts(ids)

    def _sides(self) -> tuple[tuple[str, Tokenizer], tuple[str, Tokenizer]]:
        return ("source", self._source), ("target", self._target)
