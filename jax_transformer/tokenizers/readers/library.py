"""Files that become a `tokenizers.Tokenizer`, and how a class of transformers splits text by them.

The template of a tokenizer.json is not used: it may hold the language that it was saved with. The
ids before and after a line are settings, or follow from the languages. A class of transformers
takes the vocabulary of a tokenizer.json and splits text in its own way: `SPLITTING`.

Byte-level byte-pair encoding is that of Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners", in a vocab.json and a merges.txt. Word pieces are those of Devlin et al. 2019,
"BERT", and bytes those of Xue et al. 2022, "ByT5". Ids and text are those of the classes in
transformers 5.24.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    MERGES,
    T5_MODEL,
    TOKENIZER_FILE,
    VOCABULARY,
    WORD_PIECES,
    character_map,
    check_tokenizer_json,
    check_tokens,
    read_model,
    read_vocabulary,
)
from jax_transformer.tokenizers.segmenters import MARK, LibrarySegmenter, library_faults
from jax_transformer.tokenizers.tokenizer import DEFAULTS, Tokenizer

TOKENIZER_JSON, BYTE_LEVEL, UNIGRAM = "tokenizer_json", "byte_level", "sentencepiece_unigram"
WORD_PIECE, BYTES = "word_piece", "bytes"
# By the kind; those of a unigram model by the rule.
FILES = {TOKENIZER_JSON: (TOKENIZER_FILE,), BYTE_LEVEL: (VOCABULARY, MERGES)}
FILES |= {WORD_PIECE: (WORD_PIECES,), BYTES: ()}
UNIGRAM_FILES = {"t5": T5_MODEL, "pegasus": T5_MODEL, "mbart_50": MBART_MODEL}
# Ids that a vocabulary may have: the library takes memory for each, and aborts without.
MOST_IDS = 2**24
# The usual names of special tokens, the most frequent name first.
USUAL_NAMES = {
    "pad_id": ("<pad>", "[PAD]", "<|pad|>", "<PAD>"),
    "bos_id": ("<s>", "<bos>", "[BOS]", "[CLS]", "<|startoftext|>"),
    "eos_id": ("</s>", "<eos>", "[EOS]", "[SEP]", "<|endoftext|>"),
    "unk_id": ("<unk>", "[UNK]", "<|unk|>", "<UNK>"),
}
BYTES_SPECIAL = ("<pad>", "</s>", "<unk>")  # ids 0 to 2; the bytes follow
PEGASUS_SPECIAL = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103)))


def read_library(
    kind: str, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in files of a kind; other arguments are those of `Tokenizer.build`."""
    library = library_of(kind, contents, settings, name)
    return Tokenizer.build(kind, contents, settings, name, (LibrarySegmenter(library),) * 2)


def library_of(
    kind: str, contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> tokenizers.Tokenizer:
    """Return the library's tokenizer in files of a kind.

    The settings decide how it splits ("rule" and "options"), the vocabulary behind that of a
    sentencepiece model ("more_tokens"), and the tokens that are added ("tokens").
    """
    values = DEFAULTS | settings
    unigram_file = UNIGRAM_FILES.get(str(values["rule"]), " or ".join({*UNIGRAM_FILES.values()}))
    files = FILES.get(kind, (unigram_file,))
    if set(contents) != set(files):
        raise InputError(f"{name}: a tokenizer of this kind is {' and '.join(files) or 'no file'}")
    first = contents[files[0]] if files else b""
    path = "/".join([name, *files[:1]])
    if kind == TOKENIZER_JSON:
        library = parse(first, path)
    elif kind == BYTE_LEVEL:
        library = _byte_level(first, contents[MERGES], name)
    elif kind == UNIGRAM:
        library = _unigram(first, path, values)
    elif kind == WORD_PIECE:
        library = _word_piece(first, path)
    else:
        library = _bytes(values["more_tokens"])
    if values["rule"] is not None:
        with library_faults(f"{path}: is damaged; copy the file again"):
            SPLITTING[values["rule"]](library, values["options"])
    present = {token.content for token in library.get_added_tokens_decoder().values()}
    with library_faults(f"{name}: an added token is damaged"):
        tokens = [AddedToken(**token) for token in values["tokens"]]
        library.add_tokens([token for token in tokens if token.content not in present])
    return library


# How the classes of transformers split text and join tokens: each sets this for a vocabulary, given
# settings of tokenizer_config.json.


def _split_at_marks(library: tokenizers.Tokenizer, _: Mapping[str, Any]) -> None:
    one_space = normalizers.Replace(Regex(" {2,}"), " ")
    library.normalizer = normalizers.Sequence([*_maps_in(library.normalizer), one_space])
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
    library.decoder = decoders.Metaspace(replacement=MARK, prepend_scheme="always")


def _split_t5(library: tokenizers.Tokenizer, _: Mapping[str, Any]) -> None:
    if isinstance(library.model, models.Unigram):  # other models are of another class
        _split_at_marks(library, _)
        library.normalizer = normalizers.Sequence(_maps_in(library.normalizer))
        split = [pre_tokenizers.WhitespaceSplit(), library.pre_tokenizer]
        library.pre_tokenizer = pre_tokenizers.Sequence(split)


def _split_bytes(library: tokenizers.Tokenizer, options: Mapping[str, Any]) -> None:
    library.normalizer = normalizers.Sequence([])
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options["add_prefix_space"])
    library.decoder = decoders.ByteLevel()


def _split_whisper(library: tokenizers.Tokenizer, options: Mapping[str, Any]) -> None:
    _split_bytes(library, options)
    # Timestamps are no special tokens; decoding leaves them out, also where text spells one.
    times = decoders.Replace(Regex(r"<\|\d+\.\d+\|>"), "")
    library.decoder = decoders.Sequence([library.decoder, times])


def _split_bert(library: tokenizers.Tokenizer, options: Mapping[str, Any]) -> None:
    library.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=options["tokenize_chinese_chars"],
        strip_accents=options["strip_accents"],
        lowercase=options["do_lower_case"],
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")


SPLITTING: Mapping[str, Callable[[tokenizers.Tokenizer, Mapping[str, Any]], None]] = {
    "t5": _split_t5,
    **dict.fromkeys(("pegasus", "mbart_50"), _split_at_marks),
    "byte_level": _split_bytes,
    "whisper": _split_whisper,
    "bert": _split_bert,
}  # by the setting "rule"


def _maps_in(step: normalizers.Normalizer | None) -> list[normalizers.Normalizer]:
    """Return the first map of characters of a sentencepiece model among the steps, if any has."""
    if isinstance(step, normalizers.Sequence):
        return [found for inner in step for found in _maps_in(inner)][:1]
    return [step] if isinstance(step, normalizers.Precompiled) else []


def _bytes(more_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of special tokens, the bytes of UTF-8, and more tokens."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    # The characters that stand for bytes in byte-level vocabularies.
    names = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    vocabulary = {token: i for i, token in enumerate([*BYTES_SPECIAL, *names, *more_tokens])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Bytes that are not text are left out.
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\ufffd", "")])
    return library


def _word_piece(content: bytes, name: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a vocab.txt: a token a line, whose number is its id."""
    lines = utf_8(content, name).removesuffix("\n").split("\n")
    vocabulary = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    unknown = next((token for token in USUAL_NAMES["unk_id"] if token in vocabulary), None)
    if unknown is None:
        raise InputError(f"{name}: has no token for what it lacks, such as [UNK]; copy it again")
    return tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))


def _byte_level(vocabulary: bytes, merged: bytes, name: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a vocab.json and a merges.txt: a pair a line."""
    ids, merges = read_vocabulary(vocabulary, f"{name}/{VOCABULARY}"), []
    path = f"{name}/{MERGES}"
    for number, line in enumerate(utf_8(merged, path).split("\n"), start=1):
        line = line.rstrip("\r")
        if line and not line.startswith("#version"):
            pair = tuple(line.split(" "))
            if len(pair) != 2:
                raise InputError(f"{path}:{number}: {line[:40]!r} is not a pair; copy it again")
            merges.append(pair)
    with library_faults(f"{path}: does not belong to {VOCABULARY}"):
        model = models.BPE(ids, merges, continuing_subword_prefix="", end_of_word_suffix="")
    return tokenizers.Tokenizer(model)


def _unigram(content: bytes, name: str, values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a sentencepiece model and of `more_tokens` behind it.

    By the rule "t5" the ids are those of the model; else special tokens of the class precede them.
    """
    model, rule = read_model(content, name), values["rule"]
    pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    if rule != "t5":
        first, replaced = (FAIRSEQ, 3) if rule == "mbart_50" else (PEGASUS_SPECIAL, 2)
        pieces = [*((token, 0.0) for token in first), *pieces[replaced:]]
    unknown = model.id_to_piece(model.unk_id())
    unk_id = next((i for i, (piece, _) in enumerate(pieces) if piece == unknown), None)
    check_tokens(values["more_tokens"], name)  # sentencepiece has checked its own
    pieces += [(token, 0.0) for token in values["more_tokens"]]
    library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id, byte_fallback=False))
    if characters := character_map(content):
        with library_faults(f"{name}: is damaged; copy the file again"):
            library.normalizer = normalizers.Precompiled(characters)
    return library


def read_usual_names(content: bytes, name: str) -> Tokenizer:
    """Read a tokenizer.json whose special tokens have usual names; EOS ends sources and targets.

    Padding stands for an absent BOS or unknown token, as in T5.
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


def template(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a file's own template puts before and after the text of a line."""
    whole = library.encode("a").ids
    text = library.encode("a", add_special_tokens=False).ids
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


READERS = {kind: functools.partial(read_library, kind) for kind in (*FILES, UNIGRAM)}
