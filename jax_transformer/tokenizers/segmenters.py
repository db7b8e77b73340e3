"""The two libraries that split text into the pieces of a vocabulary: tokenizers, sentencepiece.

tokenizers alone would not do: of some letters with several marks (U+FB01 U+0301) it loses marks, it
drops U+0085, and it takes text that spells a control token ("</s>" in full width) for the token.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Literal

import sentencepiece
import tokenizers

from jax_transformer.errors import InputError, one_line, shorten

MARK = "▁"  # what sentencepiece writes for a space
MOST_CODES = 8  # language codes that a message shows


class LineError(InputError):
    """A line, named by its index among the lines to encode, cannot be a source of a model."""

    def __init__(self, row: int, fault: str) -> None:
        super().__init__(f"line {row + 1} {fault}")
        self.fault = fault


def encode_lines(
    encode: Callable[[Sequence[str]], list[list[int]]], lines: Sequence[str]
) -> list[list[int] | LineError]:
    """Return the ids of each line; of one that the tokenizer refuses, the error."""
    try:
        return encode(lines)
    except LineError as error:
        if len(lines) == 1:
            return [error]
        half = len(lines) // 2
        return encode_lines(encode, lines[:half]) + encode_lines(encode, lines[half:])


@contextmanager
def library_faults(message: str) -> Iterator[None]:
    """Turn an error or panic of the library `tokenizers` into one line that begins as given."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's errors and panics have no narrower type
        raise InputError(f"{message} ({one_line(str(error), 200)})") from error


class LibrarySegmenter:
    """A `tokenizers.Tokenizer`; template, truncation, padding, dropout of its file do not act."""

    def __init__(self, library: tokenizers.Tokenizer, left_out: Set[int] = frozenset()) -> None:
        """Wrap a tokenizer; decoding leaves out the ids in `left_out`, else all special tokens."""
        if getattr(library.model, "dropout", None):
            library.model.dropout = None
        self.library, self.left_out = library, left_out
        self.size = 1 + max(library.get_vocab(with_added_tokens=True).values())
        added = library.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self.special_ids = {*self._special}  # a model's table may lack the last of them

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line; uses every CPU core."""
        try:
            with library_faults("the tokenizer cannot split some line"):
                encodings = self.library.encode_batch_fast(list(lines), add_special_tokens=False)
        except InputError:
            for line in lines:
                with library_faults(f"the tokenizer cannot split the line {shorten(line)}"):
                    self.library.encode(line, add_special_tokens=False)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        ids = [token_id for token_id in ids if token_id not in self.left_out]
        with library_faults("the tokenizer cannot join tokens"):
            return self.library.decode(ids, skip_special_tokens=not self.left_out)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token with the space that it begins with; `</s>` as "</s>"."""
        # Decoding removes the space of the first token, so another token comes before each.
        first = min(self.special_ids, default=0)
        pairs = [[first, token_id] for token_id in ids]
        with library_faults("the tokenizer cannot join tokens"):
            before = self.library.decode([first], skip_special_tokens=False)
            texts = self.library.decode_batch(pairs, skip_special_tokens=False)
        return [
            self._special.get(token_id, text.removeprefix(before))
            for token_id, text in zip(ids, texts, strict=True)
        ]

    def token(self, token_id: int) -> str | None:
        """Return the token of an id; None where the vocabulary has a gap."""
        return self.library.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks it."""
        return self.library.token_to_id(token)


class Words:
    """Words that spaces hold apart, in the place of a sentencepiece model."""

    def encode(self, texts: Sequence[str], out_type: type[str]) -> list[list[str]]:
        """Return the words of each text."""
        return [[word for word in text.split(" ") if word] for text in texts]

    def decode_pieces(self, pieces: Sequence[str]) -> str:
        """Return the text of words."""
        return " ".join(pieces)


class SentencePieceSegmenter:
    """A sentencepiece model whose pieces have the ids of another vocabulary.

    Added tokens in a line (for example `</s>`) become their ids, as in transformers. By the rule
    "marian" a text may begin with a language code (for example `>>fra<<`), which is one token. By
    the rule "marian_npz" added tokens in a line are text, and an unknown code is too.
    """

    special_ids: Set[int] = frozenset()

    def __init__(
        self,
        added: Mapping[str, int],
        ordinary: Sequence[str],
        unk_id: int,
        rule: Literal["marian", "marian_npz", "m2m_100", "mbart"],
        model: sentencepiece.SentencePieceProcessor | Words,
        ids: Mapping[str, int],
        joiner: sentencepiece.SentencePieceProcessor | Words,
        is_source: bool = False,
    ) -> None:
        """Set what splits lines into pieces, the ids of pieces, and what joins them.

        Args:
            added: The ids of tokens that are found in a line before it is split into pieces.
            ordinary: Those of `added` that decoding does not leave out.
            unk_id: Id of pieces that `ids` lacks.
            rule: How pieces are joined: by the class of this family in transformers.
            is_source: Whether a language code that the vocabulary lacks is refused.
        """
        self.model, self.ids, self._unk_id, self.rule = model, {**ids, **added}, unk_id, rule
        self.added, self.joiner, self._is_source = added, joiner, is_source
        self._tokens = {i: token for token, i in (*ids.items(), *added.items())}
        self.left_out = {i for token, i in added.items() if token not in ordinary}
        self.size = 1 + max(self._tokens)
        # The longest token first: one may begin with another.
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of each line; uses every CPU core."""
        rows = [self._parts(row, line) for row, line in enumerate(lines)]
        texts = [part for parts in rows for part in parts if isinstance(part, str)]
        pieces = iter(self.model.encode(texts, out_type=str))
        encoded: list[list[int]] = [[] for _ in rows]
        for ids, parts in zip(encoded, rows, strict=True):
            for part in parts:
                if isinstance(part, str):
                    ids += (self.ids.get(piece, self._unk_id) for piece in next(pieces))
                else:
                    ids.append(part)
        return encoded

    def _parts(self, row: int, line: str) -> list[int | str]:
        """Return the ids of added tokens and language codes in a line, and the texts between."""
        parts: list[int | str] = []
        if self.rule == "marian_npz":
            code, after = language_code(line)
            return [self.ids[code], after] if code in self.ids else [line]
        for text in filter(None, self._split(line)):
            if text in self.added:
                parts.append(self.added[text])
                continue
            code, after = language_code(text) if self.rule == "marian" else ("", text)
            if code and self._is_source and not parts and code not in self.ids:
                fault = f"begins with the language code {code[:60]!r}, but the model knows "
                raise LineError(row, fault + self._known_codes())
            if code:
                parts.append(self.ids.get(code, self._unk_id))
            parts.append(after)
        return parts

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        ids = [token_id for token_id in ids if token_id not in self.left_out]
        if self.rule == "marian":
            pieces = [self.token(token_id) for token_id in ids]
            return self.joiner.decode_pieces(pieces).replace(MARK, " ").strip()
        if self.rule == "marian_npz":
            return self.joiner.decode_pieces([self.token(token_id) for token_id in ids])
        if self.rule == "mbart":  # MBartTokenizer uses the library tokenizers
            first, *others = [self._tokens.get(token_id, "") for token_id in ids] or [""]
            return first.replace(MARK, "") + "".join(others).replace(MARK, " ")
        # An id that no token has (M2M100 has made-up words) is "<unk>".
        parts = [
            self.joiner.decode_pieces([self._tokens[token_id] for token_id in part])
            if has_token
            else "<unk>" * len([*part])
            for has_token, part in itertools.groupby(ids, self._tokens.__contains__)
        ]
        return "".join(parts).strip()

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token with the space that it begins with; `</s>` as "</s>"."""
        return [self.token(token_id).replace(MARK, " ") for token_id in ids]

    def token(self, token_id: int) -> str:
        """Return the token of an id; where the vocabulary has a gap, what transformers reads."""
        if token_id in self._tokens:
            return self._tokens[token_id]
        if self.rule == "marian" and 0 <= token_id < self.joiner.get_piece_size():
            return self.joiner.id_to_piece(token_id)
        return self._tokens.get(self._unk_id, "<unk>")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks it."""
        return self.ids.get(token)

    @property
    def codes(self) -> dict[str, int]:
        """The ids of the language codes that a text may begin with, for example of ">>fra<<"."""
        return {token: i for token, i in self.ids.items() if language_code(token) == (token, "")}

    def _known_codes(self) -> str:
        codes = [*self.codes]
        more = len(codes) - MOST_CODES
        shown = ", ".join(codes[:MOST_CODES]) or "no language codes"
        return f"{shown} and {more} more" if more > 0 else shown


Segmenter = LibrarySegmenter | SentencePieceSegmenter


def language_code(text: str) -> tuple[str, str]:
    """Return the language code at the beginning of a text ("" if there is none), and the rest."""
    end = text.find("<<") + 2
    return (text[:end], text[end:]) if text.startswith(">>") and end > 1 else ("", text)
