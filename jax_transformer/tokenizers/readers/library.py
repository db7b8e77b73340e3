"""Formats that the library `tokenizers` splits: tokenizer.json, byte-level BPE, unigram models.

The template of a tokenizer.json is not used: it may hold the language that it was saved with. The
ids before and after the text of a line are settings, or follow from the languages.

Byte-level byte-pair encoding is that of Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners", in a vocab.json and a merges.txt, as BART and Blenderbot have it. T5 and
mBART-50 may have a sentencepiece model alone. Ids and text are those of RobertaTokenizer,
BlenderbotTokenizer, T5Tokenizer and MBart50Tokenizer in transformers 5.23.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.limits import check_tokenizer_json, check_tokens
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    MERGES,
    T5_MODEL,
    TOKENIZER_FILE,
    VOCABULARY,
    read_model,
    read_normalizer,
    read_vocabulary,
)
from jax_transformer.tokenizers.segmenters import MARK, LibrarySegmenter, library_faults
from jax_transformer.tokenizers.tokenizer import DEFAULTS, Tokenizer

TOKENIZER_JSON, BYTE_LEVEL, UNIGRAM = "tokenizer_json", "byte_level", "sentencepiece_unigram"
UNIGRAM_FILES = {"t5": T5_MODEL, "mbart_50": MBART_MODEL}  # by the rule
# Ids that a vocabulary may have: the library takes memory for each, and aborts without.
MOST_IDS = 2**24
# The usual names of special tokens, the most frequent name first.
USUAL_NAMES = {
    "pad_id": ("<pad>", "[PAD]", "<|pad|>", "<PAD>"),
    "bos_id": ("<s>", "<bos>", "[BOS]", "[CLS]", "<|startoftext|>"),
    "eos_id": ("</s>", "<eos>", "[EOS]", "[SEP]", "<|endoftext|>"),
    "unk_id": ("<unk>", "[UNK]", "<|unk|>", "<UNK>"),
}


def read_library(
    kind: str, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in files of a kind; other arguments are those of `Tokenizer.build`."""
    library = library_of(kind, contents, settings, name)
    return Tokenizer.build(kind, contents, settings, name, (LibrarySegmenter(library),) * 2)


def library_of(
    kind: str, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> tokenizers.Tokenizer:
    """Return the library's tokenizer in files of a kind."""
    values = DEFAULTS | settings
    files = {
        TOKENIZER_JSON: [TOKENIZER_FILE],
        BYTE_LEVEL: [VOCABULARY, MERGES],
        UNIGRAM: [UNIGRAM_FILES.get(str(values["rule"]), " or ".join(UNIGRAM_FILES.values()))],
    }[kind]
    if set(contents) != set(files):
        raise InputError(f"{name}: a tokenizer of this kind is {' and '.join(files)}")
    read = [contents[file] for file in files]
    paths = [f"{name}/{file}" for file in files]
    if kind == TOKENIZER_JSON:
        return parse(*read, *paths)
    special, mask = values["special_tokens"], values["mask_token"]
    if kind == BYTE_LEVEL:
        library = _byte_level(read, paths, values["add_prefix_space"])
    else:
        library = _unigram(*read, *paths, values)
        special = [token for token in special if library.token_to_id(token) is not None]
    library.add_special_tokens(
        [AddedToken(token, special=True, lstrip=token == mask) for token in special]
    )
    return library


def _byte_level(
    contents: Sequence[bytes], names: Sequence[str], add_prefix_space: bool
) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a vocab.json and a merges.txt."""
    vocabulary = read_vocabulary(contents[0], names[0])
    merges = _read_merges(contents[1], names[1])
    with library_faults(f"{names[1]}: does not belong to {VOCABULARY}"):
        model = models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    library.decoder = decoders.ByteLevel()
    return library


def _read_merges(content: bytes, name: str) -> list[tuple[str, str]]:
    """Return the pairs of a merges.txt in order."""
    pairs = []
    for number, line in enumerate(utf_8(content, name).split("\n"), start=1):
        line = line.rstrip("\r")
        if line and not line.startswith("#version"):
            pair = tuple(line.split(" "))
            if len(pair) != 2:
                raise InputError(f"{name}:{number}: {line[:40]!r} is not a pair; copy it again")
            pairs.append(pair)
    return pairs


def _unigram(content: bytes, name: str, values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a sentencepiece model.

    The ids are those of the model (rule "t5") or one above (rule "mbart_50"); those of
    `more_tokens` follow.
    """
    model, is_t5 = read_model(content, name), values["rule"] == "t5"
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    unk_id = model.unk_id()
    if not is_t5:
        pieces, unk_id = [*((token, 0.0) for token in FAIRSEQ), *pieces[3:]], 3
    check_tokens(values["more_tokens"], name)  # sentencepiece has checked its own
    pieces += [(token, 0.0) for token in values["more_tokens"]]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id, byte_fallback=False))
    steps = read_normalizer(content, name)
    split = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
    if is_t5:
        split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    else:
        steps.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    library.normalizer = normalizers.Sequence(steps)
    library.pre_tokenizer = split
    library.decoder = decoders.Metaspace(replacement=MARK, prepend_scheme="always")
    return library


def read_usual_names(content: bytes, name: str) -> Tokenizer:
    """Read a tokenizer.json whose special tokens have usual names; EOS ends sources and targets.

    Where it has no BOS or no token for what the vocabulary lacks, padding is this, as in T5.
    """
    segmenter = LibrarySegmenter(parse(content, name))
    vocabulary = segmenter.library.get_vocab(with_added_tokens=True)
    ids = {
        key: next((vocabulary[token] for token in names if token in vocabulary), None)
        for key, names in USUAL_NAMES.items()
    }
    for key, meaning in (("pad_id", "padding"), ("eos_id", "the end of a line")):
        if ids[key] is None:
            wanted = ", ".join(USUAL_NAMES[key])
            raise InputError(f"{name}: has no token for {meaning}: none of {wanted}; add one")
    settings = {key: ids["pad_id"] if i is None else i for key, i in ids.items()}
    settings |= {"source_suffix": [ids["eos_id"]], "target_suffix": [ids["eos_id"]]}
    contents = {TOKENIZER_FILE: content}
    return Tokenizer.build(TOKENIZER_JSON, contents, settings, name, (segmenter, segmenter))


def utf_8(content: bytes, name: str) -> str:
    """Return the text of a file."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8, so not a tokenizer file") from error


def template(library: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """Return the tokens that a file's own template puts before and after the text of a line."""
    whole = library.encode("a").tokens
    text = library.encode("a", add_special_tokens=False).tokens
    starts = [i for i in range(len(whole)) if whole[i : i + len(text)] == text]
    start = starts[0] if starts else 0
    return whole[:start], whole[start + len(text) :]


def parse(content: str | bytes, name: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer that a tokenizer.json describes."""
    text = content if isinstance(content, str) else utf_8(content, name)
    check_tokenizer_json(text, name)
    with library_faults(f"{name}: damaged tokenizer file"):
        library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    largest = max(library.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MOST_IDS:
        raise InputError(f"{name}: damaged tokenizer file (an id is {largest})")
    return library


READERS = {
    kind: functools.partial(read_library, kind) for kind in (TOKENIZER_JSON, BYTE_LEVEL, UNIGRAM)
}
