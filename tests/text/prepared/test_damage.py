"""Whatever is wrong with the files of a prepared corpus is one line, and never a wrong pair."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.text.batches import epoch_batches
from jax_transformer.text.corpus import read_parallel
from jax_transformer.text.encoded import encode_corpus
from jax_transformer.text.plan import epoch_layout
from jax_transformer.text.prepared.corpus import MANIFEST, open_folder
from jax_transformer.tokenizers import BytePairTokenizer
from jax_transformer.training.config import TrainingConfig
from tests.text.prepared.texts import TOKENIZER, WORDS, corpus, lines, write

SETTINGS = TrainingConfig(max_tokens=200, bucket_count=2)


@pytest.fixture
def text(tmp_path):
    return write(tmp_path, *lines(90))


@pytest.fixture
def folder(tmp_path, text, one_process):
    """Three shards of 90 pairs, in a folder of their own."""
    return Path(shutil.copytree(corpus(tmp_path / "store", text).folder, tmp_path / "copy"))


@pytest.fixture
def expected(text):
    return encode_corpus(read_parallel(text.sources, text.targets), TOKENIZER, 30)


def read_all(folder):
    """Return the ids of each pair, read one by one."""
    prepared = open_folder(folder)
    return [prepared.read(np.array([pair])) for pair in range(len(prepared))]


def refused(folder, *names):
    """Check that opening or reading is refused in one line with one of the names."""
    with pytest.raises(InputError) as refusal:
        read_all(folder)
    message = str(refusal.value)
    assert "\n" not in message
    assert any(name in message for name in names), message
    assert "start again" in message


FILES = [f"000001.{ending}" for ending in ("ids.npy", "index.npy", "json")] + [MANIFEST]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 0.5, -1, None])
def test_a_file_that_is_truncated_or_missing_is_refused(folder, name, left):
    path = folder / name
    content = path.read_bytes()
    if left is None:
        path.unlink()
    else:
        path.write_bytes(content[: left if left == -1 else int(left * len(content))])
    refused(folder, name, "shard 1 is missing, truncated")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(folder, name):
    path = folder / name
    content = path.read_bytes()
    refusals, generator = [], random.Random(0)
    places = range(0, len(content), 1 + len(content) // 150)
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            read_all(folder)
        except InputError as error:
            refusals.append(str(error))
    assert len(refusals) == len(places)
    for message in refusals:
        assert "\n" not in message
        assert name.split(".")[0] in message or "shard 1 is missing" in message
    path.write_bytes(content)
    read_all(folder)


@pytest.mark.parametrize("field", ["source", "target"])
@pytest.mark.parametrize("bit", [0, 3, 6, 7, 15, 31])
@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_no_batch_lacks_a_pair_whose_length_is_damaged(folder, expected, field, bit, batching):
    path = folder / "000001.index.npy"
    index = np.load(path)
    index[field][7] ^= 1 << bit
    path.write_bytes(path.read_bytes()[: -index.nbytes] + index.tobytes())
    prepared = open_folder(folder)
    settings = TrainingConfig(max_tokens=200, bucket_count=2, pack_length=64, batching=batching)
    layout = epoch_layout(prepared, settings)
    with pytest.raises(InputError, match=r"000001\.(ids|index)\.npy: pair 7 is damaged") as refusal:
        list(epoch_batches(prepared, settings, layout, 0))
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_truncated_while_it_is_open_is_refused(folder):
    for name in FILES[:2]:
        copy = folder.parent / f"open-{name}"
        shutil.copytree(folder, copy)
        prepared = open_folder(copy)
        path = copy / name
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(InputError, match=f"{name}: pair 39 is damaged"):
            prepared.read(np.arange(len(prepared)))


def test_files_of_another_corpus_are_refused(folder, tmp_path, text):
    sources, targets = lines(90)
    swapped = write(tmp_path, targets, sources, name="swapped")  # as many pairs and ids
    other = corpus(tmp_path / "store", swapped).folder
    names = [f"000001.{ending}" for ending in ("ids.npy", "index.npy", "json")]
    original = {name: (folder / name).read_bytes() for name in names}
    for taken in (names, names[:1], names[1:2], names[2:], names[:2]):
        for name in names:
            (folder / name).write_bytes(original[name])
        for name in taken:
            shutil.copy(other / name, folder / name)
        refused(folder, *taken, names[0], "shard 1 is missing, truncated or of another corpus")
    for name in names:
        (folder / name).write_bytes(original[name])
        shutil.copy(folder / name.replace("000001", "000000"), folder / name)
    refused(folder, *names)  # a shard of the same corpus in the place of another one


def test_files_of_another_tokenizer_are_refused(folder, tmp_path, text):
    tokenizer = BytePairTokenizer.train([*WORDS[::-1], "zehn"], vocab_size=40)
    assert tokenizer.digest() != TOKENIZER.digest()
    other = corpus(tmp_path / "store", text, tokenizer=tokenizer).folder
    for path in other.glob("000001.*"):
        shutil.copy(path, folder)
    refused(folder, "shard 1 is missing, truncated or of another corpus")
    shutil.copy(other / MANIFEST, folder)
    refused(folder, "shard 0 is missing, truncated or of another corpus")
