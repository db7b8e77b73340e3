"""Damaged checkpoints are found and passed over; a save that fails is told and damages nothing."""

import contextlib
import errno
import json
import os
import shutil
import sys
import time
import types
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from jax_transformer import InputError
from jax_transformer.runs.checkpoints import (
    CheckpointWriter,
    DescribingHandler,
    _in_one_line,
    _orbax_quiet,
    restore,
    steps_in,
)
from tests.programs import largest_file
from tests.runs.runs import make_checkpoint, make_settings, quiet, same_bits, save
from tests.tiers import tiered


def damages(directory, step):
    """Yield (what, how) of every way to spoil a file of a step."""

    ways = {
        "delete": Path.unlink,
        "truncate": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "flip a bit": _flip,
    }
    for path in sorted((directory / str(step)).rglob("*")):
        if path.is_file() and path.stat().st_size:
            for way, damage in ways.items():
                yield f"{way} {path.relative_to(directory / str(step))}", path, damage


@pytest.mark.exhaustive
def test_every_damage_of_the_newest_step_is_found_and_the_one_before_taken(
    settings, saved, tmp_path, capfd
):
    tried, caught, harmless, wrong = 0, 0, 0, 0
    for what, path, damage in damages(saved, 8):
        directory = Path(shutil.copytree(saved, tmp_path / "run"))
        damage(directory / path.relative_to(saved))
        shown = quiet()
        restored = restore(directory, shown).read()
        step, lines = restored.progress.step, shown.file.getvalue()
        tried += 1
        if step == 4:
            caught += 1
            wrong += not same_bits(restored, make_checkpoint(settings, 4))
            assert lines.count("\n") == 1, what
            assert "8 is damaged (" in lines, what
            assert steps_in(directory) == [0, 4], what
        else:  # of files that nothing of the run is in, such as orbax's mark of completeness
            harmless += 1
            wrong += not same_bits(restored, make_checkpoint(settings, 8))
            assert lines == "", what
        shutil.rmtree(directory)
    assert capfd.readouterr().err == ""  # no library complains beside the one line
    print(f"{tried} damages: {caught} caught, {harmless} harmless, {wrong} wrongly accepted")
    assert tried > 25
    assert wrong == 0
    assert harmless <= 3  # orbax's mark of completeness


DAMAGES = {
    "file truncated": lambda step: _newest_array(step).write_bytes(b"x"),
    "file of a terabyte": lambda step: os.truncate(_newest_array(step), 2**40),
    "file deleted": lambda step: _newest_array(step).unlink(),
    "bit flipped": lambda step: _flip(_newest_array(step)),
    "_METADATA gone": lambda step: (step / "_METADATA").unlink(),
    "number changed": lambda step: _count_fewer(step / "run.json"),
    "description gone": lambda step: (step / "run.json").unlink(),
    "FIFO in place of the description": lambda step: _fifo(step / "run.json"),
    "FIFO in place of an array": lambda step: _fifo(_newest_array(step)),
    "of another step": lambda step: (shutil.rmtree(step), shutil.copytree(step.parent / "0", step)),
    "empty directory": lambda step: (shutil.rmtree(step), step.mkdir()),
}


def _newest_array(step):
    return max((step / "d").iterdir(), key=lambda path: path.stat().st_size)


def _count_fewer(path):
    read = json.loads(path.read_text())
    read["content"]["progress"]["rejected"] -= 1
    path.write_text(json.dumps(read))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_run_goes_on_from_the_step_before_a_damaged_one(settings, directory, damage):
    damage(directory / "8")
    (directory / "007").mkdir()  # no step's name
    (directory / "9").mkdir()  # and beside it an empty step that is newer still
    shown = quiet()
    assert restore(directory, shown).progress.step == 4
    assert len(shown.file.getvalue().splitlines()) == 2
    assert sorted(path.name for path in (directory / "damaged").iterdir()) == ["8", "9"]
    save(directory, settings, [8, 12])
    assert steps_in(directory) == [4, 8, 12]
    assert same_bits(restore(directory, shown).read(), make_checkpoint(settings, 12))


def test_a_fifo_among_the_files_of_the_start_is_refused(directory):
    _fifo(next(path for path in (directory / "start").rglob("*") if path.is_file()))
    with pytest.raises(InputError, match="all of its checkpoints are damaged"):
        restore(directory, quiet())


def test_where_no_step_is_whole_the_run_is_refused_and_nothing_is_moved(directory):
    for step in (0, 4, 8):
        (directory / str(step) / "_METADATA").unlink()
    with pytest.raises(InputError, match=r"all of its checkpoints are damaged \(0, 4, 8\)"):
        restore(directory, quiet())
    assert steps_in(directory) == [0, 4, 8]
    for empty in (directory / "missing", directory / "damaged"):
        with pytest.raises(InputError, match="holds no checkpoint"):
            restore(empty, quiet())


def raising(number):
    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return fail


POINTS = {
    "the arrays": (ocp.StandardCheckpointHandler, "finalize"),
    "the digests": (DescribingHandler, "finalize"),
    "the commit": (os, "rename"),
}


@pytest.mark.parametrize("number", tiered([errno.ENOSPC, errno.EROFS, errno.EIO], [errno.ENOSPC]))
@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_a_save_that_fails_is_an_error_and_leaves_the_steps_before(
    settings, directory, monkeypatch, caplog, point, number
):
    def save_broken():
        with CheckpointWriter(directory, settings) as checkpoints:
            broken.setattr(*point, raising(number))
            checkpoints.save(make_checkpoint(settings, 12))

    with monkeypatch.context() as broken, pytest.raises(InputError) as failed:
        save_broken()
    assert os.strerror(number) in str(failed.value)
    assert "\n" not in str(failed.value)
    assert not caplog.records  # nor do orbax's threads complain
    assert same_bits(restore(directory, quiet()).read(), make_checkpoint(settings, 8))
    save(directory, settings, [12])
    assert steps_in(directory) == [4, 8, 12]


def test_the_next_save_tells_of_the_one_that_failed(settings, directory, monkeypatch):
    with CheckpointWriter(directory, settings) as checkpoints, monkeypatch.context() as broken:
        broken.setattr(DescribingHandler, "finalize", raising(errno.EIO))
        checkpoints.save(make_checkpoint(settings, 12))
        with pytest.raises(InputError, match=r"could not be written .*Input/output error"):
            checkpoints.save(make_checkpoint(settings, 16))
    assert steps_in(directory) == [0, 4, 8]


def test_a_write_that_the_system_cuts_off_is_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest has its own
    wide = make_settings(d_ff=20_000)
    save(tmp_path, wide, [0])
    for _ in range(2):
        message = r"written \(ValueError: File too large\); the ones"
        with pytest.raises(InputError, match=message), largest_file(2**16):
            save(tmp_path, wide, [4])
        time.sleep(0.2)  # until the other writes of tensorstore have ended
    assert capfd.readouterr().err == ""
    assert same_bits(restore(tmp_path, quiet()).read(), make_checkpoint(wide, 0))


@pytest.mark.parametrize("order", [1, -1])
def test_an_error_of_the_system_is_named_wherever_tensorstore_puts_its_code(order):
    parts = ["[tensorstore_spec='{}']", "[os_error_code='27']"][::order]
    error = ValueError(" ".join(["OUT_OF_RANGE: Error opening", *parts]))
    assert _in_one_line(error) == "ValueError: File too large"


def test_other_errors_of_other_threads_are_not_silenced(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    closed, other = (
        types.SimpleNamespace(exc_value=RuntimeError(text))
        for text in ("Event loop is closed", "something else")
    )
    with _orbax_quiet():
        sys.unraisablehook(closed)
        sys.unraisablehook(other)
    assert seen == [other]
    assert sys.unraisablehook == seen.append


@contextlib.contextmanager
def read_only(directory):
    """Let nothing be written into a directory; root, who may, becomes nobody for the time."""
    directory.chmod(0o555)
    user = os.geteuid()
    if not user:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(0o755)


def test_a_directory_that_cannot_be_written_is_an_error(settings, directory):
    with CheckpointWriter(directory, settings) as checkpoints:

        def save_and_wait():
            checkpoints.save(make_checkpoint(settings, 12))
            checkpoints.wait()

        with pytest.raises(InputError, match="Permission denied"), read_only(directory):
            save_and_wait()
    assert same_bits(restore(directory, quiet()).read(), make_checkpoint(settings, 8))
