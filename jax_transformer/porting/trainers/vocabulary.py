"""The vocabulary of a trainer as a tokenizer of lines that its own tools have already split.

None of these programs records in the checkpoint how text becomes tokens (Moses, BPE): a line is
tokens with spaces between, as in the files that the program trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError, naming_the_extra, shorten

if TYPE_CHECKING:
    from jax_transformer.porting.trainers.trainer import TrainerCheckpoint
    from jax_transformer.tokenizers import Tokenizer

SPECIAL = ("pad_id", "bos_id", "eos_id")
MISSING = "cannot be read; copy the file beside the checkpoint"


def word_tokenizer(
    model: TrainerCheckpoint,
    config: TransformerConfig,
    unk_id: Any,
    *,
    source_suffix: Sequence[int],
    any_whitespace: bool = False,
) -> Tokenizer | None:
    """Return the tokenizer of a model's vocabularies, one for both sides where they are equal.

    Tokens lie between spaces, or between `any_whitespace`; `source_suffix` ends every source.
    """
    if model.source_tokens is None or model.target_tokens is None:
        return None
    sides = {"source": model.source_tokens, "target": model.target_tokens}
    sizes = (config.src_vocab_size, config.tgt_vocab_size)
    for (side, tokens), size in zip(sides.items(), sizes, strict=True):
        if len(tokens) != size:
            raise InputError(
                f"the {side} vocabulary has {len(tokens)} tokens, but the model has {size}; use "
                "the vocabulary that it was trained with"
            )
        if type(unk_id) is not int or not 0 <= unk_id < size:
            raise InputError(f"unk_id={shorten(unk_id)} is no id of the {side} vocabulary")
    with naming_the_extra("a vocabulary"):
        from jax_transformer.tokenizers import READERS, separate
    settings: dict[str, Any] = {name: getattr(config, name) for name in SPECIAL}
    special_ids = sorted({*settings.values()})
    settings |= {"unk_id": unk_id, "source_suffix": list(source_suffix)}
    settings["target_suffix"] = [config.eos_id]
    both = []
    for side, tokens in sides.items():
        files = {"tokenizer.json": _tokenizer_json(tokens, unk_id, special_ids, any_whitespace)}
        sized = settings | {"vocab_size": len(tokens)}
        both.append(READERS["tokenizer_json"](files, sized, f"the {side} vocabulary"))
        if model.source_tokens == model.target_tokens:
            return both[0]
    return separate(both[0], both[1])


def _tokenizer_json(
    tokens: Sequence[str], unk_id: int, special_ids: Sequence[int], any_whitespace: bool
) -> bytes:
    """Return the content of a tokenizer.json whose tokens are words between spaces.

    Special tokens are left out of a decoded text; UNK is not one of them and is written out.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    ids = {token: i for i, token in enumerate(tokens)}  # the last of equal ones
    words = Tokenizer(models.WordLevel(ids, unk_token=tokens[unk_id]))
    split = pre_tokenizers.Split(" ", "removed")
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if any_whitespace else split
    specials = (AddedToken(tokens[i], single_word=True, normalized=False) for i in special_ids)
    words.add_special_tokens(list(specials))
    return words.to_str().encode()
