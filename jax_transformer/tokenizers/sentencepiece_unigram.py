"""A sentencepiece model alone: the tokenizers of T5 and mBART-50 where they have no tokenizer.json.

The ids and the decoded text are those of T5Tokenizer and MBart50Tokenizer in transformers 5.23,
which split text by the library tokenizers, with the pieces and the normalisation of the model.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.sentencepiece_model import (
    FAIRSEQ,
    MARK,
    normalization_map,
    read_model,
)
from jax_transformer.tokenizers.tokenizer_json import DEFAULTS, TokenizerJson

NAMES = ("spiece.model", "sentencepiece.bpe.model")


class SentencePieceUnigram(TokenizerJson):
    """The `Tokenizer` of a sentencepiece model; the rest is as for `TokenizerJson`."""

    kind = "sentencepiece_unigram"
    DEFAULTS: ClassVar[Mapping[str, Any]] = DEFAULTS | {
        "rule": None,
        "special_tokens": [],
        "more_tokens": [],
        "mask_token": None,
    }

    def __init__(
        self, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> None:
        """Read the file.

        Args:
            contents: The model by its name.
            settings: As for `TokenizerJson`; `rule`: "t5", where the ids are those of the model,
                or "mbart_50", where they are one above; `more_tokens`: tokens whose ids follow;
                `special_tokens`: those that are found in a line; `mask_token`: the one of them
                that includes the space before it.
            name: What contains the file, for error messages.

        Raises:
            InputError: The file is missing or damaged, or an id is not in the vocabulary.
        """
        (file, content), *others = contents.items() if contents else [("", b"")]
        rule = settings.get("rule")
        if others or file not in NAMES or rule not in ("t5", "mbart_50"):
            raise InputError(f"{name}: a tokenizer of this kind is {' or '.join(NAMES)} alone")
        self._contents = dict(contents)
        model = read_model(content, f"{name}/{file}")
        pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
        unk_id = model.unk_id()
        if rule == "mbart_50":
            pieces, unk_id = [*((token, 0.0) for token in FAIRSEQ), *pieces[3:]], 3
        pieces += [(token, 0.0) for token in settings.get("more_tokens", [])]
        tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id, byte_fallback=False))
        characters = normalization_map(content, f"{name}/{file}")
        steps = [normalizers.Precompiled(characters)] if characters else []
        metaspace = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
        if rule == "mbart_50":
            steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
            tokenizer.pre_tokenizer = metaspace
        else:
            split = [pre_tokenizers.WhitespaceSplit(), metaspace]
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
        if steps:
            tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.decoder = decoders.Metaspace(replacement=MARK, prepend_scheme="always")
        mask = settings.get("mask_token")
        tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False, lstrip=token == mask)
                for token in settings.get("special_tokens", [])
            ]
        )
        self._set_up(tokenizer, settings, name)

    @classmethod
    def from_files(
        cls, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
    ) -> "SentencePieceUnigram":
        """Return the tokenizer from what `files` and `settings` returned."""
        return cls(contents, settings, name)

    def digest(self) -> str:
        """Return the sha256 of everything that decides the ids of a line, as 64 hex digits."""
        digest = hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode())
        for content in self._contents.values():
            digest.update(content)
        return digest.hexdigest()
