"""What training and translation ask of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer

from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from jax_transformer.tokenizers.languages import Languages

_SPACES = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class LineError(InputError):
    """A line cannot be a source of a model.

    Attributes:
        row: Index of the line among the lines that were to be encoded.
        fault: What is wrong with it.
    """

    def __init__(self, row: int, fault: str) -> None:
        """Name the line by its number, counted from 1."""
        super().__init__(f"line {row + 1} {fault}")
        self.row, self.fault = row, fault


@runtime_checkable
class Tokenizer(Protocol):
    """Text to the ids of a source or a target, and the ids of a target to text.

    Source and target have one vocabulary or two; the special ids are the same in both.

    Attributes:
        kind: Name of the class in `TOKENIZERS`.
        pad_id: Id of padding.
        bos_id: Id that the decoder reads before the first token of a target (BOS).
        eos_id: Id that ends every target (EOS).
        unk_id: Id of what the vocabulary lacks.
        languages: The language codes that it knows and is set to; None if it has none. One that
            has languages has a method `with_languages`, which returns it with others.
    """

    kind: str
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    languages: "Languages | None"

    @property
    def src_vocab_size(self) -> int:
        """Number of token ids of a source, the special ones included."""

    @property
    def tgt_vocab_size(self) -> int:
        """Number of token ids of a target, the special ones included."""

    def encode_source(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line as the encoder reads them: with EOS and other special ids.

        Args:
            lines: The lines.
            max_length: Most ids of a line. Of a longer line the special ids stay, and the end of
                the text is cut off.

        Raises:
            LineError: A line cannot be a source of this model.
        """

    def encode_target(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line as the decoder predicts them: without BOS, with EOS.

        Arguments and errors are those of `encode_source`.
        """

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> str:
        """Return the text of a target [length], without special tokens."""

    def source_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a source by itself, to show it."""

    def target_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a target by itself, to show it."""

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""

    def files(self) -> dict[str, bytes]:
        """Return the content of the tokenizer's files by name."""

    def settings(self) -> dict[str, Any]:
        """Return what `from_files` needs beside the files, ready for JSON."""

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "Tokenizer":
        """Return the tokenizer from what `files` and `settings` returned.

        Args:
            contents: The files by name.
            settings: The settings.
            name: What contains the files, for error messages.

        Raises:
            InputError: A file is missing, damaged or not from this kind of tokenizer.
        """


def clean_up_spaces(text: str) -> str:
    """Remove the spaces before punctuation, as `clean_up_tokenization_spaces` of transformers."""
    for before, after in _SPACES:
        text = text.replace(before, after)
    return text
