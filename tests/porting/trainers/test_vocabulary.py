"""Vocabularies: the ids of a line are those of the program, and the text comes back."""

import pytest
import torch

from jax_transformer import porting
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers.fairseq import read_dictionary
from tests.porting.trainers.programs import AnnotatedTransformer, Fairseq, JoeyNMT, OpenNMT


def tokenizer_of(module, folder):
    return porting.from_trainer(module.save(folder))[2]


@pytest.mark.parametrize(
    ("program", "source", "source_ids", "target_ids", "special"),
    [
        # Any whitespace parts words; sources end with EOS, which begins targets, too.
        (Fairseq, "w0  w32 w99\tw1 ", [4, 36, 3, 5, 2], [4, 3, 30, 2], (1, 2, 2, 3)),
        # Spaces alone part words.
        (JoeyNMT, "w0 w32 w99 w0\u00a0w1", [4, 36, 0, 0, 3], [4, 0, 30, 3], (1, 2, 3, 0)),
        # Sources do not end with EOS.
        (OpenNMT, "w0 w99 w32", [4, 0, 36], [4, 0, 30, 3], (1, 2, 3, 0)),
    ],
)
def test_ids_are_those_of_the_program(tmp_path, program, source, source_ids, target_ids, special):
    tokenizer = tokenizer_of(program(), tmp_path)
    assert tokenizer.encode_source([source]) == [source_ids]
    assert tokenizer.encode_target(["w0 w32 w26"]) == [target_ids]  # the target has 27 words
    assert (tokenizer.src_vocab_size, tokenizer.tgt_vocab_size) == (37, 31)
    pad = tokenizer.pad_id
    assert (pad, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == special
    assert tokenizer.decode([*target_ids, pad, pad]) == "w0 <unk> w26"


def test_a_joined_dictionary_is_one_tokenizer(tmp_path):
    tokenizer = tokenizer_of(Fairseq(share_all_embeddings=True), tmp_path)
    assert tokenizer.kind == "tokenizer_json"
    assert tokenizer.encode_source(["w0 w32"]) == tokenizer.encode_target(["w0 w32"])


@pytest.mark.parametrize(
    ("program", "options"),
    [(Fairseq, {}), (JoeyNMT, {}), (AnnotatedTransformer, {"num_heads": 4})],
)
def test_without_files_of_a_vocabulary_there_is_none(tmp_path, program, options):
    path = program().save(tmp_path)
    for file in tmp_path.glob("*.txt"):
        file.unlink()
    assert porting.from_trainer(path, **options)[2] is None


def test_dictionaries_of_fairseq(tmp_path):
    file = tmp_path / "dict.en.txt"
    file.write_text("the 12\na b 3\n<unk> 5 #fairseq:overwrite\nmadeupword0000 0\n\u00fc 1\n\n")
    words = ["the", "a b", "<unk>", "madeupword0000", "\u00fc"]
    assert read_dictionary(file) == ["<s>", "<pad>", "</s>", "<unk>", *words]


CODE = "python/object/apply:os.system"
MISSING = "cannot be read; copy the file beside the checkpoint"
WRITERS = {"dict.en.txt": Fairseq, "trg_vocab.txt": JoeyNMT, "config.yaml": JoeyNMT}
# A file beside a checkpoint, its content (None: it is missing), and what is said.
DAMAGED = [
    ("dict.en.txt", "the\n", "dict.en.txt: line 1 is no token with its count"),
    ("dict.en.txt", "the 3\na x\n", "dict.en.txt: line 2 is no token with its count"),
    ("dict.en.txt", " 3\n", "line 1 is no token with its count"),
    ("dict.en.txt", "the 3\na 1\nthe 2\n", "line 3 repeats a token"),
    ("dict.en.txt", "<pad> 3\n", "line 1 repeats a token"),
    ("dict.en.txt", b"\xff\xfe 3\n", f"dict.en.txt {MISSING}.*it is not UTF-8"),
    ("trg_vocab.txt", "\n" * 32, "the target vocabulary has 32 tokens, but the model has 31"),
    ("config.yaml", None, f"config.yaml {MISSING}.*No such"),
    ("config.yaml", "model: [", "config.yaml: is not YAML"),
    ("config.yaml", "- 1", "config.yaml: has no section 'model'"),
    ("config.yaml", "model: 3", "config.yaml: has no section 'model'"),
    ("config.yaml", f"model: !!{CODE} [touch canary]", "config.yaml: is not YAML"),
    ("config.yaml", "[" * 10_000, "config.yaml: is not YAML"),
    ("config.yaml", "y" * 2**20, "config.yaml is no regular file of at most 131,072 bytes"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED, ids=[row[2] for row in DAMAGED])
def test_damaged_files_are_refused(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    path = WRITERS[name]().save(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message) as refused:
        porting.from_trainer(path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "canary").exists()


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
