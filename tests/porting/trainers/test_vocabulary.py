"""Vocabularies: the ids of a line are those of the program, and the text comes back."""

import pytest
import torch

from jax_transformer import porting
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers.fairseq import read_dictionary
from tests.porting.trainers.programs import AnnotatedTransformer, Fairseq, JoeyNMT, OpenNMT


def tokenizer_of(module, folder):
    return porting.from_trainer(module.save(folder))[2]


def test_fairseq_ends_sources_and_targets_and_begins_with_the_end(tmp_path):
    tokenizer = tokenizer_of(Fairseq(), tmp_path)
    assert tokenizer.encode_source(["w0  w32 w99\tw1 "]) == [[4, 36, 3, 5, 2]]
    assert tokenizer.encode_target(["w0 w32 w26"]) == [[4, 3, 30, 2]]  # the target has 27 words
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (1, 2, 2)
    assert (tokenizer.src_vocab_size, tokenizer.tgt_vocab_size) == (37, 31)
    assert tokenizer.decode([4, 3, 30, 2, 1, 1]) == "w0 <unk> w26"


def test_a_joined_dictionary_is_one_tokenizer(tmp_path):
    tokenizer = tokenizer_of(Fairseq(share_all_embeddings=True), tmp_path)
    assert tokenizer.kind == "tokenizer_json"
    assert tokenizer.encode_source(["w0 w32"]) == tokenizer.encode_target(["w0 w32"])


def test_joeynmt_splits_at_spaces_alone(tmp_path):
    tokenizer = tokenizer_of(JoeyNMT(), tmp_path)
    assert tokenizer.encode_source(["w0 w32 w99 w0\u00a0w1"]) == [[4, 36, 0, 0, 3]]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 3, 0)
    assert tokenizer.decode([4, 0, 30, 3]) == "w0 <unk> w26"


def test_sources_of_opennmt_do_not_end_with_eos(tmp_path):
    tokenizer = tokenizer_of(OpenNMT(), tmp_path)
    assert tokenizer.encode_source(["w0 w99 w32"]) == [[4, 0, 36]]
    assert tokenizer.encode_target(["w0 w99 w26"]) == [[4, 0, 30, 3]]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 3, 0)


def test_the_notebook_has_none(tmp_path):
    path = AnnotatedTransformer().save(tmp_path)
    assert porting.from_trainer(path, num_heads=4)[2] is None


@pytest.mark.parametrize("module", [Fairseq, JoeyNMT])
def test_without_the_files_there_is_none(tmp_path, module):
    path = module().save(tmp_path)
    for file in tmp_path.glob("*.txt"):
        file.unlink()
    assert porting.from_trainer(path)[2] is None


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    path = JoeyNMT().save(tmp_path)
    with (tmp_path / "trg_vocab.txt").open("a") as file:
        file.write("more\n")
    with pytest.raises(
        InputError, match="the target vocabulary has 32 tokens, but the model has 31"
    ):
        porting.from_trainer(path)


def test_dictionaries_of_fairseq(tmp_path):
    file = tmp_path / "dict.en.txt"
    file.write_text("the 12\na b 3\n<unk> 5 #fairseq:overwrite\nmadeupword0000 0\n\u00fc 1\n\n")
    words = ["the", "a b", "<unk>", "madeupword0000", "\u00fc"]
    assert read_dictionary(file) == ["<s>", "<pad>", "</s>", "<unk>", *words]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the\n", "dict.en.txt: line 1 is no token with its count"),
        (b"the 3\na x\n", "dict.en.txt: line 2 is no token with its count"),
        (b" 3\n", "line 1 is no token with its count"),
        (b"the 3\na 1\nthe 2\n", "line 3 repeats a token"),
        (b"<pad> 3\n", "line 1 repeats a token"),
        (b"\xff\xfe 3\n", "dict.en.txt cannot be read.*it is not UTF-8"),
    ],
)
def test_damaged_dictionaries_are_refused(tmp_path, content, message):
    path = Fairseq().save(tmp_path)
    (tmp_path / "dict.en.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        porting.from_trainer(path)


def test_a_language_is_no_path(tmp_path):
    (tmp_path / "below").mkdir()
    module = Fairseq(source_lang="x/../../dict", target_lang="en")
    path = module.save(tmp_path / "below", newer=False)
    (tmp_path / "dict.txt").write_text("not a dictionary\n")
    assert porting.from_trainer(path)[2] is None


def test_special_ids_of_opennmt_must_be_those_of_both_sides(tmp_path):
    path = OpenNMT().save(tmp_path)
    saved = torch.load(path, weights_only=False)
    source = saved["vocab"]["src"]
    source[1], source[4] = source[4], source[1]
    torch.save(saved, path)
    with pytest.raises(InputError, match="'<blank>' has id 1 in the target vocabulary, but not in"):
        porting.from_trainer(path)
