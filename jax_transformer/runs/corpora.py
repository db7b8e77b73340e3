"""The text of a run: pairs or documents to train on and to validate with, from files.

Without files, they are the embedded number words.
"""

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
from jax_transformer.text.denoising import (
    LONGEST_TEXT,
    Denoiser,
    DenoisingObjective,
    Objective,
)
from jax_transformer.text.encoding import Filters, encode_text, special_ids
from jax_transformer.text.held_out import held_out
from jax_transformer.text.parallel_text import (
    Documents,
    Reading,
    Text,
    TextFiles,
    is_tsv,
    read_text,
)
from jax_transformer.text.prepare import (
    CHARACTERS_OF_A_TOKEN,
    Task,
    corpus_task,
    dry_run,
    prepared_corpus,
    without_duplicates,
)
from jax_transformer.text.store import with_known_facts
from jax_transformer.text.vocabulary import Vocabulary, trained_tokenizer
from jax_transformer.tokenizers import LineError, Tokenizer, encode_lines

# Without validation files this share of the training pairs is held out, but at most so many.
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 1000


class Files(NamedTuple):
    """The text files of a run; all None for the embedded number words."""

    source: tuple[Path, ...] | None = None
    target: tuple[Path, ...] | None = None
    valid_source: tuple[Path, ...] | None = None
    valid_target: tuple[Path, ...] | None = None
    text: tuple[Path, ...] | None = None
    valid_text: tuple[Path, ...] | None = None


class TextSettings(NamedTuple):
    """Which text a run trains on."""

    files: Files
    weights: tuple[float, ...] | None  # how often the pairs or documents of each file are drawn
    valid_pairs: int | None  # to hold out of the training text; None: 5 %, from 1 to 1,000
    seed: int  # chooses the pairs that are held out, and those that train the tokenizer
    vocabulary: Vocabulary  # of the tokenizer that is trained, where the run has none
    tokenizer_pairs: int  # most pairs that it is trained on
    filters: Filters
    drop_duplicates: bool
    store: Path  # the folder that keeps what was prepared
    reading: Reading  # of pairs
    documents: Documents = "lines"  # of a plain text
    objective: DenoisingObjective | None = None  # of a plain text; None: there is none
    denoisers: tuple[Denoiser, ...] = ()
    prefixes: tuple[str, ...] | None = None  # of the sources of each text that is mixed


class RunText(NamedTuple):
    """The text of a run before it is encoded."""

    training: list[Text | TextFiles]  # several where they are mixed: first pairs, then documents
    held_out: Int64[np.ndarray, "_"]  # pairs that are left out, ascending; none of several texts
    validation: list[Text]
    tokenizer: Tokenizer
    prefixes: tuple[str, ...]  # of the sources of each training text


class Corpora(NamedTuple):
    """The text of a run as token ids."""

    training: Corpus
    validation: Corpus
    validation_text: Text  # its pairs, or its documents where there are none
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
    for name in ("source", "text"):
        if (validation := getattr(files, f"valid_{name}")) and not getattr(files, name):
            raise InputError(f"{name}=None: name the training text beside {_shown(validation)}")
    if bool(files.text) != (settings.objective is not None):
        objective, text = settings.objective or "translation", files.text and _shown(files.text)
        raise InputError(
            f"objective={objective!r} with text={text}: a denoising objective and a plain text "
            "need each other; name both"
        )
    groups = [group for group in (files.source, files.text) if group]
    named, validates = sum(map(len, groups)), files.valid_source or files.valid_text
    if (len(groups) > 1 or weights is not None) and not validates:
        raise InputError("texts that are mixed need valid_source or valid_text; name it")
    if weights is not None and len(weights) != named:
        raise InputError(
            f"weights={_shown(weights)} needs a number for each file of source and text"
        )
    count = named if weights else len(groups)
    if settings.prefixes is not None and len(settings.prefixes) != count:
        raise InputError(
            f"prefixes={_shown(settings.prefixes)} needs {count}: with weights one for each file, "
            "else one for the pairs and one for the plain text"
        )
    if valid_pairs is None:
        return
    if valid_pairs < 1:
        raise InputError(f"valid_pairs={valid_pairs} must be at least 1")
    if validates or not groups:
        raise InputError(
            f"valid_pairs={valid_pairs} holds pairs out of the training text; it needs source and "
            "target, and no valid_source and valid_target"
        )


def read_corpora(settings: TextSettings, tokenizer: Tokenizer | None, console: Console) -> RunText:
    """Return the text of a run, and its tokenizer; trains one if there is none."""
    files, seed, store = settings.files, settings.seed, settings.store
    check_files(settings)
    without = np.zeros(0, np.int64)
    if files.source is None and files.text is None:
        training, validation = number_words.corpus(seed)
        texts, validation = [training], [validation]
    else:
        texts = [with_known_facts(store, text, console) for text in _training_files(settings)]
        validation = _validation_texts(settings)
        if not validation:
            share = max(1, min(MOST_HELD_OUT, int(HELD_OUT_SHARE * texts[0].pairs)))
            count = settings.valid_pairs or share
            without, chosen = held_out(store, texts[0], count, seed, console)
            validation = [chosen]
    prefixes = settings.prefixes or ("",) * len(texts)
    validation = [
        dataclasses.replace(text, sources=tuple(prefixes[0] + line for line in text.sources))
        if text.targets
        else text
        for text in validation
    ]
    if tokenizer is None:
        tokenizer = trained_tokenizer(
            store,
            texts,
            without,
            settings.vocabulary,
            settings.tokenizer_pairs,
            CHARACTERS_OF_A_TOKEN * settings.filters.max_length,
            seed,
            console,
        )
    return RunText(texts, without, validation, tokenizer, prefixes)


def _training_files(settings: TextSettings) -> list[TextFiles]:
    """Return what is mixed: with weights each file, else the pairs and the plain text."""
    files, texts = settings.files, []
    if files.source:
        texts.append(TextFiles(files.source, files.target or (), reading=settings.reading))
    if files.text:
        texts.append(TextFiles(files.text, reading=_plain(settings)))
    if settings.weights is None:
        return texts
    return [
        TextFiles(paths[:1], paths[1:], reading=text.reading)
        for text in texts
        for paths in text.aligned()
    ]


def _validation_texts(settings: TextSettings) -> list[Text]:
    files, texts = settings.files, []
    if files.valid_source:
        texts.append(read_text(files.valid_source, files.valid_target or (), settings.reading))
    if files.valid_text:
        texts.append(read_text(files.valid_text, (), _plain(settings)))
    return texts


def _plain(settings: TextSettings) -> Reading:
    return Reading(bad_lines=settings.reading.bad_lines, documents=settings.documents)


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
    tasks, tokenizer = _tasks(run_text, settings), run_text.tokenizer
    objectives = [
        _objective(settings, tokenizer, prefix) if task.text.reading.documents else None
        for task, prefix in zip(tasks, run_text.prefixes, strict=True)
    ]
    validation, fitting = _validation_corpora(run_text, settings, objectives[-1])
    sha256 = json_digest(
        [[task.key for task in tasks], settings.weights, *(text.sha256 for text in fitting)]
    )
    if settings.objective and settings.prefixes:
        sha256 = json_digest([sha256, settings.prefixes])
    if expected_sha256 is not None:
        check_equal("text's sha256", expected_sha256, sha256)
    if settings.drop_duplicates:
        tasks = [without_duplicates(settings.store, task, console) for task in tasks]
    training = [
        prepared_corpus(settings.store, task, console).with_objective(objective)
        for task, objective in zip(tasks, objectives, strict=True)
    ]
    origin = ""
    if len(run_text.held_out):
        origin = f"{run_text.validation[0].pairs:,} {training[0].unit} of the training text, "
        origin += "chosen by the seed; "
    report = (
        *(f"training: {corpus.counts.report(corpus.unit)}" for corpus in training),
        *(f"validation: {origin}{corpus.counts.report(corpus.unit)}" for corpus in validation),
    )
    mixed = Corpus.mixed(training, settings.weights), Corpus.mixed(validation)
    return Corpora(*mixed, fitting[0], tokenizer, report, sha256)


def _objective(settings: TextSettings, tokenizer: Tokenizer, prefix: str) -> Objective:
    """Return what makes the examples of a plain text."""
    if tokenizer.kind == "separate":
        raise InputError("a plain text needs one tokenizer; leave target_tokenizer out")
    special = special_ids(tokenizer, settings.objective, "tokenizer")
    texts = [prefix + denoiser.prefix for denoiser in settings.denoisers]
    prefixes = tuple(map(tuple, tokenizer.encode_text(texts)))
    longest = min(settings.filters.max_length, LONGEST_TEXT)
    return Objective(settings.denoisers, prefixes, special, longest, settings.seed)


def _validation_corpora(
    run_text: RunText, settings: TextSettings, objective: Objective | None
) -> tuple[list[Corpus], list[Text]]:
    """Return the validation texts as ids, and what of them is kept."""
    encoded, kept = [], []
    max_length, tokenizer = settings.filters.max_length, run_text.tokenizer
    for text in run_text.validation:
        skips_bad_lines = settings.reading.bad_lines == "skip"
        corpus = encode_text(text, tokenizer, max_length, skips_bad_lines)
        overlong = corpus.counts.dropped["dropped as too long"]
        if overlong and not len(run_text.held_out):
            raise InputError(
                f"max_length={max_length} is too short for {overlong:,} of "
                f"{text.pairs:,} validation pairs; raise it or remove them from the files"
            )
        is_whole = not text.targets or corpus.counts.pairs == text.pairs
        kept.append(text if is_whole else _fitting(text, tokenizer, max_length))
        encoded.append(corpus.with_objective(None if text.targets else objective))
    return encoded, kept


def try_corpora(run_text: RunText, settings: TextSettings, console: Console) -> tuple[str, ...]:
    """Return the lines of the report on the training text, and write no prepared corpus."""
    tasks = _tasks(run_text, settings)
    if settings.drop_duplicates:
        tasks = [without_duplicates(settings.store, task, console) for task in tasks]
    return tuple(f"training: {dry_run(task, console).report()}" for task in tasks)


def _tasks(run_text: RunText, settings: TextSettings) -> list[Task]:
    # None is held out where there are several texts.
    left_out, drops = {"held out for validation": run_text.held_out}, settings.drop_duplicates
    tasks = []
    for text, prefix in zip(run_text.training, run_text.prefixes, strict=True):
        of_pairs = settings.filters, left_out, drops, prefix
        of_documents = Filters(LONGEST_TEXT), left_out, drops
        options = of_documents if text.reading.documents else of_pairs
        tasks.append(corpus_task(text, run_text.tokenizer, *options))
    return tasks


def _fitting(text: Text, tokenizer: Tokenizer, max_length: int) -> Text:
    """Return the pairs that the tokenizer takes and that are not too long."""

    def fits(ids: list[int] | LineError) -> bool:
        return not isinstance(ids, LineError) and len(ids) <= max_length

    sides = [encode_lines(tokenizer.encode_source, text.sources)]
    sides += [encode_lines(tokenizer.encode_target, text.targets)]
    pairs = zip(text.sources, text.targets, *sides, strict=True)
    sources, targets = zip(*(pair for *pair, a, b in pairs if fits(a) and fits(b)), strict=True)
    return dataclasses.replace(text, sources=sources, targets=targets)


def _shown(values: Sequence[Path | float | int | str]) -> str:
    return " ".join(map(str, values))
