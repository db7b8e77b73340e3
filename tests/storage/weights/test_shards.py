"""Weights in shards: the names and the split of transformers, and hostile indices."""

import json
import os

import huggingface_hub
import numpy as np
import pytest
import torch

from jax_transformer.errors import InputError
from jax_transformer.storage import weights as weight_files
from jax_transformer.storage.weights.checks import WeightFileError
from jax_transformer.storage.weights.shards import (
    INDEX_FILE,
    parse_shard_size,
    read_weights,
    split,
    stale_files,
    weight_names,
    write_weights,
)
from tests.convert.tools import assert_same_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def arrays(*lengths):
    return {
        f"w{index}": np.arange(length, dtype=np.float32) for index, length in enumerate(lengths)
    }


@pytest.fixture
def folder(tmp_path):
    tensors = arrays(3, 4, 5)
    write_weights(tmp_path, tensors, split(tensors, 30))
    assert weight_names(tmp_path) == [INDEX_FILE, FIRST, SECOND]
    return tmp_path


@pytest.mark.parametrize("lengths", [(1, 1), (3, 4, 5), (5, 9, 1, 9, 2, 2), (20,), (20, 1, 20, 1)])
@pytest.mark.parametrize("limit", [4, 12, 28, 36, 80, "1KB"])
def test_the_split_is_that_of_huggingface_hub(lengths, limit):
    tensors = arrays(*lengths)
    theirs = huggingface_hub.split_torch_state_dict_into_shards(
        {name: torch.from_numpy(array) for name, array in tensors.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    assert split(tensors, limit) == theirs.filename_to_tensors


def test_an_index_is_written_and_read(folder):
    index = json.loads((folder / INDEX_FILE).read_text())
    shards = {"w0": FIRST, "w1": FIRST, "w2": SECOND}
    assert index == {"metadata": {"total_size": 48}, "weight_map": shards}
    assert_same_tensors(read_weights(folder), arrays(3, 4, 5))


def test_shards_of_torch_are_read(tmp_path):
    tensors, shards = arrays(3, 4), {"w0": "pytorch_model-1.bin", "w1": "pytorch_model-2.bin"}
    for name, shard in shards.items():
        weight_files.write(tmp_path / shard, {name: tensors[name]})
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert_same_tensors(read_weights(tmp_path), tensors)
    index.write_text(json.dumps({"weight_map": shards | {"w0": "w.safetensors"}}))
    with pytest.raises(InputError, match=r"w0 is in 'w.safetensors', which is not the name of a"):
        read_weights(tmp_path)


def test_files_are_preferred_as_by_transformers(folder):
    single = arrays(7)
    weight_files.write(folder / "pytorch_model.bin", arrays(1))
    assert weight_names(folder)[0] == INDEX_FILE
    weight_files.write(folder / "model.safetensors", single)
    assert_same_tensors(read_weights(folder), single)
    for name in ("model.safetensors", INDEX_FILE):
        (folder / name).unlink()
    assert weight_names(folder) == ["pytorch_model.bin"]
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"holds none of model\.safetensors, model\.safe"):
        read_weights(folder)


def test_sizes():
    sizes = {1: 1, "5GB": 5e9, "1.5 kb": 1500, " 2MB ": 2e6, "1TB": 1e12}
    assert {size: parse_shard_size(size) for size in sizes} == sizes
    for size in (0, -1, "5", "5G", "GB", "0.0001KB", "-1GB", "٣GB", "1e3GB", ""):
        with pytest.raises(InputError, match=r"max_shard_size=.* must be a number of bytes"):
            parse_shard_size(size)


OUTSIDE = ("../{0}", "/{0}", "sub/{0}", "..\\{0}", "{0}\n", "\x1b{0}", "..", "", "w" * 300 + "{0}")


@pytest.mark.parametrize("name", OUTSIDE, ids=range(len(OUTSIDE)))
def test_a_shard_outside_the_folder_is_refused_unread(folder, name, monkeypatch):
    """Also where such a file is there."""
    shard = name.format(SECOND)
    monkeypatch.setattr(weight_files.formats, "read", lambda *_: pytest.fail("was read"))
    text = json.dumps({"weight_map": {"w0": FIRST, "w1": FIRST, "w2": shard}})
    (folder / INDEX_FILE).write_text(text)
    with pytest.raises(WeightFileError, match=r"w2 is in .* which is not the name") as refused:
        read_weights(folder)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


MAP = {"w0": FIRST, "w1": FIRST, "w2": SECOND}
BAD = {
    "missing shard": ({**MAP, "w3": "model-3.safetensors"}, "shard model-3.safetensors is missing"),
    "not in its shard": ({**MAP, "w3": SECOND}, f"{SECOND}: 'w3' is in the index, but not in"),
    "unnamed": ({"w0": FIRST, "w2": SECOND}, f"{FIRST}: 'w1' is not of this shard"),
    "in another shard": ({**MAP, "w1": SECOND}, f"{FIRST}: 'w1' is not of this shard"),
    "path as tensor": ({**MAP, "../w": SECOND}, "the tensor name '../w' must be"),
    "number as shard": ({**MAP, "w2": 7}, "w2 is in 7, which is not"),
    "list": ([FIRST], "weight_map must be an object"),
    "empty": ({}, "weight_map must be an object"),
    "absent": (None, "weight_map must be an object"),
    "twice": ('{"weight_map": {"a": 1, "a": 2}}', f"{INDEX_FILE}: the name 'a' occurs 2 times"),
    "no JSON": ('{"weight_map": NaN', f"{INDEX_FILE} is no readable JSON"),
    "huge": ('{"weight_map": {}}' + " " * 2**20, f"{INDEX_FILE} is no regular file of at most"),
}


@pytest.mark.parametrize(("index", "message"), BAD.values(), ids=BAD)
def test_an_index_that_disagrees_or_is_damaged_is_refused(folder, index, message):
    is_text = isinstance(index, str)
    (folder / INDEX_FILE).write_text(index if is_text else json.dumps({"weight_map": index}))
    with pytest.raises(InputError if is_text else WeightFileError, match=message) as refused:
        read_weights(folder)
    assert "\n" not in str(refused.value)


def test_links_to_shards_are_followed_and_other_things_are_no_files(folder, tmp_path_factory):
    """The cache of huggingface_hub holds links, of single files as of shards."""
    links = tmp_path_factory.mktemp("links")
    for name in (INDEX_FILE, FIRST, SECOND):
        (links / name).symlink_to(folder / name)
    assert_same_tensors(read_weights(links), arrays(3, 4, 5))
    (links / SECOND).unlink()
    (links / SECOND).symlink_to(links / "nothing")
    with pytest.raises(WeightFileError, match=f"{SECOND} cannot be read"):
        read_weights(links)
    (links / SECOND).unlink()
    os.mkfifo(links / SECOND)
    with pytest.raises(WeightFileError, match=f"{SECOND} is no regular file"):
        read_weights(links)


def test_stale_files_are_those_of_another_split(folder):
    assert stale_files(folder, [INDEX_FILE, FIRST, SECOND]) == []
    assert stale_files(folder, ["model.safetensors"]) == [FIRST, SECOND, INDEX_FILE]
    (folder / "my-00001-of-00002.safetensors").touch()
    (folder / "model.safetensors").touch()
    assert stale_files(folder, [INDEX_FILE, FIRST, SECOND]) == ["model.safetensors"]
    assert stale_files(folder / "absent", ["model.safetensors"]) == []
