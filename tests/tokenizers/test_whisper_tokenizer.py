"""The tokenizer of Whisper, read from folders: ids and texts of its class in transformers."""

import functools
import json
import random

import numpy as np
import pytest

from jax_transformer import TransformerConfig
from jax_transformer.tokenizers.readers.classes import read_class, tokenizer_names, written_config
from tests.tiers import tiered
from tests.tokenizers.class_folders import came_back, transformers, write_bart, write_whisper
from tests.tokenizers.sentencepiece_models import odd_strings, text

CLASS, START = "WhisperTokenizer", "startoftranscript"
MULTILINGUAL, LARGE_V3 = ("en", "zh", "de"), ("en", "zh", "de", "yue")
OLDER_NAME = {"nothing": "nocaptions"}
# The files, the languages, and whether the files have timestamps.
FOLDERS = {
    "older English": ("older", (), False, OLDER_NAME),
    "older, multilingual": ("older", MULTILINGUAL, False, OLDER_NAME),
    "older with timestamps": ("older", MULTILINGUAL, True, OLDER_NAME),
    "English": ("published", (), True, {}),
    "multilingual": ("published", MULTILINGUAL, True, {}),
    "saved English without timestamps": ("saved", (), False, {}),
    "saved, large-v3": ("saved", LARGE_V3, True, {}),
}
QUICK = ("older English", "older with timestamps", "multilingual", "saved, large-v3")


def random_strings(count):
    """Return texts of letters, marks, spaces, emoji, line ends and any characters of Unicode."""
    chance = random.Random(0)
    some = [*"aäßé.,'? \t\n\r\u00a0\u2028e\u0301漢字नम😀"]
    some += ["👩‍👩‍👧", "  ", "\r\n", "'s", " .", "<|", "|>"]

    def character():
        code = chance.randrange(0x110000)
        return chr(code if not 0xD800 <= code < 0xE000 else 0x20)

    def one():
        return character() if chance.random() < 0.2 else chance.choice(some)

    return ["".join(one() for _ in range(chance.randint(0, 24))) for _ in range(count)]


SPELLED = ["<|en|> a<|0.02|>b <|startofprev|>", "<|startoftranscript|>", "a ."]
SPELLED += ["a <|١٢.٤|> <|31.5|> <|3|>"]
STRINGS = [*random_strings(200), *text(1)[:40], *odd_strings(text(2))[:200], *SPELLED]


def config_of(theirs, size):
    start, eos = (theirs.convert_tokens_to_ids(f"<|{name}|>") for name in (START, "endoftext"))
    ids = {"bos_id": start, "pad_id": start, "eos_id": eos}
    return TransformerConfig(src_vocab_size=size, tgt_vocab_size=size, max_length=64, **ids)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from a kind to its folder, the tokenizer of transformers, and the config."""

    @functools.cache
    def write(kind):
        files, languages, timestamps, options = FOLDERS[kind]
        folder = tmp_path_factory.mktemp("folder")
        theirs = write_whisper(folder, files, languages, timestamps, **options)
        return folder, theirs, config_of(theirs, len(theirs) + (0 if timestamps else 1501))

    return write


@pytest.fixture(params=tiered(FOLDERS, QUICK))
def kind(request):
    return request.param


def rows_of(theirs, size):
    """Return ids at random, and of texts with timestamps.

    At random are pieces, special tokens and timestamps, alike often: most pieces are no UTF-8. None
    begins with a prompt, which transformers leaves out and here is for the caller to cut.
    """
    chance = np.random.default_rng(0)
    prompt, start, last = theirs.convert_tokens_to_ids(
        ["<|startofprev|>", f"<|{START}|>", "<|notimestamps|>"]
    )
    groups = chance.integers((0, start, last + 1), (start, last + 1, size), (200, 12, 3))
    rows = chance.permuted(groups, axis=2)[..., 0].tolist()
    texts = [
        [start, last + 1, *ids[:3], last + 7, last + 7, *ids[3:], last + 1501, theirs.eos_token_id]
        for ids in theirs(STRINGS, add_special_tokens=False).input_ids
    ]
    return [*(row for row in rows if row[0] != prompt), *texts]


def test_ids_and_texts_are_those_of_transformers(folder_of, kind):
    """Timestamps that the files lack decode to no text, as those that they have."""
    folder, theirs, config = folder_of(kind)
    own = read_class(folder, config, CLASS)
    ids = theirs(STRINGS, add_special_tokens=False).input_ids
    expected = [[*row, theirs.eos_token_id] for row in ids]
    assert own.encode_target(STRINGS) == own.encode_source(STRINGS) == expected
    assert own.encode_text(STRINGS) == ids
    rows = [*expected, *rows_of(theirs, config.tgt_vocab_size)]
    texts = [own.decode(row) for row in rows]
    assert texts == [theirs.decode(row, skip_special_tokens=True) for row in rows]
    assert sum("\ufffd" in text for text in texts) > 100
    assert "|>" not in "".join(texts[len(expected) : len(expected) + 150])


def test_special_ids_are_found_by_name(folder_of, kind):
    folder, theirs, config = folder_of(kind)
    own = read_class(folder, config, CLASS)
    _, languages, timestamps, options = FOLDERS[kind]
    names = [START, *languages, "translate", "transcribe", "startoflm", "startofprev"]
    names += [options.get("nothing", "nospeech"), "notimestamps", "endoftext"]
    names += ["0.00", "30.00"] if timestamps else []
    for token in (f"<|{name}|>" for name in names):
        assert own.token_id(token) == theirs.convert_tokens_to_ids(token)
        assert own.target.segmenter.token(own.token_id(token)) == token
    assert own.token_id("<|xx|>") is None
    assert own.eos_id == theirs.eos_token_id == theirs.pad_token_id
    assert own.pad_id == own.bos_id == own.token_id(f"<|{START}|>")


def test_it_comes_back_and_transformers_reads_what_is_written(folder_of, kind, tmp_path):
    """Without the folder: its own files, and a tokenizer_config.json that is made."""
    folder, theirs, config = folder_of(kind)
    own = read_class(folder, config, CLASS)
    assert {*own.contents} == {*tokenizer_names(folder, CLASS)}
    for name, content in own.contents.items():
        (tmp_path / name).write_bytes(content)
    written = written_config(own, config, CLASS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    rows = rows_of(theirs, config.tgt_vocab_size)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(again).__name__ == CLASS
    assert again(STRINGS).input_ids == theirs(STRINGS).input_ids
    assert again.pad_token_id == theirs.pad_token_id
    expected = [theirs.decode(row, skip_special_tokens=True) for row in rows]
    assert [again.decode(row, skip_special_tokens=True) for row in rows] == expected
    back = came_back(own)
    assert back.digest() == own.digest()
    assert back.pad_id == own.pad_id
    for tokenizer in (back, read_class(tmp_path, config, CLASS)):
        assert tokenizer.encode_target(STRINGS) == own.encode_target(STRINGS)
        assert [tokenizer.decode(row) for row in rows] == expected


def test_a_file_that_names_its_padding_decides(tmp_path):
    theirs = write_whisper(tmp_path, "older")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = tmp_path / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<|nospeech|>"}))
    own = read_class(tmp_path, config_of(theirs, len(theirs)), CLASS)
    assert own.pad_id == theirs.convert_tokens_to_ids("<|nospeech|>")


def test_a_folder_without_names_has_the_usual_ones(tmp_path):
    """As a tokenizer_config.json that somebody has written: its class alone."""
    theirs = write_whisper(tmp_path, "saved")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": CLASS}))
    own = read_class(tmp_path, config_of(theirs, len(theirs)), CLASS)
    usual = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert own.eos_id == own.unk_id == usual.eos_token_id
    assert own.pad_id == theirs.convert_tokens_to_ids(f"<|{START}|>")
    assert own.encode_text(STRINGS) == usual(STRINGS, add_special_tokens=False).input_ids


def test_tokens_that_the_older_map_alone_lists_are_special(tmp_path):
    """As transformers 4 wrote and read them; 5.24 shows them in a text, which must not be."""
    theirs = write_whisper(tmp_path, "older")
    config = config_of(theirs, len(theirs))
    rows = rows_of(theirs, len(theirs))
    expected = [theirs.decode(row, skip_special_tokens=True) for row in rows]
    path = tmp_path / "tokenizer_config.json"
    values = json.loads(path.read_text())
    del values["additional_special_tokens"]
    path.write_text(json.dumps(values))
    own = read_class(tmp_path, config, CLASS)
    assert [own.decode(row) for row in rows] == expected
    shown = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [shown.decode(row, skip_special_tokens=True) for row in rows] != expected


def test_byte_pairs_of_other_classes_are_not_cleaned_up_either(tmp_path):
    theirs = write_bart(tmp_path, saved=False)
    values = {"tokenizer_class": "BartTokenizer", "clean_up_tokenization_spaces": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = {"bos_id": 2, "eos_id": theirs.eos_token_id, "pad_id": theirs.pad_token_id}
    config = TransformerConfig(src_vocab_size=len(theirs), tgt_vocab_size=len(theirs), **ids)
    own = read_class(tmp_path, config, "RobertaTokenizer")
    rows = own.encode_target(["a . b , c 's", "don 't"])
    assert [own.decode(row) for row in rows] == theirs.batch_decode(rows, skip_special_tokens=True)
