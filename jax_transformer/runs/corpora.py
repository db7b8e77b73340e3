"""The text of a run: pairs or documents to train on and to validate with, from files.

Without files, they are the embedded number words.
"""

import dataclasses
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.runs.arguments import FILES, Arguments
from jax_transformer.runs.state import check_equal
from jax_transformer.storage.reading import json_digest
from jax_transformer.text import number_words
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.denoising import LONGEST_TEXT, Objective
from jax_transformer.text.encoding import Filters, encode_text, special_ids
from jax_transformer.text.parallel_text import Text, TextFiles
from jax_transformer.text.prepare import CHARACTERS_OF_A_TOKEN, Task, dry_run, prepared_corpus
from jax_transformer.text.samples import held_out, trained_tokenizer
from jax_transformer.text.store import with_known_facts
from jax_transformer.text.tables import table_suffix
from jax_transformer.tokenizers import LineError, Tokenizer, encode_lines

# Without validation files this share of the training pairs is held out, but at most so many.
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 1000


class RunText(NamedTuple):
    """The text of a run before it is encoded."""

    tasks: list[Task]  # a training text each; several are mixed: first pairs, then documents
    prefixes: tuple[str, ...]  # of the sources of each training text
    validation: list[Text]
    is_held_out: bool  # whether the validation text is a part of the only training text
    tokenizer: Tokenizer


class Corpora(NamedTuple):
    """The text of a run as token ids."""

    training: Corpus
    validation: Corpus
    validation_text: Text  # its pairs, or its documents where there are none
    report: tuple[str, ...]  # one line for each text, for the reader
    sha256: str  # of the text, the filters and the tokenizer


def check_files(arguments: Arguments) -> None:
    """Refuse a combination of files that names no task; reads nothing."""

    def refuse_if(is_fault: object, message: str) -> None:
        if is_fault:
            raise InputError(message)

    files = {name: getattr(arguments, name) or () for name in FILES}
    for source, target in (("source", "target"), ("valid_source", "valid_target")):
        sources, targets = files[source], files[target]
        has_table = any(map(table_suffix, sources))
        beside = f"name the file beside {target}={_shown(targets)}"
        refuse_if(targets and not sources, f"{source}=None: {beside}")
        beside = f"name the file beside {source}={_shown(sources)}"
        refuse_if(sources and not (targets or has_table), f"{target}=None: {beside}")
        TextFiles(sources, targets, reading=arguments.reading)
    columns, weights, prefixes = arguments.columns, arguments.weights, arguments.prefixes
    has_table = any(map(table_suffix, files["source"] + files["valid_source"]))
    refuse_if(
        columns is not None and not (has_table and len({*columns} - {"0"}) == len(columns) == 2),
        f"columns={_shown(columns)} needs two names, or numbers from 1, of source and target, and "
        "a .tsv, .csv or .jsonl file in source or valid_source",
    )
    texts = files["text"] + files["valid_text"]
    TextFiles(texts, reading=arguments.plain_reading)
    refuse_if(
        arguments.text_column is not None and not any(map(table_suffix, texts)),
        f"text_column={arguments.text_column} needs a .csv or .jsonl file in text or valid_text",
    )
    for name in ("source", "text"):
        validation = files[f"valid_{name}"]
        beside = f"name the training text beside {_shown(validation)}"
        refuse_if(validation and not files[name], f"{name}=None: {beside}")
    text = _shown(files["text"]) or None
    refuse_if(
        (text is None) != (arguments.objective is None),
        f"objective={arguments.training.objective!r} with text={text}: a denoising objective and a "
        "plain text need each other; name both",
    )
    mixed = [group for group in (files["source"], files["text"]) if group]
    count, validates = sum(map(len, mixed)), files["valid_source"] or files["valid_text"]
    refuse_if(
        (len(mixed) > 1 or weights is not None) and not validates,
        "texts that are mixed need valid_source or valid_text; name it",
    )
    refuse_if(
        weights is not None and len(weights) != count,
        f"weights={_shown(weights)} needs a number for each file of source and text",
    )
    count = count if weights else len(mixed)
    refuse_if(
        prefixes is not None and len(prefixes) != count,
        f"prefixes={_shown(prefixes)} needs {count}: with weights one for each file, else one for "
        "the pairs and one for the plain text",
    )
    refuse_if(
        arguments.valid_pairs is not None and (validates or not mixed),
        f"valid_pairs={arguments.valid_pairs} holds pairs out of the training text; it needs "
        "source and target, and no valid_source and valid_target",
    )


def read_corpora(arguments: Arguments, tokenizer: Tokenizer | None, console: Console) -> RunText:
    """Return the text of a run, and its tokenizer; trains one if there is none."""
    seed, store = arguments.training.seed, arguments.store
    check_files(arguments)
    without = np.zeros(0, np.int64)
    if arguments.source is None and arguments.text is None:
        training, validation = number_words.corpus(seed)
        texts, validation = [training], [validation]
    else:
        texts = [with_known_facts(store, text, console) for text in _training_files(arguments)]
        validation = [text.read() for text in _files(arguments, "valid_")]
        if not validation:
            count = held_out_count(arguments, texts[0].pairs)
            without, chosen = held_out(store, texts[0], count=count, seed=seed, console=console)
            validation = [chosen]
    prefixes = arguments.prefixes or ("",) * len(texts)
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
            vocab_size=arguments.vocab_size,
            byte_fallback=arguments.byte_fallback,
            most_pairs=arguments.tokenizer_pairs,
            longest=CHARACTERS_OF_A_TOKEN * arguments.filters.max_length,
            seed=seed,
            console=console,
            sentinels=arguments.sentinels,
        )
    tasks = []
    for text, prefix in zip(texts, prefixes, strict=True):
        is_plain = text.reading.documents is not None
        task = Task(
            text,
            tokenizer,
            filters=Filters(LONGEST_TEXT) if is_plain else arguments.filters,
            held_out=without,
            drop_duplicates=arguments.drop_duplicates,
            prefix="" if is_plain else prefix,
        )
        tasks.append(task)
    return RunText(tasks, prefixes, validation, len(without) > 0, tokenizer)


def held_out_count(arguments: Arguments, pairs: int) -> int:
    """Return how many of the training pairs are held out for validation."""
    return arguments.valid_pairs or max(1, min(MOST_HELD_OUT, int(HELD_OUT_SHARE * pairs)))


def _files(arguments: Arguments, prefix: str = "") -> list[TextFiles]:
    """Return the pairs and the plain text that are named: to train on, or with "valid_"."""
    sources, targets, plain = (
        getattr(arguments, prefix + name) or () for name in ("source", "target", "text")
    )
    texts = [
        TextFiles(sources, targets, reading=arguments.reading),
        TextFiles(plain, reading=arguments.plain_reading),
    ]
    return [text for text in texts if text.sources]


def _training_files(arguments: Arguments) -> list[TextFiles]:
    """Return what is mixed: with weights each file, else the pairs and the plain text."""
    texts = _files(arguments)
    if arguments.weights is None:
        return texts
    return [
        TextFiles(paths[:1], paths[1:], reading=text.reading)
        for text in texts
        for paths in text.aligned()
    ]


def encode_corpora(
    run_text: RunText, arguments: Arguments, console: Console, expected_sha256: str | None = None
) -> Corpora:
    """Return the text of a run as ids; the training text is encoded if it is not prepared yet.

    Overlong training pairs are dropped; so are overlong pairs that are held out of them. A text of
    another sha256 than that of a resumed run is refused before it is encoded.
    """
    tasks = run_text.tasks
    objectives = [
        _objective(arguments, run_text.tokenizer, prefix) if task.text.reading.documents else None
        for task, prefix in zip(tasks, run_text.prefixes, strict=True)
    ]
    validation, fitting = _validation_corpora(run_text, arguments, objectives[-1])
    sha256 = json_digest(
        [[task.key for task in tasks], arguments.weights, *(text.sha256 for text in fitting)]
    )
    if arguments.objective and arguments.prefixes:
        sha256 = json_digest([sha256, arguments.prefixes])
    if expected_sha256 is not None:
        check_equal("text's sha256", expected_sha256, sha256)
    training = [
        prepared_corpus(arguments.store, task, console).with_objective(objective)
        for task, objective in zip(tasks, objectives, strict=True)
    ]
    origin = ""
    if run_text.is_held_out:
        origin = f"{run_text.validation[0].pairs:,} {training[0].unit} of the training text, "
        origin += "chosen by the seed; "
    report = (
        *(f"training: {corpus.counts.report(corpus.unit)}" for corpus in training),
        *(f"validation: {origin}{corpus.counts.report(corpus.unit)}" for corpus in validation),
    )
    return Corpora(
        training=Corpus.mixed(training, arguments.weights),
        validation=Corpus.mixed(validation),
        validation_text=fitting[0],
        report=report,
        sha256=sha256,
    )


def _objective(arguments: Arguments, tokenizer: Tokenizer, prefix: str) -> Objective:
    if tokenizer.kind == "separate":
        raise InputError("a plain text needs one tokenizer; leave target_tokenizer out")
    denoisers = arguments.denoisers()
    special = special_ids(tokenizer, arguments.objective, denoisers)
    texts = [prefix + denoiser.prefix for denoiser in denoisers]
    prefixes = tuple(map(tuple, tokenizer.encode_text(texts)))
    longest = min(arguments.filters.max_length, LONGEST_TEXT)
    return Objective(denoisers, prefixes, special, longest, arguments.training.seed)


def _validation_corpora(
    run_text: RunText, arguments: Arguments, objective: Objective | None
) -> tuple[list[Corpus], list[Text]]:
    """Return the validation texts as ids, and what of them is kept."""
    encoded, fitting = [], []
    max_length, tokenizer = arguments.filters.max_length, run_text.tokenizer
    for text in run_text.validation:
        skips_bad_lines = arguments.reading.bad_lines == "skip"
        corpus = encode_text(text, tokenizer, max_length, skips_bad_lines)
        overlong = corpus.counts.dropped["dropped as too long"]
        if overlong and not run_text.is_held_out:
            raise InputError(
                f"max_length={max_length} is too short for {overlong:,} of "
                f"{text.pairs:,} validation pairs; raise it or remove them from the files"
            )
        is_whole = not text.targets or corpus.counts.pairs == text.pairs
        fitting.append(text if is_whole else _fitting(text, tokenizer, max_length))
        encoded.append(corpus.with_objective(None if text.targets else objective))
    return encoded, fitting


def try_corpora(run_text: RunText, arguments: Arguments, console: Console) -> tuple[str, ...]:
    """Return the lines of the report on the training text, and write no prepared corpus."""
    counts = (dry_run(arguments.store, task, console) for task in run_text.tasks)
    return tuple(f"training: {each.report()}" for each in counts)


def _fitting(text: Text, tokenizer: Tokenizer, max_length: int) -> Text:
    """Return the pairs that the tokenizer takes and that are not too long."""
    sides = [encode_lines(tokenizer.encode_source, text.sources)]
    sides += [encode_lines(tokenizer.encode_target, text.targets)]
    fit = [
        all(not isinstance(ids, LineError) and len(ids) <= max_length for ids in pair)
        for pair in zip(*sides, strict=True)
    ]
    sources, targets = (tuple(compress(side, fit)) for side in (text.sources, text.targets))
    return dataclasses.replace(text, sources=sources, targets=targets)


def _shown(values: Sequence[Path | float | int | str] | None) -> str:
    return " ".join(map(str, values or ()))
