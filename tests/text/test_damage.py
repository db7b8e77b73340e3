"""Whatever is wrong with the files of a prepared corpus is one line, and never a wrong pair."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.text.batches import epoch_batches
from jax_transformer.text.plan import epoch_layout
from jax_transformer.text.prepare import IDS, INDEX, MANIFEST, open_folder
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from tests.text.texts import TOKENIZER, WORDS, corpus, lines, write
from tests.tiers import tiered

FILES = (IDS, INDEX, MANIFEST)


@pytest.fixture
def text(tmp_path):
    return write(tmp_path, *lines(90))


@pytest.fixture
def folder(tmp_path, text, one_process):
    """Three blocks of 90 pairs, in a folder of their own."""
    part = corpus(tmp_path / "store", text).parts[0]
    return Path(shutil.copytree(part.folder, tmp_path / "copy"))


def read_all(folder):
    """Return the ids of each pair, read one by one."""
    prepared = open_folder(folder)
    return [prepared.read(np.array([pair])) for pair in range(len(prepared))]


def refused(folder, *names):
    """Check that opening or reading is refused in one line with one of the names."""
    with pytest.raises(InputError) as refusal:
        read_all(folder)
    message = str(refusal.value)
    assert any(str(folder / name) in message for name in names), message
    assert "start again" in message


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 0.5, -1, None])
def test_a_file_that_is_truncated_or_missing_is_refused(folder, name, left):
    path = folder / name
    content = path.read_bytes()
    if left is None:
        path.unlink()
    else:
        path.write_bytes(content[: left if left == -1 else int(left * len(content))])
    refused(folder, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("flips", tiered([15, 50], quick=[15]))
def test_a_flipped_bit_is_refused(folder, name, flips):
    path = folder / name
    content, generator = path.read_bytes(), random.Random(0)
    for place in range(0, len(content), 1 + len(content) // flips):
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        refused(folder, name, IDS)  # a row of the index that is possible is noticed by the ids
    path.write_bytes(content)
    read_all(folder)


@pytest.mark.parametrize("field", ["source", "target"])
@pytest.mark.parametrize("bit", tiered([0, 3, 6, 7, 15, 31], quick=[0, 31]))
@pytest.mark.parametrize("batching", tiered(["buckets", "packed"], quick=["buckets"]))
def test_no_batch_lacks_a_pair_whose_length_is_damaged(folder, field, bit, batching):
    part = open_folder(folder).parts[0]
    index = part.index[0 : part.counts.pairs].copy()
    index[field][47] ^= 1 << bit
    (folder / INDEX).write_bytes(index.tobytes())
    prepared = open_folder(folder)
    settings = TrainingConfig(max_tokens=200, bucket_count=2, pack_length=64, batching=batching)
    layout = epoch_layout(prepared, settings)
    with pytest.raises(InputError, match=r"/(ids|index): pair 47 is damaged"):
        list(epoch_batches(prepared, settings, layout, 0))


@pytest.mark.parametrize("name", [IDS, INDEX])
def test_a_file_that_is_truncated_while_it_is_open_is_refused(folder, name):
    prepared = open_folder(folder)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{name}: pair 89 is damaged"):
        prepared.read(np.arange(len(prepared)))


def test_files_of_another_corpus_or_tokenizer_are_refused(folder, tmp_path, text):
    sources, targets = lines(90)
    swapped = write(tmp_path, targets, sources, name="swapped")  # as many pairs and ids
    tokenizer = train_byte_pair([*WORDS[::-1], "zehn"], vocab_size=40)
    assert tokenizer.digest() != TOKENIZER.digest()
    original = {name: (folder / name).read_bytes() for name in FILES}
    for foreign in (
        corpus(tmp_path / "store", swapped).parts[0].folder,
        corpus(tmp_path / "store", text, tokenizer=tokenizer).parts[0].folder,
    ):
        for names in ((IDS,), (INDEX,), (MANIFEST,), (IDS, INDEX), (IDS, MANIFEST)):
            for name in FILES:
                (folder / name).write_bytes(original[name])
            for name in names:
                shutil.copy(foreign / name, folder / name)
            refused(folder, IDS, INDEX)
