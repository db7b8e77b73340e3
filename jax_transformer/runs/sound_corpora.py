"""The sounds of a run and what they say, from lists: to train on and to validate with."""

import os

import numpy as np
from rich.console import Console

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.runs.arguments import Arguments
from jax_transformer.runs.corpora import Corpora, check_files, held_out_count
from jax_transformer.runs.state import check_equal
from jax_transformer.storage.reading import json_digest
from jax_transformer.text.parallel_text import Text, TextFiles
from jax_transformer.text.samples import held_out
from jax_transformer.text.sound_corpus import encode_sounds
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.transcription.transcriber import language_ids, special_ids

# Arguments that have no meaning for sounds.
OF_TEXT = ("text", "weights", "prefixes", "max_ratio", "drop_duplicates")


def task_ids(
    arguments: Arguments, tokenizer: Tokenizer, is_multilingual: bool | None
) -> tuple[int, ...]:
    """Return the ids between BOS and each text: of the language, the task, and of no times."""
    ids, languages = special_ids(tokenizer, "the run"), language_ids(tokenizer, is_multilingual)
    task, code = arguments.task or "transcribe", arguments.language
    if not languages and (task, code) == ("transcribe", None):
        return (ids["notimestamps"],)
    if code not in languages:
        known = ", ".join(languages) or "none: the model is of English alone"
        raise InputError(f"language={code!r}, what is spoken, must be one of {known}")
    return languages[code], ids[task], ids["notimestamps"]


def read_sounds(
    arguments: Arguments,
    tokenizer: Tokenizer,
    config: TransformerConfig,
    begin: tuple[int, ...],
    console: Console,
    expected_sha256: str | None = None,
) -> Corpora:
    """Return the sounds and texts of a run; those of `begin` are the ids before each text.

    The features are computed during the training: here only headers are read. Sounds longer than
    the window, and texts that are too long, are dropped. The sha256 is of the lists, not of what
    the files of sounds have.

    Raises:
        InputError: An argument is of text alone, a list or a header cannot be read, or the lists
            are others than those of a resumed run, whose sha256 is expected.
    """
    for name in OF_TEXT:
        if (value := getattr(arguments, name)) != getattr(Arguments, name):
            raise InputError(f"{name}={value} is for text, and the model reads sound; leave it out")
    if arguments.source is None:
        raise InputError("source=None: name a list of sounds and their texts, such as a .tsv file")
    check_files(arguments)
    training, sha256 = _read_lists(arguments, "")
    validation, of_validation = _read_lists(arguments, "valid_")
    origin = ""
    if validation is None:
        count, seed = held_out_count(arguments, training.pairs), arguments.training.seed
        without, validation = held_out(arguments.store, training, count, seed, console)
        kept = np.setdiff1d(np.arange(training.pairs), without).tolist()
        sides = ([side[pair] for pair in kept] for side in (training.sources, training.targets))
        training = Text(*map(tuple, sides), training.dropped_empty, training.bad_lines)
        origin = f"{len(without):,} pairs of the training text, chosen by the seed; "
    recipe = [sha256, of_validation, origin, tokenizer.digest(), begin, *arguments.filters]
    sha256 = json_digest(recipe)
    if expected_sha256 is not None:
        check_equal("text's sha256", expected_sha256, sha256)
    skips = arguments.bad_lines == "skip"
    corpora, texts = zip(
        *(
            encode_sounds(each, tokenizer, config, begin, arguments.filters, skips, console)
            for each in (training, validation)
        ),
        strict=True,
    )
    report = (
        f"training: {corpora[0].counts.report()}",
        f"validation: {origin}{corpora[1].counts.report()}",
    )
    return Corpora(*corpora, texts[1], report, sha256)


def _read_lists(arguments: Arguments, prefix: str) -> tuple[Text | None, list[str]]:
    """Return the pairs of some lists, whose paths begin at the list, and the digests of these."""
    sources, targets = (getattr(arguments, prefix + side) or () for side in ("source", "target"))
    if not sources:
        return None, []
    lists = TextFiles(sources, targets, reading=arguments.reading).aligned()
    texts = [TextFiles(paths[:1], paths[1:], reading=arguments.reading).read() for paths in lists]
    files = [
        os.path.join(paths[0].parent, file)
        for paths, text in zip(lists, texts, strict=True)
        for file in text.sources
    ]
    said = tuple(line for text in texts for line in text.targets)
    bad_lines = tuple(place for text in texts for place in text.bad_lines)
    empty = sum(text.dropped_empty for text in texts)
    return Text(tuple(files), said, empty, bad_lines), [text.sha256 for text in texts]
