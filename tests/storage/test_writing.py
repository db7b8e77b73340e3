"""A file is written whole or not at all, and nothing at its place is followed."""

import errno
import os

import pytest

from jax_transformer import InputError
from jax_transformer.storage.writing import replace_file, staged_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_new_or_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (b"old", b"new, and longer", b""):
        replace_file(tmp_path.__class__("file.txt"), content)
        assert (tmp_path / "file.txt").read_bytes() == content
    (tmp_path / "plain").touch()
    assert (tmp_path / "file.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert names(tmp_path) == ["file.txt", "plain"]


@pytest.mark.parametrize("kind", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, kind):
    (tmp_path / "file").write_text("old")

    def interrupted():
        with staged_file(tmp_path / "file") as scratch:
            scratch.write_text("new")
            raise kind

    with pytest.raises(type(kind)):
        interrupted()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("place", ["file", ".writing.file"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo"])
def test_what_stands_in_its_place_is_replaced_and_not_followed(tmp_path, place, kind):
    (tmp_path / "precious").write_text("years of work")
    planted = tmp_path / place
    if kind == "fifo":
        os.mkfifo(planted)
    else:
        planted.symlink_to(tmp_path / ("precious" if kind == "link" else "nowhere"))
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "precious").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()
    assert names(tmp_path) == ["file", "precious"]


@pytest.mark.parametrize("place", ["file", ".writing.file"])
def test_a_folder_in_its_place_is_refused_in_one_line(tmp_path, place):
    (tmp_path / place).mkdir()
    with pytest.raises(InputError, match=r"file cannot be written \(IsADirectoryError: Is a dir"):
        replace_file(tmp_path / "file", b"new")
    assert names(tmp_path) == [place]
    with pytest.raises(InputError, match=r"file cannot be written \(FileNotFoundError"):
        replace_file(tmp_path / "missing" / "file", b"new")


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with staged_file(tmp_path / "file") as scratch:
        scratch.write_text("first")
        with pytest.raises(InputError, match="another process is writing it; wait"):
            replace_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_text() == "first"


def test_a_writer_that_waited_at_the_name_of_a_finished_one_begins_again(tmp_path, monkeypatch):
    """Between opening and locking, the other writer may have given its file the final name."""
    import fcntl

    flock, calls = fcntl.flock, []

    def finish_first(descriptor, operation):
        if not calls:
            os.replace(tmp_path / ".writing.file", tmp_path / "file")
        calls.append(operation)
        flock(descriptor, operation)

    (tmp_path / ".writing.file").write_text("of the other writer")
    monkeypatch.setattr(fcntl, "flock", finish_first)
    with staged_file(tmp_path / "file") as scratch:
        assert (tmp_path / "file").read_text() == "of the other writer"
        scratch.write_text("new")
    assert len(calls) == 2
    assert (tmp_path / "file").read_text() == "new"
