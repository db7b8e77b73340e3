"""A tokenizer.json of the `tokenizers` library, with special ids around each line.

The file's own template is not used: it may hold the language that it was saved with. The ids before
and after the text of a source and of a target are settings, or follow from the languages.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.segmenters import LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import Tokenizer

TOKENIZER_JSON = "tokenizer_json"  # the kind
TOKENIZER_FILE = "tokenizer.json"
# Ids that a vocabulary may have: the library behind it takes memory for each, and aborts without.
MOST_IDS = 2**24
# The usual names of special tokens, the most frequent name first.
USUAL_NAMES = {
    "pad_id": ("<pad>", "[PAD]", "<|pad|>", "<PAD>"),
    "bos_id": ("<s>", "<bos>", "[BOS]", "[CLS]", "<|startoftext|>"),
    "eos_id": ("</s>", "<eos>", "[EOS]", "[SEP]", "<|endoftext|>"),
    "unk_id": ("<unk>", "[UNK]", "<|unk|>", "<UNK>"),
}


def read_tokenizer_json(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json; arguments are those of `Tokenizer.build`."""
    if set(contents) != {TOKENIZER_FILE}:
        raise InputError(f"{name}: a tokenizer of this kind is {TOKENIZER_FILE} alone")
    segmenter = LibrarySegmenter(parse(contents[TOKENIZER_FILE], f"{name}/{TOKENIZER_FILE}"))
    name = f"{name}/{TOKENIZER_FILE}"
    return Tokenizer.build(TOKENIZER_JSON, contents, settings, name, (segmenter, segmenter))


def read_usual_names(content: bytes, name: str) -> Tokenizer:
    """Read a tokenizer.json whose special tokens have usual names; EOS ends sources and targets.

    Without a BOS token, padding is BOS, as in T5; without a token for what the vocabulary lacks,
    that is padding, too.
    """
    segmenter = LibrarySegmenter(parse(content, name))
    vocabulary = segmenter.library.get_vocab(with_added_tokens=True)
    ids = {
        key: next((vocabulary[token] for token in names if token in vocabulary), None)
        for key, names in USUAL_NAMES.items()
    }
    for key, meaning in (("pad_id", "padding"), ("eos_id", "the end of a line")):
        if ids[key] is None:
            raise InputError(
                f"{name}: has no token for {meaning}: none of {', '.join(USUAL_NAMES[key])}; "
                "add one of them"
            )
    settings = {key: ids["pad_id"] if i is None else i for key, i in ids.items()}
    settings |= {"source_suffix": [ids["eos_id"]], "target_suffix": [ids["eos_id"]]}
    contents = {TOKENIZER_FILE: content}
    return Tokenizer.build(TOKENIZER_JSON, contents, settings, name, (segmenter, segmenter))


def template(library: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """Return the tokens that a file's own template puts before and after the text of a line."""
    whole = library.encode("a").tokens
    text = library.encode("a", add_special_tokens=False).tokens
    starts = [i for i in range(len(whole)) if whole[i : i + len(text)] == text]
    start = starts[0] if starts else 0
    return whole[:start], whole[start + len(text) :]


def parse(content: str | bytes, name: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer that a tokenizer.json describes."""
    try:
        text = content if isinstance(content, str) else content.decode()
        library = tokenizers.Tokenizer.from_str(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8, so not a tokenizer file") from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's errors and panics have no narrower type
        reason = " ".join(str(error).split())
        raise InputError(f"{name}: damaged tokenizer file ({reason:.200})") from error
    largest = max(library.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MOST_IDS:
        raise InputError(f"{name}: damaged tokenizer file (an id is {largest})")
    return library
