"""Sentencepiece models and vocabularies, read with care."""

from collections.abc import Iterator

import sentencepiece

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import parse_json

# Fields of the message ModelProto; a model without the last two has been cut off.
PIECES, TRAINER_SETTINGS, NORMALIZER = 1, 2, 3
CHARACTER_MAP = 2  # field of the message NormalizerSpec
MARK = "▁"  # what sentencepiece writes for a space
# The first tokens of fairseq, in the place of the first three pieces of a model: <unk>, <s>, </s>.
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")


def read_model(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Return a sentencepiece model.

    Raises:
        InputError: It is damaged or cut off.
    """
    remedy = "copy the file again"
    try:
        missing = {PIECES, TRAINER_SETTINGS, NORMALIZER} - _message_fields(content)
        if missing:
            raise InputError(f"{name}: is no whole sentencepiece model; {remedy}")
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except (IndexError, RuntimeError, OSError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: is no sentencepiece model, or is damaged; {remedy}") from error


def normalization_map(content: bytes, name: str) -> bytes:
    """Return the map of a sentencepiece model that normalises characters; empty if it has none.

    Args:
        content: A model that `read_model` accepts.
        name: Its name in error messages.

    Raises:
        InputError: The model is damaged.
    """
    try:
        (settings,) = (value for field, value in _fields(content) if field == NORMALIZER)
        found = [value for field, value in _fields(settings) if field == CHARACTER_MAP]
    except (IndexError, ValueError) as error:
        raise InputError(f"{name}: is damaged; copy the file again") from error
    return bytes(found[-1]) if found else b""


def _message_fields(content: bytes) -> set[int]:
    """Return the numbers of the fields of a protocol buffer message of length-delimited fields.

    A file that was cut off between two fields is still a message: the fields tell.

    Raises:
        ValueError: A field is of another type or longer than the message.
        IndexError: The message ends within the length of a field.
    """
    fields = set()
    for field, value in _fields(content):
        if not isinstance(value, bytes):
            raise ValueError(f"field {field} is a number")
        fields.add(field)
    return fields


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field of a protocol buffer message.

    Raises:
        ValueError: A field is neither a number nor length-delimited, or longer than the message.
        IndexError: The message ends within a number.
    """
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
        if wire_type == 0:
            yield field, number()
        elif wire_type == 2:
            length = number()
            position += length
            if position > len(content):
                raise ValueError("the last field is longer than the message")
            yield field, content[position - length : position]
        else:
            raise ValueError(f"field {field} is of wire type {wire_type}")


def read_vocabulary(content: bytes, name: str) -> dict[str, int]:
    """Return the id of each token.

    Raises:
        InputError: The file is no vocabulary.
    """
    vocabulary = parse_json(content, name)
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise InputError(
                f"{name}: is no vocabulary: the id of {token[:40]!r} is {token_id!r:.40}; an id is "
                "a whole number from 0 on"
            )
    return vocabulary
