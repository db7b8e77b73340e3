"""The output that a killed process goes on with: the same bytes, or one line that says why not."""

import fcntl
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from jax_transformer.errors import InputError
from jax_transformer.translation.resumable_file import check_input, resumable_file

LINES = [f"line {number}" for number in range(10)]
FACTS = {"beam_size": 4, "model": "abc"}


class Killed(BaseException):
    """A process that ends: nothing is tidied up."""


def write(path, lines=LINES, kill_at=None, every=3, facts=FACTS, **options):
    """Write the lines in capitals, and commit after every third; end before line `kill_at`."""
    options = {"resume": False, "overwrite": False} | options
    with resumable_file(path, facts, **options) as file:
        done = file.lines
        for number, line in enumerate(file.rest(lines), start=done + 1):
            if number == kill_at:
                raise Killed
            file.write(f"{line.upper()}\n".encode())
            if number % every == 0:
                file.commit()
    return done


@pytest.fixture
def path(tmp_path):
    return tmp_path / "output"


def killed(path, kill_at, **options):
    with pytest.raises(Killed):
        write(path, kill_at=kill_at, **options)


def whole():
    return "".join(f"{line.upper()}\n" for line in LINES).encode()


@pytest.mark.parametrize("kill_at", range(1, 11))
def test_a_killed_output_goes_on_to_the_same_bytes(path, kill_at):
    killed(path, kill_at)
    left = ["output.part", "output.part.json"] if kill_at > 3 else []  # nothing to go on with
    assert sorted(os.listdir(path.parent)) == left
    assert write(path, resume=True) == 3 * ((kill_at - 1) // 3)
    assert path.read_bytes() == whole()
    assert os.listdir(path.parent) == ["output"]


def test_bytes_behind_the_last_commit_are_dropped(path):
    killed(path, 8)
    with Path(f"{path}.part").open("ab") as part:
        part.write(b"half a li" * 100)  # more than the rest of the output
    killed(path, 10, resume=True)
    assert write(path, resume=True) == 9
    assert path.read_bytes() == whole()


@pytest.mark.parametrize("content", [b"", b"LINE 0\nLI"])
def test_killed_before_the_first_commit(path, content):
    with pytest.raises(Killed), mock.patch.object(Path, "unlink"):  # a process that is gone
        write(path, kill_at=2)
    Path(f"{path}.part").write_bytes(content)
    with pytest.raises(InputError, match="is an unfinished output"):
        write(path)
    assert write(path, resume=True) == 0
    assert path.read_bytes() == whole()


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_file_of_the_user_with_the_name_of_an_unfinished_output_is_kept(path, options):
    part = Path(f"{path}.part")
    part.write_text("of the user\n")
    with pytest.raises(InputError, match=r"output\.part: is (in the way|an unfinished output)"):
        write(path, **options)
    assert part.read_text() == "of the user\n"
    assert os.listdir(path.parent) == [part.name]


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, Path.touch, lambda path: path.symlink_to("a")]
)
def test_what_has_the_name_of_a_state_and_is_none_is_kept(path, make, options):
    """And a file of the user beside it; an empty file alone would be a state."""
    part, state = Path(f"{path}.part"), Path(f"{path}.part.json")
    make(state)
    for user_file in (None, path) if make is Path.touch else (None, path, part):
        if user_file is not None:
            user_file.write_text("of the user\n")
        names = sorted(os.listdir(path.parent))
        with pytest.raises(InputError, match=r"output\.part\.json: is in the way"):
            write(path, **options)
        assert sorted(os.listdir(path.parent)) == names
        if user_file is not None:
            assert user_file.read_text() == "of the user\n"
            user_file.unlink()


@pytest.mark.parametrize("name", ["output", "output.part", "output.part.json", "link"])
def test_an_input_that_would_be_written_is_refused(path, name):
    source = path.with_name(name)
    if name == "link":
        path.with_name("output.part").write_text("text\n")
        source.hardlink_to(path.with_name("output.part"))
    else:
        source.write_text("text\n")
    with pytest.raises(InputError, match="is the input and would be written"):
        check_input(source.stat(), path)
    check_input(source.stat(), path.with_name("another"))


def test_nothing_is_replaced_unasked(path):
    killed(path, 7)
    part, state = Path(f"{path}.part"), Path(f"{path}.part.json")
    before = part.read_bytes(), state.read_bytes()

    def refused(message, **options):
        with pytest.raises(InputError, match=message) as error:
            write(path, **options)
        assert "\n" not in str(error.value)

    refused(r"output\.part: is an unfinished output; resume it, overwrite it")
    refused(
        "beam_size=5 is not that of the unfinished", resume=True, facts=FACTS | {"beam_size": 5}
    )
    refused("was made of another input.*first 6 lines", resume=True, lines=["x", *LINES[1:]])
    refused("was made of another input", resume=True, lines=LINES[:4])
    refused("resume=True continues .* overwrite=True replaces", resume=True, overwrite=True)
    assert (part.read_bytes(), state.read_bytes()) == before
    state.write_text("[]")
    refused(r"output\.part\.json: is damaged", resume=True)
    state.write_bytes(before[1])
    os.truncate(part, 3)
    refused(r"output\.part: is shorter than it was", resume=True)

    killed(path, 5, overwrite=True)
    assert json.loads(state.read_text())["lines"] == 3
    write(path, overwrite=True)
    assert path.read_bytes() == whole()
    refused(r"output: exists already; name another output or overwrite it \(--overwrite\)")
    refused("output: exists already", resume=True)
    assert path.read_bytes() == whole()
    write(path, lines=LINES[:2], overwrite=True)
    assert path.read_bytes() == b"LINE 0\nLINE 1\n"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "output"):
        with pytest.raises(InputError, match="is a folder, or lies in no writable folder"):
            write(path)


def test_links_are_replaced_not_followed(path, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path.symlink_to(precious)
    write(path, overwrite=True)
    assert not path.is_symlink()
    path.unlink()
    Path(f"{path}.part").symlink_to(precious)
    with pytest.raises(InputError, match="is in the way"):
        write(path, overwrite=True)
    assert precious.read_text() == "precious"


def test_two_processes_do_not_share_an_output(path):
    with resumable_file(path, FACTS, resume=False, overwrite=False) as file:
        list(file.rest(LINES))
        with pytest.raises(InputError, match=r"output\.part: another process is writing it"):
            write(path, resume=True)
        file.write(whole())
    assert path.read_bytes() == whole()


def test_an_unfinished_output_that_was_to_replace_another_is_resumed(path):
    path.write_text("old\n")
    killed(path, 8, overwrite=True)
    assert path.read_text() == "old\n"
    assert write(path, resume=True) == 6
    assert path.read_bytes() == whole()
    assert os.listdir(path.parent) == ["output"]


def test_a_file_that_has_appeared_beside_an_unfinished_output_is_kept(path):
    killed(path, 8)
    path.write_text("of somebody else\n")
    with pytest.raises(InputError, match="exists already"):
        write(path, resume=True)
    assert path.read_text() == "of somebody else\n"


def test_what_a_kill_at_the_very_end_has_left_is_removed_by_the_next_output(path):
    with mock.patch.object(Path, "unlink"):  # a process that is gone
        write(path)
    assert sorted(os.listdir(path.parent)) == ["output", "output.part.json"]
    with pytest.raises(InputError, match="exists already"):
        write(path, resume=True)
    write(path, lines=LINES[:2], overwrite=True)
    assert path.read_bytes() == b"LINE 0\nLINE 1\n"
    assert os.listdir(path.parent) == ["output"]


@pytest.mark.parametrize("lines", [-1, 10**30, 1.5, None])
def test_a_state_with_impossible_numbers_is_one_line(path, lines):
    killed(path, 7)
    state = Path(f"{path}.part.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"lines": lines}))
    with pytest.raises(InputError, match=r"output\.part\.json: is damaged .*overwrite"):
        write(path, resume=True)


@pytest.mark.parametrize(
    ("before", "options"),
    [
        *((True, options) for options in ({}, {"resume": True}, {"overwrite": True})),
        *((False, options) for options in ({}, {"resume": True})),
    ],
)
def test_an_output_that_another_process_finishes_meanwhile_is_kept(
    path, monkeypatch, before, options
):
    """It does so just before or after this one locks the unfinished output."""
    flock = fcntl.flock

    def finish_and_lock(file, how):
        if before:
            Path(f"{path}.part").write_bytes(whole())
            os.replace(f"{path}.part", path)
        else:
            path.write_bytes(whole())
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", finish_and_lock)
    fault = "another process has just finished it" if before else "output: exists already"
    with pytest.raises(InputError, match=fault):
        write(path, lines=LINES[:2], **options)
    assert path.read_bytes() == whole()
    assert before or os.listdir(path.parent) == ["output"]
