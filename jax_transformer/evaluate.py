"""Translate lines of text, and measure translations against references."""

from collections.abc import Sequence

import jax
import numpy as np
from sacrebleu.metrics import BLEU

from jax_transformer.data.batches import evaluation_batches
from jax_transformer.decoding import generate
from jax_transformer.training.checkpoint import Checkpoint


def translate(
    checkpoint: Checkpoint, lines: Sequence[str], *, token_budget: int = 4096, bucket_count: int = 6
) -> list[str]:
    """Translate lines greedily, in batches of similar length.

    Args:
        checkpoint: The model and its tokenizer.
        lines: Source lines, at most `config.max_length` tokens each, the end included. A
            translation is cut at 10 tokens more than twice its source's.
        token_budget: Most slots (lines times length) of a batch.
        bucket_count: Most batch lengths, each with a compilation of its own.

    Returns:
        The translations in the order of the lines; a blank line's is "".

    Raises:
        InputError: A line is too long; names its number, counted from 1.
    """
    config, tokenizer, params = checkpoint
    translations = [""] * len(lines)
    batches = evaluation_batches(
        lines,
        tokenizer,
        max_length=config.max_length,
        bucket_count=bucket_count,
        token_budget=token_budget,
    )
    for members, src in batches:
        max_new_tokens = min(config.max_length, 2 * src.shape[1] + 10)
        hypotheses = generate(params, config, src, max_new_tokens=max_new_tokens)
        tokens, lengths = jax.device_get((hypotheses.tokens[:, 0], hypotheses.lengths[:, 0]))
        for row, index in enumerate(members):
            if lines[index].strip():
                # By its own length and not the batch's: the other lines must not matter.
                most = 2 * np.count_nonzero(src[row] != config.pad_id) + 10
                translations[index] = tokenizer.decode(tokens[row, : min(lengths[row], most)])
    return translations


def exact_match(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of translations that are their reference, character for character."""
    pairs = zip(translations, references, strict=True)
    return sum(translation == reference for translation, reference in pairs) / len(references)


def bleu(translations: Sequence[str], references: Sequence[str]) -> str:
    """Return sacrebleu's line of corpus BLEU (13a tokenisation, cased) and its signature."""
    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)])
    return f"{score} {metric.get_signature()}"
