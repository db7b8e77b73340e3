"""A tokenizer.json: affixes, usual names, damaged files."""

import json

import pytest
import tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers import READERS
from jax_transformer.tokenizers.readers import library
from jax_transformer.tokenizers.readers.library import parse, read_usual_names
from jax_transformer.tokenizers.readers.model_files import character_map, read_model
from tests.text.texts import memory_below
from tests.tokenizers.class_folders import write_pegasus
from tests.tokenizers.sentencepiece_models import train

# As the family Pegasus sets them.
PEGASUS = {"pad_id": 0, "bos_id": 0, "eos_id": 1, "unk_id": 105}
PEGASUS |= {"source_suffix": [1], "target_suffix": [1]}


def read(content, settings, name):
    return READERS["tokenizer_json"]({"tokenizer.json": content}, settings, name)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """The tokenizer.json of a Pegasus tokenizer that transformers has written."""
    folder = tmp_path_factory.mktemp("pegasus")
    write_pegasus(folder)
    return (folder / "tokenizer.json").read_bytes()


def test_affixes_surround_the_text_and_survive_cutting(content):
    affixes = {"source_prefix": [7, 8], "source_suffix": [1], "target_suffix": [1, 9]}
    tokenizer = read(content, PEGASUS | affixes, "x")
    words = tokenizer.encode_target(["tlx 6r5"])[0][:-2]
    assert tokenizer.encode_target(["tlx 6r5"])[0][-2:] == [1, 9]
    assert tokenizer.encode_source(["tlx 6r5", ""]) == [[7, 8, *words, 1], [7, 8, 1]]
    assert tokenizer.encode_source(["tlx 6r5"], 5) == [[7, 8, *words[:2], 1]]
    assert tokenizer.encode_target(["tlx 6r5"], 3) == [[*words[:1], 1, 9]]


def test_the_files_own_template_truncation_and_padding_do_not_act(content):
    theirs = tokenizers.Tokenizer.from_str(content.decode())
    theirs.enable_truncation(2)
    theirs.enable_padding()
    own = read(theirs.to_str().encode(), {**PEGASUS, "source_suffix": []}, "x")
    whole, short = own.encode_source(["tlx 6r5", "t"])
    assert len(whole) > len(short)
    assert 0 not in short
    assert 1 not in whole


def test_a_truncation_that_makes_the_library_panic_is_gone_once_a_file_is_read(content):
    """Whatever encodes first: the template of a file is read by encoding a letter."""
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 2}
    hostile = json.loads(content) | {"truncation": truncation}
    read = parse(json.dumps(hostile), "x")
    assert read.truncation is read.padding is None
    assert len(read.encode("tlx 6r5").ids) > 1


def word_level(*special):
    """Return the tokenizer.json of another program, with these special tokens."""
    vocab = {token: number for number, token in enumerate([*special, "a", "b"])}
    model = tokenizers.models.WordLevel(vocab, unk_token=special[-1])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(list(special))
    return tokenizer.to_str().encode()


@pytest.mark.parametrize(
    ("special", "ids"),
    [
        (("[PAD]", "[CLS]", "[SEP]", "[UNK]"), (0, 1, 2, 3)),
        (("</s>", "<s>", "<pad>", "<unk>"), (2, 1, 0, 3)),
        (("<eos>", "<pad>", "<unk>"), (1, 1, 0, 2)),  # no BOS: padding
        (("<pad>", "<|endoftext|>"), (0, 0, 1, 0)),  # no <unk>: padding
    ],
)
def test_special_ids_are_found_by_their_usual_names(special, ids):
    tokenizer = read_usual_names(word_level(*special), "x")
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == ids
    assert tokenizer.encode_source(["a"]) == [[len(special), ids[2]]]


def byte_pair(**changed):
    """Return a trained tokenizer.json of another program, with changed parts."""
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=special, vocab_size=50)
    tokenizer.train_from_iterator(["yellow fellow mellow hello"] * 3, trainer)
    described = json.loads(tokenizer.to_str())
    for part, value in changed.items():
        described[part] = described[part] | value if part == "model" else value
    return json.dumps(described).encode()


def test_the_dropout_of_a_file_does_not_act():
    tokenizer = read_usual_names(byte_pair(model={"dropout": 0.5}), "x")
    expected = read_usual_names(byte_pair(), "x").encode_source(["mellow yellow"])
    assert all(tokenizer.encode_source(["mellow yellow"]) == expected for _ in range(20))


def test_what_the_library_cannot_split_is_one_line():
    regex = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer = read_usual_names(byte_pair(pre_tokenizer=regex | {"invert": False}), "x")
    with pytest.raises(InputError, match=r"cannot split the line 'aaa.* \(.*retry-limit"):
        tokenizer.encode_source(["a word", "a" * 40 + "b"])


def replacements(*pairs):
    steps = [{"type": "Replace", "pattern": pattern, "content": text} for pattern, text in pairs]
    half = len(steps) // 2  # also those of an inner sequence count
    inner = {"type": "Sequence", "normalizers": [{"type": "NFC"}, *steps[half:]]}
    return {"type": "Sequence", "normalizers": [*steps[:half], inner]}


GROWING = {
    "a doubled 22 times": replacements(*[({"String": "a"}, "aa")] * 22),
    "by expressions": replacements(*[({"Regex": "[a-c]"}, "bc")] * 30),
    "between all characters": replacements(*[({"String": ""}, "zz")] * 12),
    "one letter becomes another": replacements(
        ({"Regex": "\\d"}, "b"), ({"String": "b"}, "c" * 40), ({"String": "c"}, "dd")
    ),
    "a long text for a letter": replacements(({"Regex": "x"}, "y" * 10**6)),
    "many": replacements(*[({"String": "a"}, "b")] * 1000),
}


@pytest.mark.parametrize("name", GROWING)
def test_replacements_that_make_a_long_text_of_a_letter_are_refused(name):
    message = r"^x: the normalizer (has 1,000 replacements|writes more)"
    with pytest.raises(InputError, match=message):
        read_usual_names(byte_pair(normalizer=GROWING[name]), "x")
    decoder = GROWING[name] | {"decoders": GROWING[name]["normalizers"]}
    del decoder["normalizers"]
    decoder["decoders"][-1:] = decoder["decoders"][-1]["normalizers"][1:]
    with pytest.raises(InputError, match=r"^x: the decoder "):
        read_usual_names(byte_pair(decoder=decoder), "x")


def test_they_are_refused_before_the_library_reads_the_file(monkeypatch):
    """It normalizes the tokens that are added while it reads: one letter would become 2**30."""
    monkeypatch.setattr(library, "tokenizers", None)
    with pytest.raises(InputError, match=r"^x: the normalizer writes more"):
        parse(byte_pair(normalizer=GROWING["by expressions"]), "x")


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def precompiled(model):
    return tokenizers.normalizers.Precompiled(character_map(model))


def with_rule(folder, rule):
    """Return a sentencepiece model that normalizes by a rule in the form of sentencepiece."""
    (folder / "rules.tsv").write_text(rule)
    return train(["b c d e f g h"] * 50, 12, normalization_rule_tsv=str(folder / "rules.tsv"))


def test_maps_of_characters_are_bounded(tmp_path):
    """a becomes aa twenty times; one letter becomes a hundred; bytes become characters."""
    doubling = precompiled(with_rule(tmp_path, "61\t61 61\n"))
    doubling = json.loads(doubling.__getstate__())
    for part, inner, step in (
        ("normalizer", "normalizers", doubling),
        ("normalizer", "normalizers", {"type": "ByteLevel"}),
        *[(part, f"{part.replace('_', '')}s", BYTES) for part in ("pre_tokenizer", "decoder")],
    ):
        parts = {part: {"type": "Sequence", inner: [step] * 20}}
        with pytest.raises(
            InputError, match=rf"^x: the {part} has 20 steps of type {step['type']}"
        ):
            read_usual_names(byte_pair(**parts), "x")
        parts = {part: {"type": "Sequence", inner: [step]}}
        assert read_usual_names(byte_pair(**parts), "x").encode_source(["yellow"])
    long = with_rule(tmp_path, "61\t" + "62 " * 100 + "\n")
    with pytest.raises(InputError, match=r"^x: the normalizer writes 100 characters for one"):
        read_model(long, "x")
    step = precompiled(long)
    with pytest.raises(InputError, match=r"^x: the normalizer writes 100 characters for one"):
        read_usual_names(byte_pair(normalizer=json.loads(step.__getstate__())), "x")


@pytest.mark.parametrize("length", [2**14, 2**14 + 1, 10**6])
def test_a_huge_token_of_a_unigram_model_is_refused(length):
    """The library frees it by recursion over its characters, which ends the process."""
    vocabulary = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["x" * length, -1.0], ["a", -2.0]]
    model = {"type": "Unigram", "unk_id": 2, "vocab": vocabulary, "byte_fallback": False}
    content = json.loads(word_level("<pad>", "</s>", "<unk>")) | {"model": model}
    if length <= 2**14:
        assert read_usual_names(json.dumps(content).encode(), "x").encode_source(["a"]) == [[4, 1]]
        return
    with pytest.raises(InputError, match=rf"^x: the token 'x.* has {length:,} characters"):
        read_usual_names(json.dumps(content).encode(), "x")


def test_so_is_one_that_settings_add_to_a_sentencepiece_model():
    """sentencepiece itself refuses a long piece."""
    model = train(["b c d e f g h"] * 50, 12)
    settings = {"rule": "t5", "pad_id": 0, "bos_id": 0, "eos_id": 2, "unk_id": 1}
    settings |= {"more_tokens": ["x" * 20_000]}
    with pytest.raises(InputError, match=r"^x/spiece.model: the token .* has 20,000 characters"):
        READERS["sentencepiece_unigram"]({"spiece.model": model}, settings, "x")


def test_usual_replacements_are_read():
    written = {"½": "1/2", "¼": "1/4", "¾": "3/4", "…": "...", " ": "▁", "``": '"'}
    pairs = [({"String": text}, other) for text, other in written.items()]
    usual = replacements(({"Regex": " {2,}"}, " "), *pairs)
    tokenizer = read_usual_names(byte_pair(normalizer=usual), "x")
    assert tokenizer.encode_source(["yellow"])


def test_a_file_without_padding_or_an_end_is_refused():
    for special, meaning in (("</s>", "padding: none of <pad>"), ("<pad>", "the end of a line")):
        with pytest.raises(InputError, match=f"^x: has no token for {meaning}"):
            read_usual_names(word_level(special, "<unk>"), "x")


def test_ids_beyond_the_vocabulary_are_refused(content):
    for name, value in {"eos_id": 500, "pad_id": None, "source_prefix": [-1]}.items():
        with pytest.raises(InputError, match=f"x: {name}=.* must be ids of the vocab"):
            read(content, PEGASUS | {name: value}, "x")


def test_an_id_far_beyond_the_vocabulary_is_refused_without_memory_for_the_ids_between():
    content = json.loads(word_level("<pad>", "</s>", "<unk>"))
    content["model"]["vocab"]["b"] = 2**24 - 1
    settings = {"pad_id": 0, "bos_id": 0, "eos_id": 1, "unk_id": 2, "vocab_size": 5}
    with memory_below(2**24), pytest.raises(InputError, match="has 16777216 ids, but the model 5"):
        read(json.dumps(content).encode(), settings, "x")


def test_an_id_that_no_vocabulary_has_is_damage():
    """The library behind it takes memory for each id up to the largest, and aborts the process."""
    content = json.loads(word_level("<pad>", "</s>", "<unk>"))
    content["model"]["vocab"]["b"] = 2**31
    with pytest.raises(InputError, match=r"damaged tokenizer file \(an id is 2147483648\)"):
        parse(json.dumps(content), "x")
