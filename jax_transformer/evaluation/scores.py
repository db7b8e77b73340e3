"""Scores of translations against references: exact match, BLEU and chrF.

Of several references, each is a sequence with one text a line, `references[k][i]` of line i.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from jax_transformer.errors import InputError, naming_the_extra, one_line

FEWEST_LINES = 10  # that a test of significance can draw from
# Tokenizations whose models sacrebleu fetches.
DOWNLOADED = ("flores101", "flores200", "spBLEU-1K", "spm")
References = Sequence[Sequence[str]]


class Score(NamedTuple):
    """A corpus-level score."""

    value: float  # from 0 to 100
    report: str  # the score in one line as sacrebleu formats it, with its signature


def exact_match(translations: Sequence[str], references: References) -> float:
    """Return the share, from 0 to 1, of translations that equal one of their references exactly."""
    lines = zip(translations, *references, strict=True)
    return sum(line in rest for line, *rest in lines) / len(translations)


def check_tokenization(name: str) -> None:
    """Refuse a tokenization that sacrebleu does not know, lacks a library for, or would fetch."""
    fault = f"bleu_tokenization={name!r}"
    if name not in BLEU.TOKENIZERS:
        raise InputError(f"{fault} must be one of {', '.join(BLEU.TOKENIZERS)}")
    if name in DOWNLOADED:
        remedy = "split both texts into its pieces before, and set bleu_tokenization='none'"
        raise InputError(f"{fault} downloads a model, and nothing is downloaded here; {remedy}")
    try:
        BLEU(tokenize=name)
    except (ImportError, RuntimeError) as error:
        raise InputError(f"{fault} cannot be used: {one_line(str(error))}") from error


def bleu(translations: Sequence[str], references: References, tokenization: str = "13a") -> Score:
    """Return the corpus BLEU (Papineni et al. 2002), cased, as sacrebleu computes it.

    Args:
        tokenization: sacrebleu's name of a tokenization; "none" for text that is tokenised already.
    """
    return _score(BLEU(tokenize=tokenization, force=True), translations, references)


def chrf(translations: Sequence[str], references: References) -> Score:
    """Return the corpus chrF (Popovic 2015), as sacrebleu computes it."""
    return _score(CHRF(), translations, references)


def word_error_rate(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the words to replace, remove or add for each word of the references, in percent.

    Words are what stands between spaces: case and punctuation count.
    """
    with naming_the_extra("the word error rate"):
        import jiwer
    return 100 * jiwer.wer([*references], [*texts])


def line_scores(
    translations: Sequence[str], references: References, tokenization: str = "13a"
) -> list[list[float]]:
    """Return BLEU of each line, of the orders that it has, and chrF [2, lines], from 0 to 100."""
    measures = BLEU(tokenize=tokenization, force=True, effective_order=True), CHRF()
    lines = [*zip(translations, *references, strict=True)]
    return [
        [measure.sentence_score(line, rest).score for line, *rest in lines] for measure in measures
    ]


def p_values(
    systems: Sequence[Sequence[str]], references: References, tokenization: str = "13a"
) -> dict[str, list[float]]:
    """Return how likely each difference from the first system is chance, for BLEU and chrF.

    It is sacrebleu's paired bootstrap test (Koehn 2004) with 1,000 samples of the lines, but for
    equal scores: they are no difference, and p is 1.

    Returns:
        By the name of the measure, a p-value for each system after the first one; nothing for fewer
        than `FEWEST_LINES` lines, of which no test can be made.
    """
    if len(systems[0]) < FEWEST_LINES:
        return {}
    metrics = {"BLEU": BLEU(tokenize=tokenization, force=True), "chrF2": CHRF()}
    named = [(str(number), list(lines)) for number, lines in enumerate(systems)]
    _, results = PairedTest(named, metrics, [*map(list, references)], "bs")()
    found = {}
    for name in metrics:
        first, *others = results[name]
        found[name] = [1.0 if other.score == first.score else other.p_value for other in others]
    return found


def _score(metric: BLEU | CHRF, translations: Sequence[str], references: References) -> Score:
    score = metric.corpus_score(list(translations), [*map(list, references)])
    return Score(score.score, f"{score} {metric.get_signature()}")
