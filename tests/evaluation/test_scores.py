"""The measures of translations against references."""

import re
import sys
from random import Random

import pytest
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from jax_transformer import InputError
from jax_transformer.evaluation import scores


def test_exact_match_is_a_share():
    assert scores.exact_match(["a", "b", "c "], [["a", "B", "c"]]) == pytest.approx(1 / 3)


REFERENCES = ["A man walks his dog .", "Two girls are singing a song together ."]


def test_bleu_is_cased_and_both_are_signed():
    best = scores.bleu(REFERENCES, [REFERENCES])
    assert best.value == pytest.approx(100)
    assert best.report.startswith("BLEU = 100.00")
    signature = r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:\d"
    assert re.search(signature, best.report)
    assert scores.bleu([one.lower() for one in REFERENCES], [REFERENCES]).value < 90
    assert scores.chrf(REFERENCES, [REFERENCES]).report.startswith("chrF2 = 100.00 nrefs:1|")


def test_text_that_is_tokenised_already_is_split_at_spaces_alone():
    joined = [one.replace(" .", ".") for one in REFERENCES]
    assert scores.bleu(joined, [REFERENCES]).value == pytest.approx(100)
    apart = scores.bleu(joined, [REFERENCES], "none")
    assert apart.value < 90
    assert "tok:none" in apart.report


REFUSED = dict.fromkeys(("flores101", "flores200", "spm", "spBLEU-1K"), "downloads a model")
REFUSED |= {"ja-mecab": "cannot be used", "13b": "must be one of .*none"}


@pytest.mark.parametrize(("name", "fault"), REFUSED.items())
def test_a_tokenization_that_is_not_there_is_refused_in_one_line(name, fault, monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    scores.check_tokenization("none")
    with pytest.raises(InputError, match=rf"^bleu_tokenization='{name}' {fault}"):
        scores.check_tokenization(name)


LINES = [f"line {i} of a text that has {i % 7} words and {i % 3} more" for i in range(40)]
WORSE = [line.replace("words", "word") if i % 2 else line for i, line in enumerate(LINES)]
WORST = [line[:12] for line in LINES]


def test_equal_scores_are_no_difference_and_few_lines_are_no_test():
    swapped = [LINES[1], LINES[0], *LINES[2:]]  # other lines, and in this corpus the same score
    for other, references in ((LINES, LINES), (WORST, WORSE), (swapped, LINES)):
        found = scores.p_values([other, list(other)], [references])
        assert found == {"BLEU": [1.0], "chrF2": [1.0]}
    found = scores.p_values([LINES, WORSE, LINES, WORST], [LINES])
    assert [p < 0.05 for p in found["BLEU"]] == [True, False, True]
    assert found["BLEU"][1] == found["chrF2"][1] == 1
    assert scores.p_values([LINES[:9], WORST[:9]], [LINES[:9]]) == {}
    assert scores.p_values([LINES[:10], WORST[:10]], [LINES[:10]])["BLEU"][0] < 0.05


def test_p_values_are_those_of_sacrebleus_bootstrap_in_order_and_with_its_tokenization():
    random = Random(4)
    systems = [  # alike in quality, so that no p is that of a sure difference
        [
            " ".join(word if random.random() < 0.9 else "no" for word in line.split())
            for line in LINES
        ]
        for _ in range(4)
    ]
    references = LINES
    measures = {"BLEU": BLEU(tokenize="char", force=True), "chrF2": CHRF()}
    named = list(zip("abcd", systems, strict=True))
    _, expected = PairedTest(named, measures, [references], "bs")()
    found = scores.p_values(systems, [references], "char")
    for name, values in found.items():
        assert values == [result.p_value for result in expected[name][1:]]
    assert found["BLEU"] != scores.p_values(systems, [references])["BLEU"]


def test_each_of_several_references_counts():
    several = [WORSE, LINES]
    assert scores.bleu(LINES, several).value == pytest.approx(100)
    assert scores.chrf(LINES, several).value == 100
    assert "nrefs:2" in scores.bleu(LINES, several).report
    assert scores.exact_match([*LINES[:3], "x"], [[*WORSE[:3], "y"], [*LINES[:3], "z"]]) == 0.75
    bleu, chrf = scores.line_scores(LINES[:2], [WORSE[:2], WORST[:2]])
    measures = BLEU(force=True, effective_order=True), CHRF()
    for measure, values in zip(measures, (bleu, chrf), strict=True):
        rows = zip(LINES, WORSE, WORST, values, strict=False)
        for line, first, second, value in rows:
            assert value == measure.sentence_score(line, [first, second]).score
