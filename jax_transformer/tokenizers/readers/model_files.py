"""Files of tokenizers, read with care: sentencepiece models and vocabularies."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import MAX_TOKENIZER, parse_json, read_bytes
from jax_transformer.tokenizers.readers.limits import check_character_map

# Fields of the message ModelProto; a model without the last two has been cut off.
PIECES, TRAINER_SETTINGS, NORMALIZER = 1, 2, 3
CHARACTER_MAP = 2  # field of the message NormalizerSpec
TOKENIZER_FILE = "tokenizer.json"
VOCABULARY, MERGES, WORD_PIECES = "vocab.json", "merges.txt", "vocab.txt"
T5_MODEL = "spiece.model"
MBART_MODEL = "sentencepiece.bpe.model"  # of mBART-50, M2M100 and NLLB, too
# The first tokens of fairseq, in the place of the first three pieces of a model: <unk>, <s>, </s>.
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of files in a folder; refuse one that is missing or too large."""
    fault = "cannot be read; a tokenizer file must be there"
    return {name: read_bytes(folder / name, fault, MAX_TOKENIZER) for name in names}


def read_model(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Return a sentencepiece model."""
    try:
        fields = [(field, type(value)) for field, value in _fields(content)]
        # A file that was cut off between two fields is still a message, but lacks fields.
        whole = {(field, bytes) for field in (PIECES, TRAINER_SETTINGS, NORMALIZER)} <= {*fields}
        if whole:
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
            model.id_to_piece([*range(model.get_piece_size())])  # every piece is text
            characters = character_map(content)
    except (IndexError, RuntimeError, OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{name}: is not a sentencepiece model, or is damaged; copy the file again"
        ) from error
    if not whole:
        raise InputError(f"{name}: is not a whole sentencepiece model; copy the file again")
    if characters:
        check_character_map(characters, f"{name}: the normalizer")
    return model


def character_map(content: bytes) -> bytes | None:
    """Return the compiled map of characters in a sentencepiece model."""
    settings = dict(_fields(content))[NORMALIZER]
    return dict(_fields(settings)).get(CHARACTER_MAP)


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field of a protocol buffer message."""
    position = 0

    def number() -> int:
        nonlocal position
        value, shift = 0, 0
        while True:
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while position < len(content):
        field, wire_type = divmod(number(), 8)
        if wire_type not in (0, 2):
            raise ValueError(f"field {field} is of wire type {wire_type}")
        value = number()
        if wire_type == 2:
            position += value
            if position > len(content):
                raise ValueError("the last field is longer than the message")
            value = content[position - value : position]
        yield field, value


def read_vocabulary(content: bytes, name: str) -> dict[str, int]:
    """Return the id of each token."""
    vocabulary = parse_json(content, name)
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise InputError(
                f"{name}: is not a vocabulary: the id of {token[:40]!r} is {token_id!r:.40}; an id "
                "is a whole number from 0 on"
            )
    return vocabulary
