"""One tokenizer for all formats: text to the ids of a model, and ids to text."""

from jax_transformer.tokenizers.formats import (
    READERS,
    describe,
    from_description,
    from_text,
    separate,
    to_text,
    write_files,
)
from jax_transformer.tokenizers.readers.model_files import read_files
from jax_transformer.tokenizers.segmenters import LineError, encode_lines
from jax_transformer.tokenizers.tokenizer import Languages, Tokenizer
from jax_transformer.tokenizers.trained import (
    BYTE_PAIR_IDS,
    parse_byte_pair,
    read_byte_pair,
    train_byte_pair,
    train_unigram,
)

__all__ = [
    "BYTE_PAIR_IDS",
    "READERS",
    "Languages",
    "LineError",
    "Tokenizer",
    "describe",
    "encode_lines",
    "from_description",
    "from_text",
    "parse_byte_pair",
    "read_byte_pair",
    "read_files",
    "separate",
    "to_text",
    "train_byte_pair",
    "train_unigram",
    "write_files",
]
