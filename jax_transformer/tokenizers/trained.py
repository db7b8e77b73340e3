"""The tokenizers that this library trains, each with one vocabulary for both languages.

Byte-pair encoding on Unicode characters: Sennrich et al. 2016, "Neural Machine Translation of Rare
Words with Subword Units". The unigram language model of sentencepiece, with the tokens that
denoising needs: Kudo 2018, "Subword Regularization", section 3.2. The tokens library reads the
pieces of both, as transformers does.
"""

import dataclasses
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jax_transformer.config import SPECIAL_IDS
from jax_transformer.errors import InputError, one_line
from jax_transformer.tokenizers.readers.library import TOKENIZER_JSON, parse, read_library
from jax_transformer.tokenizers.readers.model_files import TOKENIZER_FILE
from jax_transformer.tokenizers.segmenters import MARK, LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import Tokenizer

BYTE_PAIR = "byte_pair"  # the kind
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # ids 0 to 3, in this order
BYTE_PAIR_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # ids 4 to 259, of UTF-8
# Invisible characters, except those that change what others look like.
SEEN = r"\p{Join_Control}\p{Variation_Selector}\p{L}\x{E0020}-\x{E007F}"  # tags of emoji
UNSEEN = rf"[\p{{Default_Ignorable_Code_Point}}&&[^{SEEN}]]"
UNKNOWN_CHARACTER = "\ufffd"  # the text of <unk>
UNIGRAM_TOKENS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}  # ids 0 to 2, as in T5
UNIGRAM_IDS = {"pad_id": 0, "bos_id": 0, "eos_id": 1, "unk_id": 2}
LONGEST_LINE = 2**20  # bytes of a line that sentencepiece trains on
THREADS = 16  # of the trainer, whatever the machine: its sums depend on their number


def train_byte_pair(
    lines: Iterable[str], vocab_size: int, *, byte_fallback: bool = False
) -> Tokenizer:
    """Learn a vocabulary: the special tokens, every character, then frequent pairs.

        tokenizer = train_byte_pair([*german_lines, *english_lines], vocab_size=6000)
        rows = tokenizer.encode_source(["ein Haus"])  # lists of ids, with EOS

    A word includes the space before it, and a punctuation mark is a word by itself: "Haus." and
    " Haus" share a token. Decoding returns the line in Unicode normal form C, with single spaces
    and without invisible characters. A character that the training text lacks becomes one `<unk>`.
    The text of a special token in a line is encoded as ordinary text.

    The same lines give the same vocabulary. It is smaller than `vocab_size` if no pairs are left.

    Args:
        lines: Text of both sides of a model that shares its vocabulary, or of one side.
        vocab_size: Most entries, special tokens and bytes included.
        byte_fallback: Whether the vocabulary also has the 256 bytes: a character that the training
            text lacks becomes its bytes in UTF-8, and decoding returns it.

    Returns:
        The tokenizer of both sides.

    Raises:
        InputError: The characters of the text, the special tokens and the bytes are more than
            `vocab_size`.
    """
    library = _untrained(byte_fallback)
    first = [*SPECIAL_TOKENS, *(BYTES if byte_fallback else ())]
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, 0), special_tokens=first, show_progress=False
    )
    library.train_from_iterator(lines, trainer)
    if library.get_vocab_size() > vocab_size:
        more = ", and 256 bytes" if byte_fallback else ""
        raise InputError(
            f"vocab_size={vocab_size} must be at least {library.get_vocab_size()} for this text: "
            f"its distinct characters and the special tokens{more}"
        )
    # The trainer has made special tokens of the bytes, which decoding elsewhere would leave out.
    written = json.loads(library.to_str())
    written["added_tokens"] = written["added_tokens"][: len(SPECIAL_TOKENS)]
    library = tokenizers.Tokenizer.from_str(json.dumps(written))
    return _tokenizer(library, TOKENIZER_FILE)


def read_byte_pair(
    contents: Mapping[str, bytes], settings: Mapping[str, Any], name: str
) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json that this library has written."""
    if set(contents) != {TOKENIZER_FILE} or settings:
        raise InputError(f"{name}: a tokenizer of this library is {TOKENIZER_FILE} alone")
    return parse_byte_pair(contents[TOKENIZER_FILE], f"{name}/{TOKENIZER_FILE}")


def parse_byte_pair(content: str | bytes, name: str) -> Tokenizer:
    """Return the tokenizer in the content of such a file; `name` begins the error messages."""
    library = parse(content, name)
    ids = sorted(library.get_vocab().values())
    byte_fallback = getattr(library.model, "byte_fallback", False)
    known = [_rules(_untrained(byte_fallback, removed)) for removed in (UNSEEN, None)]
    if _rules(library) not in known or ids != list(range(len(ids))):
        raise InputError(
            f"{name}: not a tokenizer of this library; use the file that training saved"
        )
    return _tokenizer(library, name)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the words of a text; each is encoded by itself, and a space begins one."""
    pieces = tokenizer.source.segmenter.library.pre_tokenizer.pre_tokenize_str(text)
    return [word for word, _ in pieces]


def _tokenizer(library: tokenizers.Tokenizer, name: str) -> Tokenizer:
    # Special tokens in a text are then split like any other text. No file stores this setting.
    library.encode_special_tokens = True
    contents = {TOKENIZER_FILE: library.to_str().encode()}
    left_out = {BYTE_PAIR_IDS[key] for key in SPECIAL_IDS}
    segmenter = LibrarySegmenter(library, left_out)
    settings = BYTE_PAIR_IDS | {"source_suffix": [2], "target_suffix": [2]}
    tokenizer = Tokenizer.build(BYTE_PAIR, contents, settings, name, (segmenter, segmenter))
    return dataclasses.replace(tokenizer, settings={})  # the file says everything


def _untrained(byte_fallback: bool, removed: str | None = UNSEEN) -> tokenizers.Tokenizer:
    """Return one with only the special tokens; `removed` is None in files of earlier versions."""
    unknown = SPECIAL_TOKENS[BYTE_PAIR_IDS["unk_id"]]
    model = models.BPE(unk_token=unknown, byte_fallback=byte_fallback)
    tokenizer = tokenizers.Tokenizer(model)
    # A space marks the beginning of a word, because normalised text has spaces nowhere else; the
    # usual mark "▁" may occur in a text.
    steps = [*text_normalizer(removed), normalizers.Prepend(" ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    word_or_symbol = tokenizers.Regex(r" ?(?:[^ \p{P}\p{S}]+|[\p{P}\p{S}])")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(word_or_symbol, "isolated")
    shown = [decoders.Replace(unknown, UNKNOWN_CHARACTER)]
    if byte_fallback:
        shown.append(decoders.ByteFallback())
    tokenizer.decoder = decoders.Sequence([*shown, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def text_normalizer(removed: str | None = UNSEEN) -> list[normalizers.Normalizer]:
    """Return the steps that give text in Unicode normal form C with single spaces."""
    # Whitespace is what str.split() splits at.
    one_space = normalizers.Replace(tokenizers.Regex(r"[\s\x1c-\x1f]+"), " ")
    unseen = [normalizers.Replace(tokenizers.Regex(removed), "")] if removed else []
    return [normalizers.NFC(), *unseen, one_space, normalizers.Strip()]


def _rules(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return everything that a tokenizer file contains except the vocabulary and its merges."""
    rules = json.loads(tokenizer.to_str())
    model = rules.pop("model")
    return rules | {name: model[name] for name in model if name not in ("vocab", "merges")}


def train_unigram(
    lines: Iterable[str],
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = (),
    byte_fallback: bool = False,
) -> Tokenizer:
    """Learn a vocabulary of the pieces of words that give the text the highest likelihood.

    Text is normalised as by `train_byte_pair`. transformers reads the tokenizer.json.

    Args:
        lines: Text of both sides.
        vocab_size: Most entries, special tokens and bytes included.
        special_tokens: The last entries, for example sentinels.
        byte_fallback: Whether the vocabulary also has the 256 bytes.

    Raises:
        InputError: The characters of the text do not fit into the vocabulary.
    """
    normalizer = normalizers.Sequence(text_normalizer())
    pieces = sentencepiece_pieces(
        map(normalizer.normalize_str, lines),
        vocab_size,
        reserved=len(special_tokens),
        byte_fallback=byte_fallback,
    )
    pieces += [(token, 0.0) for token in special_tokens]
    library = tokenizers.Tokenizer(models.Unigram(pieces, UNIGRAM_IDS["unk_id"], byte_fallback))
    library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme="always")
    library.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    spaces = decoders.Replace(MARK, " "), decoders.Replace("<unk>", UNKNOWN_CHARACTER)
    joined = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    library.decoder = decoders.Sequence([*spaces, *joined])
    library.add_special_tokens([*UNIGRAM_TOKENS.values(), *special_tokens])
    settings = UNIGRAM_IDS | {
        "source_suffix": [1],
        "target_suffix": [1],
        "special_tokens": UNIGRAM_TOKENS,
        "class_name": "TokenizersBackend",  # reads tokenizer.json as it is
    }
    contents = {TOKENIZER_FILE: library.to_str().encode()}
    return read_library(TOKENIZER_JSON, contents, settings, "the trained tokenizer")


def sentencepiece_pieces(
    lines: Iterable[str],
    vocab_size: int,
    *,
    model_type: Literal["unigram", "bpe"] = "unigram",
    reserved: int = 0,
    byte_fallback: bool = False,
) -> list[tuple[str, float]]:
    """Return the pieces of a sentencepiece model of normalized text, each with its score.

    Args:
        vocab_size: Most entries: padding, EOS and <unk>, the pieces, and `reserved` ones.
    """
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            model_type=model_type,
            vocab_size=vocab_size - reserved,
            hard_vocab_limit=False,
            character_coverage=1.0,
            byte_fallback=byte_fallback,
            normalization_rule_name="identity",
            max_sentence_length=LONGEST_LINE,
            num_threads=THREADS,
            minloglevel=2,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
        )
    except (RuntimeError, OSError) as error:
        characters = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        least = (int(characters[1]) if characters else 1) + reserved
        fault = one_line(str(error))
        if vocab_size < least:
            entries = f"{reserved} special tokens and each character of the text"
            fault = f"vocab_size={vocab_size} must be at least {least}: {entries} are entries"
        raise InputError(fault) from error
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
