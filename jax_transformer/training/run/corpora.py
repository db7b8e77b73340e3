"""The text of a run: training and validation pairs, from files or the embedded number words."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_transformer.data import number_words
from jax_transformer.data.batches import EncodedCorpus, encode_corpus
from jax_transformer.data.corpus import ParallelCorpus, read_parallel
from jax_transformer.data.tokenizers import Tokenizer
from jax_transformer.errors import InputError

# Without validation files this share of the training pairs is held out, but at most so many.
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 1000


class Files(NamedTuple):
    """The text files of a run; all None for the embedded number words."""

    source: Path | None = None
    target: Path | None = None
    valid_source: Path | None = None
    valid_target: Path | None = None


class Corpora(NamedTuple):
    """The text of a run.

    Attributes:
        training: Pairs to learn from.
        validation: Pairs to evaluate on.
        held_out: Pairs of the training text that were taken for `validation`; 0 if it has files
            of its own.
    """

    training: ParallelCorpus
    validation: ParallelCorpus
    held_out: int = 0


def check_files(files: Files, valid_pairs: int | None) -> None:
    """Refuse a combination of files that names no task; reads nothing.

    Raises:
        InputError: Half of a pair of files is missing, or there is nothing to hold pairs out of.
    """
    for one, other in (("source", "target"), ("valid_source", "valid_target")):
        given, missing = (one, other) if getattr(files, one) else (other, one)
        if getattr(files, given) and not getattr(files, missing):
            raise InputError(
                f"{missing}=None: name the file beside {given}={getattr(files, given)}"
            )
    if files.valid_source and not files.source:
        raise InputError(f"source=None: name the training text beside {files.valid_source}")
    if valid_pairs is None:
        return
    if valid_pairs < 1:
        raise InputError(f"valid_pairs={valid_pairs} must be at least 1")
    if files.valid_source or not files.source:
        raise InputError(
            f"valid_pairs={valid_pairs} holds pairs out of the training text; it needs source and "
            "target, and no valid_source and valid_target"
        )


def read_corpora(files: Files, valid_pairs: int | None, seed: int) -> Corpora:
    """Return the text of a run.

    Args:
        files: The files; see `check_files`.
        valid_pairs: Pairs to hold out of the training text if there are no validation files; None
            holds out 5 % of them, at least 1 and at most 1,000.
        seed: Which pairs are held out is a pure function of it and of the number of pairs.

    Raises:
        InputError: A file cannot be used, or has too few pairs.
    """
    check_files(files, valid_pairs)
    if files.source is None:
        return Corpora(*number_words.corpus(seed))
    text = read_parallel(files.source, files.target)
    if files.valid_source is not None:
        return Corpora(text, read_parallel(files.valid_source, files.valid_target))
    return hold_out(text, valid_pairs, seed)


def hold_out(text: ParallelCorpus, valid_pairs: int | None, seed: int) -> Corpora:
    """Split a text into training and validation pairs, each in the order of the text.

    Raises:
        InputError: No training pair would be left.
    """
    pairs = len(text.sources)
    count = valid_pairs or max(1, min(MOST_HELD_OUT, int(HELD_OUT_SHARE * pairs)))
    if count >= pairs:
        raise InputError(
            f"valid_pairs={count} leaves none of {pairs:,} pairs to train on; lower it, or name "
            "valid_source and valid_target"
        )
    chosen = np.random.default_rng(seed).permutation(pairs)[:count]
    is_chosen = np.zeros(pairs, bool)
    is_chosen[chosen] = True
    training, validation = (
        ParallelCorpus(
            tuple(text.sources[index] for index in np.flatnonzero(part)),
            tuple(text.targets[index] for index in np.flatnonzero(part)),
        )
        for part in (~is_chosen, is_chosen)
    )
    training = dataclasses.replace(training, dropped_empty=text.dropped_empty)
    return Corpora(training, validation, count)


class EncodedCorpora(NamedTuple):
    """The text of a run as token ids.

    Attributes:
        training: Training pairs.
        validation: Validation pairs.
        validation_text: The text of `validation`.
        report: One line for each of the two, for the reader.
    """

    training: EncodedCorpus
    validation: EncodedCorpus
    validation_text: ParallelCorpus
    report: tuple[str, str]


def encode_corpora(corpora: Corpora, tokenizer: Tokenizer, max_length: int) -> EncodedCorpora:
    """Encode both corpora. Overlong training pairs are dropped; so are those held out of them.

    Raises:
        InputError: A pair of a validation file is too long, or no pair is left.
    """
    training = encode_corpus(corpora.training, tokenizer, max_length)
    text = corpora.validation
    validation = encode_corpus(text, tokenizer, max_length)
    if validation.dropped_overlong and not corpora.held_out:
        raise InputError(
            f"max_length={max_length} is too short for {validation.dropped_overlong:,} of "
            f"{len(text.sources):,} validation pairs; raise it or remove them from the files"
        )
    if validation.dropped_overlong:
        text = _without_overlong(text, tokenizer, max_length)
    report = (
        f"training: {_training_report(corpora)}; {training.report()}",
        f"validation: {_validation_report(corpora)}; {validation.report()}",
    )
    return EncodedCorpora(training, validation, text, report)


def _training_report(corpora: Corpora) -> str:
    training, validation, held_out = corpora
    if not held_out:
        return training.report()
    whole = dataclasses.replace(training, sources=training.sources + validation.sources)
    return f"{whole.report()}, {held_out:,} held out for validation"


def _validation_report(corpora: Corpora) -> str:
    if not corpora.held_out:
        return corpora.validation.report()
    return f"{corpora.held_out:,} pairs of the training text, chosen by the seed"


def _without_overlong(
    text: ParallelCorpus, tokenizer: Tokenizer, max_length: int
) -> ParallelCorpus:
    lengths = zip(
        map(len, tokenizer.encode_source(text.sources)),
        map(len, tokenizer.encode_target(text.targets)),
        strict=True,
    )
    kept = [index for index, sides in enumerate(lengths) if max(sides) <= max_length]
    sources, targets = (
        tuple(side[index] for index in kept) for side in (text.sources, text.targets)
    )
    return dataclasses.replace(text, sources=sources, targets=targets)
