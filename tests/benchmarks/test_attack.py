"""The command that attacks the library: what it recognises, and ten seconds of it."""

import itertools
import re

import numpy as np
import pytest

from benchmarks.attack import mutations
from benchmarks.attack.driver import WEIGHTS, Limits, Survey, attack, draws
from benchmarks.attack.outcomes import (
    Outcome,
    UsageError,
    call_program,
    is_short,
    place_of,
    tree_digest,
)
from jax_transformer.errors import InputError
from jax_transformer.storage.reading import json_digest
from tests import planted_faults

pytestmark = pytest.mark.exhaustive


RECOGNISED = {
    "refused": Outcome.REFUSED,
    "same": Outcome.SAME,
    "long": Outcome.LONG,
    "wrong": Outcome.WRONG,
    "traceback": Outcome.TRACEBACK,
    "hang": Outcome.HANG,
    "crash": Outcome.CRASH,
    "memory": Outcome.MEMORY,
    "changed": Outcome.CHANGED,
    "left behind": Outcome.CHANGED,
    "too much": Outcome.TRACEBACK,  # the guard turns 64 GiB into a MemoryError
}


def test_every_planted_fault_is_recognised_and_kept(tmp_path):
    survey = Survey(tmp_path / "kept")
    assert set(RECOGNISED) == set(planted_faults.FAULTS)

    def tries():
        for number, fault in enumerate(RECOGNISED):
            (tmp_path / "fault").write_text(fault)
            yield "planted", number

    limits = Limits(growth=32 * 2**20, seconds={"planted": 1})
    module = {"planted": "tests.planted_faults"}
    attack(tries(), survey, tmp_path, limits=limits, modules=module)

    assert survey.tries == len(RECOGNISED)  # a fresh process goes on after a hang and a crash
    faults = {
        result.what: outcome for (_, outcome, _), found in survey.faults.items() for result in found
    }
    assert faults == {what: outcome for what, outcome in RECOGNISED.items() if outcome.is_fault}
    kept = tmp_path / "kept" / f"planted-{list(RECOGNISED).index('changed')}"
    assert (kept / "input" / "file").read_text() == "after"
    assert "--only planted:" in (kept / "detail.txt").read_text()
    hang = tmp_path / "kept" / f"planted-{list(RECOGNISED).index('hang')}"
    assert "planted_faults.py" in (hang / "detail.txt").read_text()  # where it hung


def test_faults_of_one_cause_are_one_fault(tmp_path):
    (tmp_path / "fault").write_text("traceback")
    survey = Survey(tmp_path / "kept")
    tries = (("planted", number) for number in range(5))
    attack(tries, survey, tmp_path, modules={"planted": "tests.planted_faults"})
    assert [len(results) for results in survey.faults.values()] == [5]
    assert len(list((tmp_path / "kept").iterdir())) == 3  # more of the same are only counted


def test_a_program_must_leave_with_one_and_a_message():
    def leave(code):
        def program():
            raise SystemExit(code)

        return program

    assert call_program(lambda: print("text")) == b"text\n"
    with pytest.raises(InputError, match=r"what is wrong\nand more$") as refused:
        call_program(leave("error: what is wrong\nand more"))
    assert not is_short(refused.value)
    with pytest.raises(UsageError):
        call_program(leave(2))
    for code in (1, 3, "no message of this library"):
        with pytest.raises(Exception, match="exit code") as failed:
            call_program(leave(code))
        assert type(failed.value).__name__ == "WrongResult"


def test_the_digest_of_a_folder_sees_contents_kinds_links_and_hidden_names(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("x")
    seen = {tree_digest(folder)}
    for number, change in enumerate(
        (
            lambda: (folder / "a").write_text("y"),
            lambda: (folder / ".hidden").mkdir(),
            lambda: (folder / "link").symlink_to("a"),
            lambda: ((folder / "link").unlink(), (folder / "link").symlink_to("b")),
            lambda: (folder / ".hidden").rmdir(),
        ),
        start=2,
    ):
        change()
        seen.add(tree_digest(folder))
        assert len(seen) == number


def test_equal_seeds_give_equal_changes():
    data = bytes(range(256)) * 4
    for seed in range(50):
        one, other = (mutations.mutate_bytes(np.random.default_rng(seed), data) for _ in range(2))
        assert one == other
    changed = [mutations.mutate_bytes(np.random.default_rng(seed), data)[0] for seed in range(50)]
    assert sum(found != data for found in changed) > 45


def test_the_cause_names_the_last_line_of_the_library():
    with pytest.raises(IndexError) as outside:
        call_program(lambda: [][0])
    assert place_of(outside.value) == "IndexError at outside the library"
    with pytest.raises(TypeError) as inside:
        json_digest(object())
    found = place_of(inside.value)
    assert re.fullmatch(
        r"TypeError at jax_transformer/storage/reading.py:\d+ in json_digest", found
    )


def test_ten_seconds_of_attack_find_nothing(tmp_path):
    survey = Survey(tmp_path / "kept")
    kinds = WEIGHTS | {"calls": 1}  # which compile
    kinds.pop("kills")
    tries = itertools.chain(
        itertools.islice(draws(21, kinds), 30), itertools.islice(draws(21, {"kills": 1}), 1)
    )
    attack(tries, survey, tmp_path, quick=True)
    assert survey.tries == 31
    faults = [result for found in survey.faults.values() for result in found]
    assert [(result.what, result.outcome, result.detail[-500:]) for result in faults] == []
