"""The vocabulary of a trainer as a tokenizer of lines that its own tools have already split.

None of these programs records in the checkpoint how text becomes tokens (Moses, BPE): a line is
tokens with spaces between, as in the files that the program trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from jax_transformer.porting.trainers.trainer import Model
    from jax_transformer.tokenizers import Tokenizer

SPECIAL = ("pad_id", "bos_id", "eos_id")


def word_tokenizer(
    model: Model,
    config: TransformerConfig,
    unk_id: int,
    *,
    source_suffix: Sequence[int],
    any_whitespace: bool = False,
) -> Tokenizer | None:
    """Return the tokenizer of a model's vocabularies, one for both sides where they are equal.

    Tokens lie between spaces, or between `any_whitespace`; `source_suffix` ends every source.
    """
    if model.source_tokens is None or model.target_tokens is None:
        return None
    check_sizes(model, config)
    try:
        from jax_transformer.tokenizers import READERS, separate
    except ImportError as error:
        raise InputError("a vocabulary needs tokenizers; install jax-transformer[train]") from error
    settings: dict[str, Any] = {name: getattr(config, name) for name in SPECIAL}
    settings |= {"unk_id": unk_id, "source_suffix": list(source_suffix)}
    settings |= {"target_suffix": [config.eos_id]}
    both = []
    for side, tokens in zip(
        ("source", "target"), (model.source_tokens, model.target_tokens), strict=True
    ):
        special_ids = {settings[name] for name in SPECIAL}
        content = json.dumps(_tokenizer_json(tokens, unk_id, special_ids, any_whitespace)).encode()
        own = settings | {"vocab_size": len(tokens)}
        files = {"tokenizer.json": content}
        both.append(READERS["tokenizer_json"](files, own, f"the {side} vocabulary"))
        if model.source_tokens == model.target_tokens:
            return both[0]
    return separate(*both)


def check_sizes(model: Model, config: TransformerConfig) -> None:
    """Refuse vocabularies of other sizes than the model's tables."""
    sides = {
        "source": (model.source_tokens, config.src_vocab_size),
        "target": (model.target_tokens, config.tgt_vocab_size),
    }
    for side, (tokens, size) in sides.items():
        if len(tokens) != size:
            raise InputError(
                f"the {side} vocabulary has {len(tokens)} tokens, but the model has {size}; use "
                "the vocabulary that it was trained with"
            )


def _tokenizer_json(
    tokens: Sequence[str], unk_id: int, special_ids: Set[int], any_whitespace: bool
) -> Mapping[str, Any]:
    """Return the content of a tokenizer.json whose tokens are words between spaces.

    Special tokens are left out of a decoded text; UNK is not one of them and is written out.
    """
    spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    flags = {"single_word": True, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": tokens[i], "special": True, **flags} for i in sorted(special_ids)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"} if any_whitespace else spaces,
        "model": {
            "type": "WordLevel",
            "vocab": {token: i for i, token in enumerate(tokens)},  # the last of equal ones
            "unk_token": tokens[unk_id],
        },
    }
