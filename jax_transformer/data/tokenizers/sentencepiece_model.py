"""Sentencepiece models and vocabularies, read with care."""

import sentencepiece

from jax_transformer.data.tokenizers.storage import parse_json
from jax_transformer.errors import InputError

# Fields of the message ModelProto; a model without the last two has been cut off.
PIECES, TRAINER_SETTINGS, NORMALIZER = 1, 2, 3


def read_model(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Return a sentencepiece model.

    Raises:
        InputError: It is damaged or cut off.
    """
    remedy = "copy the file again"
    try:
        missing = {PIECES, TRAINER_SETTINGS, NORMALIZER} - message_fields(content)
        if missing:
            raise InputError(f"{name}: is no whole sentencepiece model; {remedy}")
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except (IndexError, RuntimeError, OSError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: is no sentencepiece model, or is damaged; {remedy}") from error


def message_fields(content: bytes) -> set[int]:
    """Return the numbers of the fields of a protocol buffer message of length-delimited fields.

    A file that was cut off between two fields is still a message: the fields tell.

    Raises:
        ValueError: A field is of another type or longer than the message.
        IndexError: The message ends within the length of a field.
    """
    fields, position = set(), 0

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
        if wire_type != 2:
            raise ValueError(f"field {field} is of wire type {wire_type}")
        length = number()
        position += length
        fields.add(field)
    if position != len(content):
        raise ValueError("the last field is longer than the message")
    return fields


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
