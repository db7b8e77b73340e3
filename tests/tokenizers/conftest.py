"""Byte-pair tokenizers of a few lines, without and with pieces of bytes."""

import pytest

from jax_transformer.tokenizers import train_byte_pair

LINES = [
    "Ein Haus. Das Haus, das (kleine) Haus!",
    "A house. The house, the small house: 5 < 7 > 3 / 2",
    'Zwei Männer und eine Frau ▁ "stehen" im Haus - und sprechen <s> </s> <pad> <unk>. ệ',
] * 5
CHARACTERS = "".join(sorted(set("".join(LINES))))


@pytest.fixture(scope="session")
def tokenizer():
    return train_byte_pair(LINES, vocab_size=130)


@pytest.fixture(scope="session")
def with_bytes():
    return train_byte_pair(LINES, vocab_size=376, byte_fallback=True)
