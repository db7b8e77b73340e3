"""The unigram tokenizer that is trained here: its ids and special tokens, also in transformers."""

import json
import re

import pytest

from jax_transformer.errors import InputError
from jax_transformer.text.denoising import MODE_TOKENS, SENTINEL
from jax_transformer.tokenizers import from_text, to_text, train_unigram
from tests.tokenizers.sentencepiece_models import text

SPECIAL = [*(SENTINEL.format(number) for number in range(9)), *MODE_TOKENS]
LINES = text(3)


@pytest.fixture(scope="module")
def tokenizer():
    return train_unigram(LINES, 420, special_tokens=SPECIAL, byte_fallback=True)


def test_the_first_ids_are_those_of_t5_and_the_last_are_the_special_tokens(tokenizer):
    assert [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id] == [0, 0, 1, 2]
    size = tokenizer.src_vocab_size
    assert size <= 420
    assert [tokenizer.token_id(token) for token in SPECIAL] == [*range(size - 13, size)]
    assert tokenizer.token_id("<extra_id_9>") is None
    (ids,) = tokenizer.encode_source([LINES[0]])
    assert ids[-1:] == [1]
    assert tokenizer.encode_text([LINES[0]]) == [ids[:-1]]


def test_decoding_returns_normalised_text_and_unknown_characters(tokenizer):
    for line in [*LINES[:50], "Ω und \u2603", "  a \t b  "]:
        expected = " ".join(line.split())
        assert tokenizer.decode(tokenizer.encode_target([line])[0]) == expected
    alone = train_unigram(LINES, 420, special_tokens=SPECIAL)
    assert alone.unk_id in alone.encode_text(["\u2603"])[0]


def test_the_same_text_gives_the_same_tokenizer_and_its_file_gives_it_back(tokenizer):
    again = train_unigram(iter(LINES), 420, special_tokens=SPECIAL, byte_fallback=True)
    assert again.digest() == tokenizer.digest()
    read = from_text(to_text(tokenizer), "a file")
    assert read.digest() == tokenizer.digest()
    assert read.encode_source(LINES) == tokenizer.encode_source(LINES)


@pytest.mark.parametrize("size", [13, 20])
def test_a_vocabulary_that_is_too_small_is_refused_with_the_size_that_is_not(size):
    message = rf"^vocab_size={size} must be at least (\d+): 13 special tokens and each character"
    with pytest.raises(InputError, match=message) as refused:
        train_unigram(LINES, size, special_tokens=SPECIAL)
    least = int(re.match(message, str(refused.value))[1])
    if size > 13:  # else sentencepiece does not count
        with pytest.raises(InputError, match=f"must be at least {least}:"):
            train_unigram(LINES, least - 1, special_tokens=SPECIAL)
        train_unigram(LINES, least, special_tokens=SPECIAL)


def test_transformers_reads_the_same_ids(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.contents["tokenizer.json"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    lines = [*LINES[:40], "a \u2603 <extra_id_3> b"]
    assert [theirs(line)["input_ids"] for line in lines] == tokenizer.encode_source(lines)
    assert json.loads(tokenizer.contents["tokenizer.json"])["model"]["type"] == "Unigram"
