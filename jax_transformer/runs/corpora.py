"""The text of a run: training and validation pairs, from files or the embedded number words."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.runs.state import check_equal
from jax_transformer.storage.reading import json_digest
from jax_transformer.text import number_words
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.encoding import Filters, encode_lines, encode_text
from jax_transformer.text.parallel_text import Reading, Text, TextFiles, is_tsv, read_text
from jax_transformer.text.prepare import (
    CHARACTERS_OF_A_TOKEN,
    Task,
    corpus_task,
    dry_run,
    prepared_corpus,
    without_duplicates,
)
from jax_transformer.text.store import held_out, trained_tokenizer, with_known_facts
from jax_transformer.tokenizers import LineError, Tokenizer

# Without validation files this share of the training pairs is held out, but at most so many.
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 1000


class Files(NamedTuple):
    """The text files of a run; all None for the embedded number words."""

    source: tuple[Path, ...] | None = None
    target: tuple[Path, ...] | None = None
    valid_source: tuple[Path, ...] | None = None
    valid_target: tuple[Path, ...] | None = None


class TextSettings(NamedTuple):
    """Which text a run trains on."""

    files: Files
    weights: tuple[float, ...] | None  # how often the pairs of each source file are drawn
    valid_pairs: int | None  # to hold out of the training text; None: 5 %, from 1 to 1,000
    seed: int  # chooses the pairs that are held out, and those that train the tokenizer
    vocab_size: int  # of the tokenizer that is trained, where the run has none
    byte_fallback: bool  # whether it has the 256 bytes
    tokenizer_pairs: int  # most pairs that it is trained on
    filters: Filters
    drop_duplicates: bool
    store: Path  # the folder that keeps what was prepared
    reading: Reading


class RunText(NamedTuple):
    """The text of a run before it is encoded."""

    training: list[Text | TextFiles]  # several where they have weights
    held_out: Int64[np.ndarray, "_"]  # pairs that are left out, ascending; none of several texts
    validation: Text
    tokenizer: Tokenizer


class Corpora(NamedTuple):
    """The text of a run as token ids."""

    training: Corpus
    validation: Corpus
    validation_text: Text
    tokenizer: Tokenizer
    report: tuple[str, ...]  # one line for each text, for the reader
    sha256: str  # of the text, the filters and the tokenizer


def check_files(settings: TextSettings) -> None:
    """Refuse a combination of files that names no task; reads nothing."""
    files, weights, valid_pairs, *_ = settings
    columns = settings.reading.columns
    for source, target in (("source", "target"), ("valid_source", "valid_target")):
        sources, targets = getattr(files, source), getattr(files, target)
        if targets and not sources:
            raise InputError(f"{source}=None: name the file beside {target}={_shown(targets)}")
        if sources and not targets and not any(map(is_tsv, sources)):
            raise InputError(f"{target}=None: name the file beside {source}={_shown(sources)}")
        if sources:
            TextFiles(sources, targets or ())
    has_tsv = any(map(is_tsv, [*(files.source or ()), *(files.valid_source or ())]))
    if columns is not None and not (has_tsv and len(columns) == len({*columns}) == 2):
        raise InputError(
            f"tsv_columns={_shown(columns)} needs two numbers, of the columns of source and "
            "target, and a .tsv file in source or valid_source"
        )
    if files.valid_source and not files.source:
        raise InputError(f"source=None: name the training text beside {_shown(files.valid_source)}")
    if weights is not None and (not files.valid_source or len(weights) != len(files.source or ())):
        raise InputError(
            f"weights={_shown(weights)} needs a number for each file of source, and valid_source"
        )
    if valid_pairs is None:
        return
    if valid_pairs < 1:
        raise InputError(f"valid_pairs={valid_pairs} must be at least 1")
    if files.valid_source or not files.source:
        raise InputError(
            f"valid_pairs={valid_pairs} holds pairs out of the training text; it needs source and "
            "target, and no valid_source and valid_target"
        )


def read_corpora(settings: TextSettings, tokenizer: Tokenizer | None, console: Console) -> RunText:
    """Return the text of a run, and its tokenizer; trains one if there is none."""
    files, seed, store = settings.files, settings.seed, settings.store
    check_files(settings)
    without = np.zeros(0, np.int64)
    if files.source is None:
        training, validation = number_words.corpus(seed)
        texts = [training]
    else:
        texts = [TextFiles(files.source, files.target or (), reading=settings.reading)]
        if settings.weights is not None:
            aligned = texts[0].aligned()
            texts = [TextFiles(paths[:1], paths[1:], reading=settings.reading) for paths in aligned]
        texts = [with_known_facts(store, text, console) for text in texts]
        if files.valid_source:
            targets = files.valid_target or ()
            validation = read_text(files.valid_source, targets, settings.reading)
        else:
            share = max(1, min(MOST_HELD_OUT, int(HELD_OUT_SHARE * texts[0].pairs)))
            count = settings.valid_pairs or share
            without, validation = held_out(store, texts[0], count, seed, console)
    if tokenizer is None:
        tokenizer = trained_tokenizer(
            store,
            texts,
            without,
            settings.vocab_size,
            settings.byte_fallback,
            settings.tokenizer_pairs,
            CHARACTERS_OF_A_TOKEN * settings.filters.max_length,
            seed,
            console,
        )
    return RunText(texts, without, validation, tokenizer)


def encode_corpora(
    run_text: RunText,
    settings: TextSettings,
    console: Console,
    expected_sha256: str | None = None,
) -> Corpora:
    """Return the text of a run as ids; the training text is encoded if it is not prepared yet.

    Overlong training pairs are dropped; so are overlong pairs that are held out of them. A text of
    another sha256 than that of a resumed run is refused before it is encoded.
    """
    tasks = _tasks(run_text, settings)
    max_length, text = settings.filters.max_length, run_text.validation
    skips_bad_lines = settings.reading.bad_lines == "skip"
    validation = encode_text(text, run_text.tokenizer, max_length, skips_bad_lines)
    overlong = validation.counts.dropped["dropped as too long"]
    if overlong and not len(run_text.held_out):
        raise InputError(
            f"max_length={max_length} is too short for {overlong:,} of "
            f"{text.pairs:,} validation pairs; raise it or remove them from the files"
        )
    is_whole = validation.counts.pairs == text.pairs
    fitting = text if is_whole else _fitting(text, run_text.tokenizer, max_length)
    sha256 = json_digest([[task.key for task in tasks], settings.weights, fitting.sha256])
    if expected_sha256 is not None:
        check_equal("text's sha256", expected_sha256, sha256)
    if settings.drop_duplicates:
        tasks = [without_duplicates(settings.store, task, console) for task in tasks]
    training = [prepared_corpus(settings.store, task, console) for task in tasks]
    origin = ""
    if len(run_text.held_out):
        origin = f"{text.pairs:,} pairs of the training text, chosen by the seed; "
    report = (
        *(f"training: {corpus.counts.report()}" for corpus in training),
        f"validation: {origin}{validation.counts.report()}",
    )
    pairs = Corpus.mixed(training, settings.weights) if settings.weights else training[0]
    return Corpora(pairs, validation, fitting, run_text.tokenizer, report, sha256)


def try_corpora(run_text: RunText, settings: TextSettings, console: Console) -> tuple[str, ...]:
    """Return the lines of the report on the training text, and write no prepared corpus."""
    tasks = _tasks(run_text, settings)
    if settings.drop_duplicates:
        tasks = [without_duplicates(settings.store, task, console) for task in tasks]
    return tuple(f"training: {dry_run(task, console).report()}" for task in tasks)


def _tasks(run_text: RunText, settings: TextSettings) -> list[Task]:
    return [
        corpus_task(
            text,
            run_text.tokenizer,
            settings.filters,
            {"held out for validation": run_text.held_out},  # none where there are several texts
            settings.drop_duplicates,
        )
        for text in run_text.training
    ]


def _fitting(text: Text, tokenizer: Tokenizer, max_length: int) -> Text:
    """Return the pairs that the tokenizer takes and that are not too long."""

    def fits(ids: list[int] | LineError) -> bool:
        return not isinstance(ids, LineError) and len(ids) <= max_length

    sides = [encode_lines(tokenizer.encode_source, text.sources)]
    sides += [encode_lines(tokenizer.encode_target, text.targets)]
    pairs = zip(text.sources, text.targets, *sides, strict=True)
    sources, targets = zip(*(pair for *pair, a, b in pairs if fits(a) and fits(b)), strict=True)
    return dataclasses.replace(text, sources=sources, targets=targets)


def _shown(values: Sequence[Path | float | int]) -> str:
    return " ".join(map(str, values))
