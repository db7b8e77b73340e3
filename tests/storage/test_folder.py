"""A folder of files is written whole or not at all, and nothing is replaced by mistake."""

import contextlib
import errno
import json
import os
import shutil

import pytest

from jax_transformer import InputError
from jax_transformer.storage.folder import check_free, check_writable, mend, staged

OLD = {"config.json": "old config", "model.safetensors": "old weights"}
NEW = {name: f"new {name}" for name in (*OLD, "added.json", "tokenizer.json")}


@pytest.fixture
def folder(tmp_path):
    """A folder with the old files and one that is no file of the model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in OLD.items():
        (folder / name).write_text(text)
    (folder / "run").mkdir()
    (folder / "run" / "12").write_text("kept")
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
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
    write(folder)
    assert contents(folder) == NEW | {"run/12": "kept"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


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
@pytest.mark.parametrize("last", range(4))
def test_a_failure_while_the_files_are_moved_puts_the_old_ones_back(
    folder, monkeypatch, last, links
):
    if not links:  # as on a disk without hard links

        def refuse(*_, **__):
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    replace, calls = os.replace, iter(range(4))

    def fail(source, target):
        if next(calls, None) == last:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    before = contents(folder)
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail)
        with pytest.raises(InputError, match="Input/output error"):
            write(folder)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    write(folder)
    assert contents(folder) == NEW | {"run/12": "kept"}


def test_a_name_that_belongs_to_a_folder_leaves_the_old_files(folder):
    (folder / "tokenizer.json").mkdir()
    before = contents(folder)
    with pytest.raises(InputError, match=r"tokenizer\.json: is a folder; remove it"):
        check_writable(folder, NEW)
    with pytest.raises(InputError, match="cannot be written"):
        write(folder)
    assert contents(folder) == before
    assert (folder / "tokenizer.json").is_dir()


def test_a_link_is_replaced_and_never_followed(folder, tmp_path):
    (tmp_path / "precious").write_text("years of work")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "precious")
    (folder / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    write(folder)
    assert (tmp_path / "precious").read_text() == "years of work"
    assert not (tmp_path / "nowhere").exists()
    assert not any((folder / name).is_symlink() for name in NEW)
    assert contents(folder) == NEW | {"run/12": "kept"}


def test_what_a_killed_writer_has_left_is_removed(folder, tmp_path):
    with contextlib.suppress(RuntimeError), staged(folder) as staging:
        (staging / "model.safetensors").write_text("half")
        shutil.copytree(staging.parent, tmp_path / "copy")
        raise RuntimeError
    (tmp_path / "copy").rename(staging.parent)  # as a kill leaves it: without a lock
    write(folder)
    assert contents(folder) == NEW | {"run/12": "kept"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_two_writers_of_one_folder_do_not_meet(folder):
    with staged(folder) as staging:
        with (
            pytest.raises(InputError, match="another process is writing it; wait"),
            staged(folder),
        ):
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
    assert contents(folder) == OLD | {"run/12": "kept"}


def test_a_mount_point_is_written_from_within_its_own_disk(folder, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == folder)
    with staged(folder) as staging:
        assert staging.is_relative_to(folder)
        (staging / "config.json").write_text("new config")
    assert contents(folder) == OLD | {"config.json": "new config", "run/12": "kept"}
    assert not list(folder.glob(".*"))


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


def left_by_a_kill(folder, created):
    """Make a staging folder as of a writer that was killed while it moved its files."""
    staging = folder.with_name(f".writing.{folder.name}")
    (staging / "old").mkdir(parents=True)
    (staging / "new").mkdir()
    (staging / "old" / "config.json").write_text("old config")
    (staging / "journal.json").write_text(json.dumps({"created": created}))
    return staging


def test_a_reader_puts_the_old_files_back(folder):
    left_by_a_kill(folder, ["tokenizer.json"])
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("new")
    mend(folder)
    assert contents(folder) == OLD | {"run/12": "kept"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_folder_that_is_reached_by_a_link_is_mended(folder, tmp_path):
    left_by_a_kill(folder, [])
    (folder / "config.json").write_text("new")
    (tmp_path / "link").symlink_to(folder)
    mend(tmp_path / "link")
    assert contents(folder) == OLD | {"run/12": "kept"}


@pytest.mark.parametrize(
    "created", [["../precious"], ["/etc/passwd"], [".."], "config.json", [3], None]
)
def test_a_journal_from_somebody_else_names_only_files_of_its_folder(folder, tmp_path, created):
    (tmp_path / "precious").write_text("years of work")
    staging = left_by_a_kill(folder, created)
    with pytest.raises(InputError, match=r"journal\.json: is damaged; copy the folder again"):
        mend(folder)
    assert (tmp_path / "precious").read_text() == "years of work"
    assert contents(folder) == OLD | {"run/12": "kept"}
    assert staging.exists()


def test_a_running_writer_is_not_disturbed_and_one_that_moves_files_is_waited_for(
    folder, monkeypatch
):
    with staged(folder) as staging:
        (staging / "config.json").write_text("new config")
        mend(folder)
        (staging.parent / "journal.json").touch()
        monkeypatch.setattr("jax_transformer.storage.folder.LONGEST_WAIT", 0.05)
        with pytest.raises(InputError, match="another process is writing it"):
            mend(folder)
        (staging.parent / "journal.json").unlink()
    assert (folder / "config.json").read_text() == "new config"


def test_half_a_folder_that_cannot_be_mended_is_refused_in_one_line(folder, monkeypatch):
    left_by_a_kill(folder, [])

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as read_only:
        read_only.setattr(os, "replace", refuse)
        with pytest.raises(InputError, match=r"half-written, and it cannot be mended \(Read-only"):
            mend(folder)
    mend(folder)
    assert contents(folder) == OLD | {"run/12": "kept"}
