"""Measure translations against references."""

from collections.abc import Sequence

from sacrebleu.metrics import BLEU


def exact_match(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of translations that are their reference, character for character."""
    pairs = zip(translations, references, strict=True)
    return sum(translation == reference for translation, reference in pairs) / len(references)


def bleu(translations: Sequence[str], references: Sequence[str]) -> str:
    """Return sacrebleu's line of corpus BLEU (13a tokenisation, cased) and its signature."""
    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)])
    return f"{score} {metric.get_signature()}"
