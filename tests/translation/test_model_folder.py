"""Checkpoints come back bit for bit, are never half written, and damaged ones are refused."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest

from jax_transformer import InputError
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.translation import model_folder as checkpoint
from jax_transformer.translation.model_folder import check_free, load, save
from tests.models import random_params, tiny_checkpoint


@pytest.fixture(scope="module")
def trained():
    return tiny_checkpoint(["ein kleines Haus", "a small house"], vocab_size=30, d_model=6, d_ff=5)


@pytest.fixture
def directory(trained, tmp_path):
    save(tmp_path / "model", trained)
    return tmp_path / "model"


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def edit(path, change):
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


def test_comes_back_bit_for_bit(trained, directory):
    loaded = load(directory)
    assert loaded.config == trained.config
    assert loaded.tokenizer.digest() == trained.tokenizer.digest()
    assert jax.tree.structure(loaded.params) == jax.tree.structure(trained.params)
    for actual, expected in zip(
        *map(jax.tree.leaves, (loaded.params, trained.params)), strict=True
    ):
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def test_relative_paths_and_missing_parents_are_fine(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(checkpoint.Path("runs/0"), trained)
    assert load(checkpoint.Path("runs/0")).config == trained.config
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["0"]


def test_an_existing_checkpoint_is_kept_unless_told_otherwise(trained, directory):
    before = contents(directory)
    with pytest.raises(InputError, match="exists already"):
        save(directory, trained)
    assert contents(directory) == before

    other = trained._replace(params=random_params(trained.config, seed=1))
    save(directory, other, overwrite=True)
    assert not np.array_equal(
        *(jax.tree.leaves(one.params)[0] for one in (load(directory), trained))
    )
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_overwritten(trained, tmp_path, overwrite):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("x")
    for name in ("thesis", "link", "file", "file/model"):
        with pytest.raises(InputError, match=name):
            save(tmp_path / name, trained, overwrite=overwrite)
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "thesis"]


def test_checking_writes_nothing(tmp_path):
    check_free(tmp_path / "a" / "b", overwrite=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_fails_leaves_no_trace(trained, directory, monkeypatch, exists):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.ocp.StandardCheckpointer, "save", fail)
    before = contents(directory)
    target = directory if exists else directory.parent / "other"
    with pytest.raises(OSError, match="disk full"):
        save(target, trained, overwrite=True)
    assert contents(directory.parent) == before


def test_what_lies_beside_a_checkpoint_is_kept(trained, directory):
    (directory / "run").mkdir()
    (directory / "run" / "12").write_text("x")
    other = trained._replace(params=random_params(trained.config, seed=1))
    for write in (lambda: checkpoint.write(directory, other), lambda: save(directory, other, True)):
        write()
        assert (directory / "run" / "12").read_text() == "x"
        assert same_params(load(directory), other)


def same_params(one, other):
    return all(map(np.array_equal, *(jax.tree.leaves(model.params) for model in (one, other))))


def test_a_write_that_is_cut_off_leaves_a_whole_checkpoint_or_none(trained, tmp_path, monkeypatch):
    other = trained._replace(params=random_params(trained.config, seed=1))
    rename, outcomes = checkpoint.Path.rename, []
    for last in range(7):  # three renames of the old parts, three of the new ones
        save(tmp_path / str(last), trained)
        calls = iter(range(7))

        def cut_off(path, target, calls=calls, last=last):
            if next(calls) == last:
                raise OSError("killed")
            return rename(path, target)

        with monkeypatch.context() as broken:
            broken.setattr(checkpoint.Path, "rename", cut_off)
            with contextlib.suppress(OSError):
                checkpoint.write(tmp_path / str(last), other)
        try:
            outcomes.append("old" if same_params(load(tmp_path / str(last)), trained) else "new")
        except InputError:
            outcomes.append("none")
        if outcomes[-1] == "new":
            assert same_params(load(tmp_path / str(last)), other)
    assert outcomes == ["old", *["none"] * 5, "new"]


def test_an_arbitrary_directory_is_refused(tmp_path):
    for name in ("", "missing"):
        with pytest.raises(InputError, match="is no checkpoint directory"):
            load(tmp_path / name)


def test_every_file_is_needed(directory):
    for path in contents(directory):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(InputError) as refused:
            load(directory)
        assert str(path) in str(refused.value) or path.name == "config.json"
        path.write_bytes(content)
    load(directory)


def test_every_flipped_bit_is_found(directory):
    random = np.random.default_rng(0)
    tried = 0
    for path, content in contents(directory).items():
        if path.name == "config.json":
            continue
        for position in random.integers(0, len(content), 5):
            damaged = bytearray(content)
            damaged[position] ^= 1 << random.integers(8)
            path.write_bytes(damaged)
            with pytest.raises(InputError) as refused:
                load(directory)
            assert "\n" not in str(refused.value)
            tried += 1
        path.write_bytes(content)
    assert tried > 20
    load(directory)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is damaged"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"config": 3}', "is damaged"),
        ('{"config": {}, "parameters_sha256": 5}', "is damaged"),
        ('{"config": {}, "parameters_sha256": {}, "tokenizer": ""}', "is damaged"),
        ('{"config": {"width": 3}}', "width=3"),
        ('{"config": {"d_model": "wide"}}', "d_model='wide'"),
        ("\xff", "is damaged"),
    ],
)
def test_a_damaged_description_is_refused(directory, text, reason):
    (directory / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=rf"config\.json: .*{reason}"):
        load(directory)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"d_ff": 7}, r"feed_forward.*float32\[5\].*float32\[7\]"),
        ({"num_decoder_layers": 2}, r"decoder/layers_1/.* is missing"),
        ({"qkv_bias": False}, r"/bias is float32\[6\].* no parameter"),
        ({"tgt_vocab_size": 31}, "tgt_vocab_size=31"),
    ],
)
def test_a_config_that_the_parameters_do_not_fit_is_refused(directory, change, named):
    edit(directory / "config.json", lambda description: description["config"].update(change))
    with pytest.raises(InputError, match=named):
        load(directory)


@pytest.mark.parametrize("change", ["another", "two entries swapped", "an entry added"])
def test_another_tokenizer_is_refused(trained, directory, change):
    if change == "another":
        other = Tokenizer.train(["ein kleines Hsau", "a small hsoue"], vocab_size=30)
        assert other.vocab_size == trained.tokenizer.vocab_size
        other.save(directory / "tokenizer.json")
    else:
        vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
        swapped = {"a": vocab["e"], "e": vocab["a"]} if "swapped" in change else {"qq": len(vocab)}
        edit(
            directory / "tokenizer.json",
            lambda description: description["model"]["vocab"].update(swapped),
        )
        Tokenizer.load(directory / "tokenizer.json")  # in itself it is sound
    with pytest.raises(InputError, match="is not the tokenizer"):
        load(directory)


def test_parameters_of_another_precision_are_refused(trained, directory):
    half = trained._replace(
        params=jax.tree.map(lambda leaf: leaf.astype("float16"), trained.params)
    )
    save(directory, half, overwrite=True)
    with pytest.raises(InputError, match=r"is float16.* it is float32"):
        load(directory)


def test_the_config_is_the_one_saved(directory, trained):
    description = json.loads((directory / "config.json").read_text())
    assert description["config"] == dataclasses.asdict(trained.config)
