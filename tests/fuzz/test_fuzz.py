"""Some examples of each kind of hostile input; and what the fuzz must recognise as a fault."""

import itertools
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from jax_transformer import InputError
from tests.fuzz import outcomes
from tests.fuzz.__main__ import KINDS
from tests.fuzz.outcomes import REFUSED, SAME, Fault, Found
from tests.tiers import tiered_rows

ROOT = Path(__file__).parents[2]
# A library that is broken in this way, and what the round then says.
PLANTED = {
    "hang": ("decode_lines = lambda *_: time.sleep(60)", "Timeout"),
    "crash": ("decode_lines = lambda *_: os.abort()", "Fatal Python error: Aborted"),
    "wrong": ("decode_lines = lambda *_: ['more', 'lines']", "2 lines were read"),
}


FEW, MANY = 10, 100  # examples


@pytest.mark.parametrize(
    ("kind", "examples"),
    tiered_rows(
        itertools.product(KINDS, (FEW, MANY)), lambda *_: False, lambda _, examples: examples == FEW
    ),
)
def test_hostile_input_is_refused_in_one_line_or_read_alike(kind, examples):
    command = [sys.executable, "-m", "tests.fuzz", "--minutes=0", f"--examples={examples}"]
    command += ["--kinds", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    print(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "shown"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_ends_a_round(fault, shown):
    program = f"import os, time\nfrom tests.fuzz import __main__ as fuzz, texts\ntexts.{fault}\n"
    # A cold start of hypothesis takes seconds on a busy machine.
    program += "fuzz.SECONDS = 20\nfuzz.run_round('texts', 0, 30)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert shown in done.stderr


def test_a_refusal_is_one_line_and_changes_nothing(tmp_path, monkeypatch):
    found, file = Found(), tmp_path / "file"
    file.write_text("before")
    monkeypatch.setattr(outcomes, "MOST_GROWTH", 2**24)

    def refuse(*lines, change=lambda: None):
        change()
        raise InputError(*lines)

    found.judge(lambda: SAME, (tmp_path,))
    found.judge(lambda: refuse("one line"), (tmp_path,))
    assert found.outcomes == {SAME: 1, REFUSED: 1}
    for run, message in (
        (lambda: refuse("one line", "and another"), "several lines"),
        (lambda: refuse("x", change=lambda: file.write_text("after")), "after it changed"),
        (lambda: refuse("x", change=(tmp_path / ".file").mkdir), "after it changed"),
        # Not an array: malloc may give it memory that was freed and is resident still.
        (lambda: mmap.mmap(-1, 2**26).write(bytes(2**26)), "memory grew"),
    ):
        with pytest.raises(Fault, match=message):
            found.judge(run, (tmp_path,))
    with pytest.raises(TypeError):
        found.judge(lambda: len(3), ())
