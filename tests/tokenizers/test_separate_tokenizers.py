"""One tokenizer for sources and one for targets."""

import pytest

from jax_transformer.errors import InputError
from jax_transformer.tokenizers import describe, from_description, separate, train_byte_pair
from jax_transformer.tokenizers.readers.classes import read_marian
from tests.tokenizers.class_folders import came_back
from tests.tokenizers.sentencepiece_models import write_marian

SIDES = (
    train_byte_pair(["abc cab", "bca"], 12),
    train_byte_pair(["xyz zyx yxz xyzzy"], 15),
)


@pytest.fixture(scope="module")
def tokenizer():
    return separate(*SIDES)


def test_each_side_has_its_own(tokenizer):
    assert (tokenizer.src_vocab_size, tokenizer.tgt_vocab_size) == (12, 15)
    unknown = tokenizer.unk_id
    assert unknown not in tokenizer.encode_source(["abc"])[0]
    assert unknown not in tokenizer.encode_target(["xyz"])[0]
    assert unknown in tokenizer.encode_target(["abc"])[0]
    target = tokenizer.encode_target(["xyz zyx"], 3)[0]
    assert len(target) == 3
    assert tokenizer.decode(tokenizer.encode_target(["xyz zyx"])[0]) == "xyz zyx"
    assert "".join(tokenizer.source_texts(tokenizer.encode_source(["abc"])[0])) == " abc</s>"
    assert "".join(tokenizer.target_texts(tokenizer.encode_target(["xyz"])[0])) == " xyz</s>"


def test_it_comes_back_from_its_files(tokenizer):
    assert sorted(tokenizer.contents) == ["source_tokenizer.json", "target_tokenizer.json"]
    back = came_back(tokenizer)
    assert back.digest() == tokenizer.digest() != separate(*SIDES[::-1]).digest()
    assert back.encode_source(["abc cab"]) == tokenizer.encode_source(["abc cab"])
    assert back.encode_target(["xyz"]) == tokenizer.encode_target(["xyz"])


def test_special_ids_that_differ_are_refused_with_both_values(tmp_path):
    size = write_marian(tmp_path)
    marian = read_marian(tmp_path)
    byte_pair = train_byte_pair(["ab"], vocab_size=8)
    message = f"pad_id is {size - 1} in the source's tokenizer and 0 in the target's"
    with pytest.raises(InputError, match=message):
        separate(marian, byte_pair)
    assert separate(marian, marian).pad_id == size - 1


def test_damage_is_refused_with_the_side(tokenizer):
    description, files = describe(tokenizer), dict(tokenizer.contents)
    del files["target_tokenizer.json"]
    with pytest.raises(InputError, match=r"^x \(target\): a tokenizer of this library is"):
        from_description(description, files, "x")
    with pytest.raises(InputError, match="separate tokenizers are described as source and target"):
        from_description({"kind": "separate", "files": []}, {}, "x")
