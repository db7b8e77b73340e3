"""Names of the Hugging Face hub: its cache first, one format of weights, and errors in one line."""

import os

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from jax_transformer import InputError
from jax_transformer.storage.hub import local_folder

NAME = "somebody/a-model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, empty; the working folder, empty too; a network that fails."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


def fill(cache, *names):
    """Write files as a download leaves them; return the folder of the snapshot."""
    model, commit = cache / "models--somebody--a-model", "0" * 40
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model-00001-of-00002.bin"])
def test_the_cache_is_used_without_the_network(cache, weights):
    snapshot = fill(cache, "config.json", weights)
    assert local_folder(NAME) == snapshot


def test_a_missing_model_is_downloaded_in_one_format(cache, monkeypatch):
    asked, there = [], {"*.json": "config.json", "pytorch_model*.bin": "pytorch_model.bin"}

    def download(name, *, allow_patterns, local_files_only):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing is cached")
        asked.append(allow_patterns)
        cache.mkdir(exist_ok=True)
        for pattern in there.keys() & {*allow_patterns}:
            (cache / there[pattern]).touch()
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_folder(NAME) == cache
    assert [patterns[-1] for patterns in asked] == ["model*.safetensors", "pytorch_model*.bin"]
    there["model*.safetensors"] = "model.safetensors"
    asked.clear()
    assert local_folder(NAME) == cache
    assert [patterns[-1] for patterns in asked] == ["model*.safetensors"]


def test_what_the_hub_does_not_give_is_one_line(cache, monkeypatch):
    with pytest.raises(InputError) as refused:
        local_folder(NAME)
    assert str(refused.value).startswith(f"{NAME}: is no folder here, and the Hugging Face hub")
    assert str(refused.value).endswith(f"fetch it with `hf download {NAME}`")
    monkeypatch.setitem(os.sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jax-transformer\[hub\]"'):
        local_folder(NAME)


def test_a_model_without_weights_is_refused(cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(cache))
    with pytest.raises(InputError, match=f"{NAME}: has neither of the weights"):
        local_folder(NAME)


@pytest.mark.parametrize("path", ["runs/1", "model", "a/b/c", "/absolute/x", "../x", "some body/x"])
def test_a_path_is_not_asked_for(cache, monkeypatch, path):
    """A folder `runs` exists here: a model that is missing in it is no name of the hub."""

    def refuse(*_, **__):
        raise OfflineModeIsEnabled("asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    os.mkdir("runs")
    assert str(local_folder(path)) == path
