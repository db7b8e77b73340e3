"""The tokenizer of a model: lines to the ids of a source or a target, and ids to text."""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from jaxtyping import Array, Integer

from jax_transformer.config import SPECIAL_IDS
from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.reading import json_digest
from jax_transformer.tokenizers.segmenters import MARK, LineError, Segmenter

SideName = Literal["source", "target"]
TOKENIZER_IDS = (*SPECIAL_IDS, "unk_id")
AFFIXES = ("source_prefix", "source_suffix", "target_prefix", "target_suffix")
# The settings of all kinds, and what an absent one means: the special ids; the ids before (prefix)
# and after (suffix) each line, or the languages that decide them; the size of the model's tables
# where it is not the tokenizer's; and from "class_name" on what the readers use.
DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(TOKENIZER_IDS),
    **{key: [] for key in AFFIXES},
    "clean_up_spaces": False,
    "vocab_size": None,
    "tgt_vocab_size": None,
    "languages": None,
    "class_name": None,
    "rule": None,
    "tokens": [],
    "more_tokens": [],
    "special_tokens": {},
    "options": {},
    "added_tokens": {},
    "ordinary_tokens": [],
}
SHOWN = 6  # language codes in a message
CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


@dataclasses.dataclass(frozen=True)
class Languages:
    """The language codes that a tokenizer knows, which it is set to, and where they stand."""

    ids: dict[str, int]  # of each code, for example {"de_DE": 250003}
    # Where the code of a line's language is: "before" the text, which EOS ends (mBART-50, M2M100,
    # NLLB), or "after" the EOS (mBART, legacy NLLB).
    placement: Literal["before", "after"]
    # Whether the code of the target is the first decoder input (mBART); otherwise it is the first
    # token that the decoder must generate.
    starts: bool = False
    source: str | None = None  # the code of the sources, if it is known
    target: str | None = None

    def __post_init__(self) -> None:
        if not {self.source, self.target} - {None} <= self.ids.keys():
            raise ValueError("a language has no code")

    def changed(self, source: Any, target: Any) -> "Languages":
        """Return these languages with other codes of sources and targets; None keeps a code."""
        # A JSON file may have a number or a list in the place of a code.
        source = self.source if source is None else str(source)
        target = self.target if target is None else str(target)
        for side, code in (("source", source), ("target", target)):
            if code is not None and code not in self.ids:
                near = difflib.get_close_matches(code, self.ids, SHOWN, cutoff=0.4)
                shown = ", ".join(near or list(self.ids)[:SHOWN])
                raise InputError(
                    f"{side}_lang={code!r:.40} is none of the model's {len(self.ids)} "
                    f"language codes, such as {shown}"
                )
        return dataclasses.replace(self, source=source, target=target)

    def affixes(self, side: SideName, eos_id: int) -> tuple[list[int], list[int]]:
        """Return the ids before and after the text of a line."""
        code = self.ids[self.known(side)]
        return ([code], [eos_id]) if self.placement == "before" else ([], [eos_id, code])

    def known(self, side: SideName) -> str:
        """Return the code of a side; refuse a side whose code is not known."""
        code = getattr(self, side)
        if code is None:
            raise InputError(
                f"the model needs the language of its {side}s: name its code by --{side}-lang (in "
                f"Python {side}_lang), such as {', '.join(list(self.ids)[:SHOWN])}"
            )
        return code


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """What encodes and decodes the sources, or the targets."""

    segmenter: Segmenter
    prefix: list[int]  # ids before the text of a line, if there are no languages
    suffix: list[int]
    # Ids of the model: more than the segmenter's where the model's table is padded; fewer where it
    # lacks the last special tokens.
    vocab_size: int
    clean_up_spaces: bool  # whether decoding removes the spaces before punctuation
    languages: Languages | None  # decide what is before and after the text


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to the ids of a source or a target, and the ids of a target to text.

    Special tokens in a line (for example `</s>`) become special ids, as in transformers, except in
    the byte pairs that this library trains. Source and target have one vocabulary or two, with the
    same special ids.

    Attributes:
        kind: The format of its files, a name in `formats.READERS`.
        contents: The content of its files by name.
        settings: What its reader needs besides the files, ready for JSON.
        pad_id: Id of padding.
        bos_id: Id that the decoder reads before the first token of a target (BOS).
        eos_id: Id that ends every target (EOS).
        unk_id: Id of what the vocabulary lacks.
        source: What encodes and decodes the sources.
        target: The same of the targets.
        languages: The language codes that it knows and is set to; None if it has none.
    """

    kind: str
    contents: Mapping[str, bytes]
    settings: Mapping[str, Any]
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    source: Side
    target: Side
    languages: Languages | None = None

    def __repr__(self) -> str:
        """Return one line: its files may have megabytes."""
        sizes = f"{self.src_vocab_size:,} source and {self.tgt_vocab_size:,} target ids"
        special = ", ".join(f"{name}={getattr(self, name)}" for name in TOKENIZER_IDS)
        return f"{type(self).__name__}({self.kind!r}: {sizes}, {special})"

    @classmethod
    def build(
        cls,
        kind: str,
        contents: Mapping[str, bytes],
        settings: Mapping[str, Any],
        name: str,
        segmenters: tuple[Segmenter, Segmenter],
    ) -> "Tokenizer":
        """Return a tokenizer, for the readers; `settings` differ from `DEFAULTS`."""
        unknown = sorted(settings.keys() - DEFAULTS.keys())
        if unknown:
            raise InputError(
                f"{name}: the tokenizer has the setting {unknown[0]!r}, which this version does "
                "not know; use the version that wrote it"
            )
        values = {**DEFAULTS, **settings}
        try:
            languages = msgspec.convert(values["languages"], Languages | None)
        except msgspec.ValidationError as error:
            raise InputError(f"{name}: damaged languages ({error}); copy it again") from error
        source_size = values["vocab_size"]
        claimed = source_size, values["tgt_vocab_size"] or source_size
        sizes = [size or side.size for size, side in zip(claimed, segmenters, strict=True)]
        for segmenter, size in zip(segmenters, sizes, strict=True):
            # A damaged file may name ids so high that no set holds all between.
            beyond, special = range(size, segmenter.size), segmenter.special_ids
            if len(beyond) > len(special) or not special.issuperset(beyond):
                raise InputError(
                    f"{name}: has {segmenter.size} ids, but the model {size}; use the tokenizer "
                    "that the model was trained with"
                )
        ids = {key: [values[key]] for key in TOKENIZER_IDS} | {key: values[key] for key in AFFIXES}
        ids |= {"languages": list(languages.ids.values())} if languages else {}
        for key, members in ids.items():
            if any(type(i) is not int or not 0 <= i < min(sizes) for i in members):
                raise InputError(
                    f"{name}: {key}={values[key]!r:.60} must be ids of the vocabulary, from 0 to "
                    f"{min(sizes) - 1}"
                )
        cleans = bool(values["clean_up_spaces"])
        source, target = (
            Side(segmenter, values[f"{side}_prefix"], values[f"{side}_suffix"], size, cleans, None)
            for side, segmenter, size in zip(("source", "target"), segmenters, sizes, strict=True)
        )
        different = {key: value for key, value in values.items() if value != DEFAULTS[key]}
        tokenizer = cls(
            kind=kind,
            contents=dict(contents),
            settings=different,
            pad_id=values["pad_id"],
            bos_id=values["bos_id"],
            eos_id=values["eos_id"],
            unk_id=values["unk_id"],
            source=source,
            target=target,
        )
        return tokenizer if languages is None else tokenizer._set_to(languages)

    def with_languages(self, source: str | None, target: str | None, name: str) -> "Tokenizer":
        """Return this tokenizer with other language codes; None keeps a code."""
        if source is None and target is None:
            return self
        if self.languages is None:
            side, code = ("source", source) if source is not None else ("target", target)
            raise InputError(
                f"{name}: {side}_lang={code!r:.40}: the model has no language codes; leave "
                f"--{side}-lang out"
            )
        try:
            return self._set_to(self.languages.changed(source, target))
        except InputError as error:
            raise InputError(f"{name}: {error}") from error

    def _set_to(self, languages: Languages) -> "Tokenizer":
        starts = languages.starts and languages.target is not None
        return dataclasses.replace(
            self,
            bos_id=languages.ids[languages.target] if starts else self.bos_id,
            languages=languages,
            settings={**self.settings, "languages": dataclasses.asdict(languages)},
            source=dataclasses.replace(self.source, languages=languages),
            target=dataclasses.replace(self.target, languages=languages),
        )

    @property
    def src_vocab_size(self) -> int:
        """Number of token ids of a source, the special ones included."""
        return self.source.vocab_size

    @property
    def tgt_vocab_size(self) -> int:
        """Number of token ids of a target, the special ones included."""
        return self.target.vocab_size

    def affixes(self, side: SideName) -> tuple[list[int], list[int]]:
        """Return the ids before and after the text of each line of a side."""
        described = self.source if side == "source" else self.target
        if described.languages is not None:
            return described.languages.affixes(side, self.eos_id)
        return described.prefix, described.suffix

    def encode_source(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line as the encoder reads them: with EOS and other special ids.

        Args:
            max_length: Most ids of a line. Of a longer line the special ids stay, and the end of
                the text is cut off.

        Raises:
            LineError: A line cannot be a source of this model.
            InputError: The language of the sources is not known.
        """
        return self._encode(lines, self.source, "source", max_length)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None = None
    ) -> list[list[int]]:
        """Return the ids of two texts as one source, as the tokenizer's class joins them.

        Between them is what ends a source, twice where it is RoBERTa's, and nothing in a model
        with languages.

        Args:
            max_length: Most ids of a pair. Of a longer one the end of the longer text is cut off.
        """
        prefix, suffix = self.affixes("source")
        is_roberta = prefix and self.settings.get("class_name") != "BertTokenizer"
        between = [] if self.languages else [*suffix, *suffix] if is_roberta else suffix
        most = len(prefix) + len(between) + len(suffix)
        most = None if max_length is None else max(0, max_length - most)
        texts = [text for pair in pairs for text in pair]
        bare = [row[len(prefix) : len(row) - len(suffix)] for row in self.encode_source(texts)]
        rows = []
        for first, second in zip(bare[::2], bare[1::2], strict=True):
            if most is not None and len(first) + len(second) > most:
                shorter = min(len(first), len(second), most // 2)
                kept = shorter if len(first) <= len(second) else most - shorter
                first, second = first[:kept], second[: most - kept]
            rows.append([*prefix, *first, *between, *second, *suffix])
        return rows

    def encode_target(self, lines: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the ids of each line as the decoder predicts them: without BOS, with EOS."""
        return self._encode(lines, self.target, "target", max_length)

    def _encode(
        self, lines: Sequence[str], side: Side, name: SideName, max_length: int | None
    ) -> list[list[int]]:
        if isinstance(lines, str):
            raise InputError(f"lines={shorten(lines)} must be a list of texts")
        prefix, suffix = self.affixes(name)
        most = None if max_length is None else max(0, max_length - len(prefix) - len(suffix))
        rows = side.segmenter.encode(lines)
        if side.segmenter.size > side.vocab_size:
            for row, ids in enumerate(rows):
                if max(ids, default=0) >= side.vocab_size:
                    token = side.segmenter.token(max(ids))
                    raise LineError(row, f"has the token {token!r}, which the model lacks")
        return [[*prefix, *ids[:most], *suffix] for ids in rows]

    def encode_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text by the tokenizer of the sources, without special ids."""
        return self.source.segmenter.encode(texts)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the sources; None if the vocabulary lacks it."""
        names = token, MARK + token  # sentinels of mT5 are pieces of a sentencepiece model
        found = map(self.source.segmenter.token_id, names)
        return next((i for i in found if i is not None and i < self.src_vocab_size), None)

    def without_padding(self, ids: list[int]) -> list[int]:
        """Return ids without padding that the text spells: no model has learned what it means."""
        if self.pad_id in (self.eos_id, self.unk_id):
            return ids
        return [i for i in ids if i != self.pad_id]

    def decode(self, ids: Sequence[int] | Integer[Array | np.ndarray, "length"]) -> str:
        """Return the text of a target [length], also after an EOS, without special tokens."""
        text = self.target.segmenter.decode([int(token_id) for token_id in ids])
        if self.target.clean_up_spaces:  # as clean_up_tokenization_spaces of transformers
            for spaced in CLEANED:
                text = text.replace(spaced, spaced.strip())
        return text

    def source_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a source by itself, to show it."""
        return self.source.segmenter.texts([int(token_id) for token_id in ids])

    def target_texts(self, ids: Sequence[int] | Integer[np.ndarray, "length"]) -> list[str]:
        """Return the text of each token of a target by itself, to show it."""
        return self.target.segmenter.texts([int(token_id) for token_id in ids])

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        files = {
            name: json.loads(content)
            if name.endswith(".json")
            else hashlib.sha256(content).hexdigest()
            for name, content in self.contents.items()
        }
        if self.kind == "byte_pair":  # one file says everything
            return json_digest(files["tokenizer.json"])
        return json_digest({"kind": self.kind, "settings": self.settings, "files": files})
