"""`jax-transformer evaluate`: what it prints is sacrebleu's, and what it refuses."""

import gzip
import subprocess
import sys

import pytest

from jax_transformer.commands import main as cli
from tests.commands.training import refused

REFERENCES = [
    f"the {animal} sees a {other} in the garden"
    for animal in ("cat", "dog", "cow")
    for other in ("bird", "man", "tree", "red house")
]
BETTER = [line.replace("garden", "park") if i % 4 else line for i, line in enumerate(REFERENCES)]
WORSE = [line.replace("sees a", "has one") for line in BETTER]
OTHER = [line.replace("garden", "park") if i % 3 else line for i, line in enumerate(REFERENCES)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files of lines in the working folder: references and three systems; one is compressed."""
    monkeypatch.chdir(tmp_path)
    for name, lines in (
        ("references", REFERENCES),
        ("better", BETTER),
        ("worse", WORSE),
        ("other", OTHER),
    ):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "better.gz").write_bytes(gzip.compress((tmp_path / "better").read_bytes()))
    return tmp_path


def evaluated(capsys, *arguments):
    cli.main(["evaluate", *arguments])
    return capsys.readouterr().out.splitlines()


def sacrebleu(*arguments):
    command = [sys.executable, "-m", "sacrebleu", "references", *arguments, "-m", "bleu", "chrf"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_each_measure_is_a_line_and_the_exact_matches_are_counted(files, capsys):
    bleu, chrf, exact = evaluated(capsys, "better.gz", "--references=references")
    assert bleu.startswith("BLEU = ")
    assert "|tok:13a|" in bleu
    assert chrf.startswith("chrF2 = ")
    assert "|nc:6|" in chrf
    assert exact == "exact match = 25.00% of 12 lines"
    apart, *_ = evaluated(capsys, "better", "--references=references", "--bleu-tokenization=char")
    assert "|tok:char|" in apart


@pytest.mark.exhaustive
def test_scores_and_p_values_are_those_of_sacrebleus_own_command(files, capsys):
    bleu, chrf, _ = evaluated(capsys, "better", "--references=references")
    theirs = sacrebleu("-i", "better", "-f", "text", "-w2").strip().splitlines()
    for line, part in zip((bleu, chrf), theirs, strict=True):
        signature, _, score = part.strip().partition(" = ")
        measure, _, signature = signature.partition("|")
        assert line == f"{measure} = {score} {signature}"
    shown = evaluated(capsys, "better", "--references=references", "--others", "worse", "other")
    found = [float(line.rpartition("p = ")[2]) for line in shown if " p = " in line]
    table = sacrebleu("-i", "better", "worse", "other", "--paired-bs", "-f", "text")
    assert max(found[:2]) < 0.05 < min(found[2:])
    assert [f"(p = {value:.4f})" in table for value in found] == [True] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["better"], "references=None: BLEU and chrF need them; name their file"),
        (["better", "--references=none"], "none is no readable text; name a text file"),
        (
            ["better", "--references=references", "--others", "short"],
            "short: has 1 lines, but the translations 12; line i of one file must belong to",
        ),
        (["empty", "--references=references"], "empty: has 0 lines, but the translations 0"),
        (
            ["better", "--references=references", "--metricx=folder"],
            "metricx=folder, metricx_version=None: name both of them, or neither",
        ),
        (
            ["better", "--references=references", "--bleu-tokenization=13b"],
            "bleu_tokenization='13b'",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_in_a_line(files, arguments, message):
    (files / "short").write_text("a line\n")
    (files / "empty").touch()
    assert refused("evaluate", *arguments).startswith(f"error: {message}")
