"""vocab.json and merges.txt: byte-level byte-pair encoding, as BART and Blenderbot have it.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". The ids and the decoded
text are those of RobertaTokenizer and BlenderbotTokenizer in transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.model_files import read_vocabulary
from jax_transformer.tokenizers.segmenters import LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import DEFAULTS, Tokenizer

BYTE_LEVEL = "byte_level"  # the kind
VOCABULARY, MERGES = "vocab.json", "merges.txt"
_SETTINGS = {**DEFAULTS, "add_prefix_space": False, "special_tokens": [], "mask_token": None}


def read_byte_level(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in a vocab.json and a merges.txt.

    The settings are those of `Tokenizer.build`, and `add_prefix_space`: whether a line that begins
    with no space gets one; `special_tokens`: those that are found in a line, of which the
    vocabulary need not have all; `mask_token`: the one of them that includes the space before it.
    """
    if set(contents) != {VOCABULARY, MERGES}:
        raise InputError(f"{name}: a tokenizer of this kind is {VOCABULARY} and {MERGES}")
    values = _SETTINGS | settings
    vocabulary = read_vocabulary(contents[VOCABULARY], f"{name}/{VOCABULARY}")
    merges = _read_merges(contents[MERGES], f"{name}/{MERGES}")
    try:
        model = models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="")
    except Exception as error:  # the library has no narrower type
        fault = f"does not belong to {VOCABULARY} ({error!s:.80})"
        raise InputError(f"{name}/{MERGES}: {fault}") from error
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=values["add_prefix_space"])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [
            AddedToken(token, special=True, lstrip=token == values["mask_token"])
            for token in values["special_tokens"]
        ]
    )
    segmenter = LibrarySegmenter(library)
    return Tokenizer.build(BYTE_LEVEL, contents, settings, name, (segmenter, segmenter), _SETTINGS)


def _read_merges(content: bytes, name: str) -> list[tuple[str, str]]:
    """Return the pairs of a merges.txt in order."""
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
                raise InputError(
                    f"{name}:{number}: {line[:40]!r} is not a pair; copy the file again"
                )
            pairs.append((pair[0], pair[1]))
    return pairs
