"""`jax-transformer evaluate`: what it prints is sacrebleu's, and what it refuses."""

import pytest

from jax_transformer.commands import main as cli
from tests.commands.training import BETTER, OTHER, REFERENCES, WORSE
from tests.programs import run_python


def evaluated(capsys, *arguments):
    cli.main(["evaluate", *arguments])
    return capsys.readouterr().out.splitlines()


def sacrebleu(*arguments):
    options = ["references", *arguments, "-m", "bleu", "chrf"]
    return run_python("-m", "sacrebleu", *options, cwd=".").stdout


def test_each_measure_is_a_line_and_the_exact_matches_are_counted(systems, capsys):
    bleu, chrf, exact = evaluated(capsys, "better.gz", "--references=references")
    assert bleu.startswith("BLEU = ")
    assert "|tok:13a|" in bleu
    assert chrf.startswith("chrF2 = ")
    assert "|nc:6|" in chrf
    assert exact == "exact match = 25.00% of 12 lines"
    apart, *_ = evaluated(capsys, "better", "--references=references", "--bleu-tokenization=char")
    assert "|tok:char|" in apart


@pytest.mark.exhaustive
def test_scores_and_p_values_are_those_of_sacrebleus_own_command(systems, capsys):
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


def test_several_references_and_the_scores_of_each_line(systems, capsys):
    options = ["--references", "worse", "references", "--line-scores=by_line.tsv"]
    bleu, *_ = evaluated(capsys, "better", *options)
    assert " nrefs:2|" in bleu
    rows = [line.split("\t") for line in (systems / "by_line.tsv").read_text().splitlines()]
    assert [len(row) for row in rows] == 12 * [2]
    for (_, chrf), line, *references in zip(rows, BETTER, WORSE, REFERENCES, strict=True):
        assert (float(chrf) == 100) == (line in references)
    with pytest.raises(
        SystemExit, match=r"by_line\.tsv: exists already; name another file of line_"
    ):
        evaluated(capsys, "better", *options)
    evaluated(capsys, "better", *options, "--overwrite")


def test_the_worst_lines_are_printed_with_their_texts(systems, capsys):
    options = ["--references", "worse", "references", "--sources=other"]
    evaluated(capsys, "better", *options, "--line-scores=by_line.tsv")
    chrf = [float(line.split()[1]) for line in (systems / "by_line.tsv").read_text().splitlines()]
    shown = evaluated(capsys, "better", *options, "--worst=3")
    names, expected = ("source", "translation", "reference", "reference"), []
    for place in sorted(range(12), key=chrf.__getitem__)[:3]:
        expected.append(f"line {place + 1}: chrF = {chrf[place]:.2f}")
        lines = zip(names, (OTHER, BETTER, WORSE, REFERENCES), strict=True)
        expected += [f"  {name}:".ljust(15) + text[place] for name, text in lines]
    assert shown[3:] == expected


def test_equal_systems_and_few_lines_are_no_difference(systems, capsys):
    shown = evaluated(capsys, "better", "--references=references", "--others", "better.gz")
    assert [line.rpartition(" ")[2] for line in shown if " p = " in line] == 2 * ["1.0000"]
    shown = evaluated(capsys, "short", "--references=short", "--others", "short")
    assert shown[0] == "p is not tested: there are fewer than 10 lines"
    assert not any(" p = " in line for line in shown)
