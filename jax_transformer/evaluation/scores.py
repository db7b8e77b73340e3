"""Scores of translations against references: exact match, BLEU and chrF."""

from collections.abc import Sequence
from typing import NamedTuple

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from jax_transformer.errors import InputError


class Score(NamedTuple):
    """A corpus-level score."""

    value: float  # from 0 to 100
    report: str  # the score in one line as sacrebleu formats it, with its signature


def exact_match(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the share, from 0 to 1, of translations that equal their reference exactly."""
    pairs = zip(translations, references, strict=True)
    return sum(translation == reference for translation, reference in pairs) / len(references)


def check_tokenization(name: str) -> None:
    """Refuse a tokenization that sacrebleu does not know."""
    if name not in BLEU.TOKENIZERS:
        raise InputError(f"bleu_tokenization={name!r} must be one of {', '.join(BLEU.TOKENIZERS)}")


def bleu(
    translations: Sequence[str], references: Sequence[str], tokenization: str = "13a"
) -> Score:
    """Return the corpus BLEU (Papineni et al. 2002), cased, as sacrebleu computes it.

    Args:
        tokenization: sacrebleu's name of a tokenization; "none" for text that is tokenised already.
    """
    return _score(BLEU(tokenize=tokenization, force=True), translations, references)


def chrf(translations: Sequence[str], references: Sequence[str]) -> Score:
    """Return the corpus chrF (Popovic 2015), as sacrebleu computes it."""
    return _score(CHRF(), translations, references)


def p_values(
    systems: Sequence[Sequence[str]], references: Sequence[str], tokenization: str = "13a"
) -> dict[str, list[float]]:
    """Return how likely each difference from the first system is chance, for BLEU and chrF.

    It is sacrebleu's paired bootstrap test (Koehn 2004) with 1,000 samples of the lines.

    Returns:
        By the name of the measure, a p-value for each system after the first one.
    """
    metrics = {"BLEU": BLEU(tokenize=tokenization, force=True), "chrF2": CHRF()}
    named = [(str(number), list(lines)) for number, lines in enumerate(systems)]
    _, results = PairedTest(named, metrics, [list(references)], "bs")()
    return {name: [other.p_value for other in results[name][1:]] for name in metrics}


def _score(metric: BLEU | CHRF, translations: Sequence[str], references: Sequence[str]) -> Score:
    score = metric.corpus_score(list(translations), [list(references)])
    return Score(score.score, f"{score} {metric.get_signature()}")
