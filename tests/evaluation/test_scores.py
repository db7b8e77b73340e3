"""The measures of translations against references."""

import re

import pytest

from jax_transformer import InputError
from jax_transformer.evaluation import scores


def test_exact_match_is_a_share():
    assert scores.exact_match(["a", "b", "c "], ["a", "B", "c"]) == pytest.approx(1 / 3)


REFERENCES = ["A man walks his dog .", "Two girls are singing a song together ."]


def test_bleu_is_cased_and_signed():
    best = scores.bleu(REFERENCES, REFERENCES)
    assert best.value == pytest.approx(100)
    assert best.report.startswith("BLEU = 100.00")
    signature = r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:\d"
    assert re.search(signature, best.report)
    assert scores.bleu([one.lower() for one in REFERENCES], REFERENCES).value < 90


def test_text_that_is_tokenised_already_is_split_at_spaces_alone():
    joined = [one.replace(" .", ".") for one in REFERENCES]
    assert scores.bleu(joined, REFERENCES).value == pytest.approx(100)
    apart = scores.bleu(joined, REFERENCES, "none")
    assert apart.value < 90
    assert "tok:none" in apart.report


def test_chrf_is_signed():
    assert scores.chrf(REFERENCES, REFERENCES).report.startswith("chrF2 = 100.00 nrefs:1|")


def test_an_unknown_tokenization_is_refused():
    scores.check_tokenization("none")
    with pytest.raises(InputError, match=r"bleu_tokenization='13b' must be one of .*none"):
        scores.check_tokenization("13b")
