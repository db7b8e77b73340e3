"""A folder of files is written whole or not at all, and nothing is replaced by mistake."""

import contextlib
import ctypes
import errno
import os
import shutil

import pytest

from jax_transformer import InputError
from jax_transformer.storage.folder import check_free, check_writable, staged
from jax_transformer.translation.model_folder import load, save
from tests.models import tiny_model

OLD = {"config.json": "old config", "model.safetensors": "old weights"}
NEW = {name: f"new {name}" for name in (*OLD, "added.json", "tokenizer.json")}


@pytest.fixture
def folder(tmp_path):
    """A folder with the old files and one that is no file of the model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in OLD.items():
        (folder / name).write_text(text)
    (folder / "notes").write_text("kept")
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().decode("latin-1")
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(folder, texts=NEW):
    with staged(folder) as staging:
        for name, text in texts.items():
            (staging / name).write_text(text)


def test_a_new_folder_appears_with_its_parents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path.__class__("a/b"))
    assert contents(tmp_path) == {f"a/b/{name}": text for name, text in NEW.items()}
    assert not list((tmp_path / "a").glob(".*"))
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "a" / "b").stat().st_mode == plain.stat().st_mode


def test_files_of_the_same_name_are_replaced_and_others_stay(folder):
    os.mkfifo(folder / "waiting")  # which nobody waits for
    write(folder)
    assert (folder / "waiting").is_fifo()
    assert contents(folder) == NEW | {"notes": "kept"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_umask_that_closes_the_new_folder_leaves_none(tmp_path, monkeypatch):
    def denied(path, *arguments):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "open", denied)  # root may open it in spite of the umask
    with pytest.raises(InputError, match=r"model cannot be written \(PermissionError"):
        write(tmp_path / "model")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failure_while_the_files_are_written_changes_nothing(folder, kind, exists):
    before = contents(folder.parent)
    target = folder if exists else folder.parent / "other"
    expected = InputError if isinstance(kind, OSError) else KeyboardInterrupt

    def interrupted():
        with staged(target) as staging:
            (staging / "config.json").write_text("new config")
            raise kind

    with pytest.raises(expected) as raised:
        interrupted()
    assert contents(folder.parent) == before
    assert {path.name for path in folder.parent.iterdir()} == {"model"}
    if expected is InputError:
        assert str(raised.value) == f"{target} cannot be written (OSError: No space left)"


@pytest.mark.parametrize("links", [True, False])
def test_a_failure_of_the_rename_changes_nothing(folder, monkeypatch, links):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    if not links:  # as on a disk without hard links
        monkeypatch.setattr(os, "link", fail)
    before = contents(folder)
    with monkeypatch.context() as broken:
        broken.setattr("jax_transformer.storage.folder._exchange", fail)
        with pytest.raises(InputError, match="Input/output error"):
            write(folder)
    assert contents(folder.parent) == {f"model/{name}": text for name, text in before.items()}
    write(folder)
    assert contents(folder) == NEW | {"notes": "kept"}


def test_a_system_that_cannot_exchange_renames_twice(folder, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    write(folder)
    assert contents(folder.parent) == {
        f"model/{name}": text for name, text in (NEW | {"notes": "kept"}).items()
    }
    # A kill between the two leaves the old folder under its hidden name.
    hidden = folder.with_name(".writing.model")
    hidden.mkdir()
    folder.rename(hidden / "old")
    write(folder, {"config.json": "newer"})
    assert contents(folder) == NEW | {"notes": "kept", "config.json": "newer"}


def test_a_folder_inside_is_refused_and_nothing_is_changed(folder):
    (folder / "run").mkdir()
    before = contents(folder)
    for refusing in (lambda: check_writable(folder), lambda: write(folder)):
        with pytest.raises(InputError, match=r"run: is a folder, which would not be in the new"):
            refusing()
    assert contents(folder) == before


def test_a_link_is_replaced_and_never_followed(folder, tmp_path):
    (tmp_path / "precious").write_text("years of work")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "precious")
    (folder / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    write(folder)
    assert (tmp_path / "precious").read_text() == "years of work"
    assert not (tmp_path / "nowhere").exists()
    assert not any((folder / name).is_symlink() for name in NEW)
    assert contents(folder) == NEW | {"notes": "kept"}


def test_what_a_killed_writer_has_left_is_removed(folder, tmp_path):
    with contextlib.suppress(RuntimeError), staged(folder) as staging:
        (staging / "model.safetensors").write_text("half")
        shutil.copytree(staging.parent, tmp_path / "copy")
        raise RuntimeError
    (tmp_path / "copy").rename(staging.parent)  # as a kill leaves it: without a lock
    write(folder)
    assert contents(folder) == NEW | {"notes": "kept"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_two_writers_of_one_folder_do_not_meet(folder):
    with staged(folder) as staging:
        with pytest.raises(InputError, match="another process is writing it; wait"), staged(folder):
            pytest.fail("the folder is being written")
        (staging / "config.json").write_text("new config")
    assert (folder / "config.json").read_text() == "new config"


def test_a_planted_link_in_place_of_the_staging_folder_is_not_followed(folder, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_text("years of work")
    (tmp_path / ".writing.model").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot be written"):
        write(folder)
    assert (tmp_path / "precious" / "thesis").read_text() == "years of work"
    assert contents(folder) == OLD | {"notes": "kept"}


def test_a_planted_link_in_place_of_an_older_folder_is_not_followed(tmp_path):
    victim, hidden = tmp_path / "victim", tmp_path / ".writing.model"
    for path in (victim, hidden):
        path.mkdir()
    (victim / "thesis.tex").write_text("years of work")
    (hidden / "old").symlink_to(victim)
    write(tmp_path / "model")
    assert "thesis.tex" not in contents(tmp_path / "model")
    assert (victim / "thesis.tex").stat().st_nlink == 1


def test_a_mount_point_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == folder)
    with pytest.raises(InputError, match="is a link, a mount point or not a folder"):
        check_writable(folder)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_may_not_be_replaced_is_refused_before_any_work(tmp_path, folder, overwrite):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "linked model").symlink_to(folder)
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    (tmp_path / "broken" / "model.safetensors").mkdir()
    before = {*tmp_path.rglob("*")}
    names = ["thesis", "link", "linked model", "file", "file/model", "link/model", "broken"]
    for name in [*names, "x" * 300, "x" * 250]:
        with pytest.raises(InputError) as refused:
            check_free(tmp_path / name, overwrite)
        assert str(refused.value).startswith(str(tmp_path / name))
        assert "\n" not in str(refused.value)
    assert {*tmp_path.rglob("*")} == before


def test_what_is_free_is_accepted_and_not_touched(tmp_path, folder):
    before = {*tmp_path.rglob("*")}
    check_free(tmp_path / "a" / "b", overwrite=False)
    check_free(folder, overwrite=True)
    with pytest.raises(InputError, match="exists already"):
        check_free(folder, overwrite=False)
    assert {*tmp_path.rglob("*")} == before


def test_reading_changes_nothing_whatever_lies_beside_the_model(tmp_path):
    """An archive may bring a hidden folder, with links to files of whoever reads the model."""
    model, hidden, precious = (tmp_path / name for name in ("model", ".writing.model", "precious"))
    save(model, tiny_model(["a b c"], 12))
    (precious / "work").mkdir(parents=True)
    (precious / "work" / "thesis").write_text("years of work")
    (model / "thesis.tex").write_text("years of work")
    hidden.mkdir()
    (hidden / "old").symlink_to(precious / "work")
    (hidden / "journal.json").write_text('{"created": ["thesis.tex", "config.json"]}')
    before = contents(tmp_path)
    load(model)
    assert contents(tmp_path) == before
    save(model, tiny_model(["a b c"], 12), overwrite=True)  # a writer removes the hidden folder
    assert (precious / "work" / "thesis").read_text() == "years of work"
    assert (model / "thesis.tex").read_text() == "years of work"
    assert not hidden.exists()
