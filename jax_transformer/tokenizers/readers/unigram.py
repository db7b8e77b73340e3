"""A sentencepiece model alone: the tokenizers of T5 and mBART-50 where they have no tokenizer.json.

The ids and the decoded text are those of T5Tokenizer and MBart50Tokenizer in transformers 5.23,
which split text by the library tokenizers, with the pieces and the normalisation of the model.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    T5_MODEL,
    normalization_map,
    read_model,
)
from jax_transformer.tokenizers.segmenters import MARK, LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import DEFAULTS, Tokenizer

UNIGRAM = "sentencepiece_unigram"  # the kind
FILES = {"t5": T5_MODEL, "mbart_50": MBART_MODEL}
_SETTINGS = {
    **DEFAULTS,
    "rule": None,
    "special_tokens": [],
    "more_tokens": [],
    "mask_token": None,
}


def read_unigram(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in a sentencepiece model.

    The settings are those of `Tokenizer.build`, and `rule`: "t5", where the ids are those of the
    model, or "mbart_50", where they are one above; `more_tokens`: tokens whose ids follow;
    `special_tokens`: those that are found in a line; `mask_token`: the one of them that includes
    the space before it.
    """
    values = _SETTINGS | settings
    file = FILES.get(values["rule"])
    if set(contents) != {file}:
        raise InputError(f"{name}: a tokenizer of this kind is {' or '.join(FILES.values())} alone")
    content, is_t5 = contents[file], values["rule"] == "t5"
    model = read_model(content, f"{name}/{file}")
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    unk_id = model.unk_id()
    if not is_t5:
        pieces, unk_id = [*((token, 0.0) for token in FAIRSEQ), *pieces[3:]], 3
    pieces += [(token, 0.0) for token in values["more_tokens"]]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id, byte_fallback=False))
    characters = normalization_map(content, f"{name}/{file}")
    steps = [normalizers.Precompiled(characters)] if characters else []
    split = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
    if is_t5:
        split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    else:
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    library.pre_tokenizer = split
    library.decoder = decoders.Metaspace(replacement=MARK, prepend_scheme="always")
    library.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, lstrip=token == values["mask_token"])
            for token in values["special_tokens"]
        ]
    )
    segmenter = LibrarySegmenter(library)
    return Tokenizer.build(UNIGRAM, contents, settings, name, (segmenter, segmenter), _SETTINGS)
