"""The measures of translations against references."""

import re

import pytest

from jax_transformer import evaluate


def test_exact_match_is_a_share():
    assert evaluate.exact_match(["a", "b", "c "], ["a", "B", "c"]) == pytest.approx(1 / 3)


def test_bleu_is_cased_and_signed():
    references = ["A man walks his dog .", "Two girls are singing ."]
    line = evaluate.bleu(references, references)
    assert line.startswith("BLEU = 100.00")
    assert re.search(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:\d", line)
    assert not evaluate.bleu([one.lower() for one in references], references).startswith(
        "BLEU = 100.00"
    )
