"""The folder that keeps what was computed from texts: facts, tokenizers and prepared corpora.

Each entry has the digest of all that decides it as its name. An entry that is there is used, and
nothing in it ever changes.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.storage.user_cache import user_cache
from jax_transformer.text.corpus import Corpus, shuffled_numbers
from jax_transformer.text.duplicates import repeated_pairs
from jax_transformer.text.encoding import Filters
from jax_transformer.text.entry import locked, read_entry, write_entry
from jax_transformer.text.parallel_text import (
    BLOCK_PAIRS,
    FileFacts,
    Text,
    TextFiles,
    digest,
    has_text,
    no_pairs,
)
from jax_transformer.text.prepare import MANIFEST, Task, open_folder, prepare
from jax_transformer.tokenizers import Tokenizer, from_text, to_text, train_byte_pair
from jax_transformer.tokenizers.training_lines import LONGEST_WORD, LinesWithin, sampled

FORMAT = 3  # of the entries
MOST_CANDIDATES = 2**20  # pairs among which the held-out ones are looked for: others are blank


def default_store() -> Path:
    """Return the folder in the user's cache that holds what is prepared."""
    cache = user_cache()
    if cache is None:
        raise InputError(
            "there is no home folder to keep encoded text in; name a folder by --prepared, or set "
            "XDG_CACHE_HOME"
        )
    return cache / "prepared"


def with_known_facts(store: Path, text: TextFiles, console: Console) -> TextFiles:
    """Return a text with its facts; a file that did not change since the last time is not read."""
    paths = [os.path.abspath(path) for path in (*text.sources, *text.targets)]
    entry = store / "texts" / f"{digest([FORMAT, *paths])}.json"
    with locked(entry.parent, console):
        earlier = []
        if entry.exists():
            earlier = read_entry(entry, list[FileFacts])
        with console.status("reading the text"):
            text = text.with_facts(earlier)
        if text.facts != tuple(earlier):
            write_entry(entry, [*map(dataclasses.asdict, text.facts)])
    if not text.pairs:
        raise no_pairs(text.names, 0)
    return text


def held_out(
    store: Path, text: Text | TextFiles, count: int, seed: int, console: Console
) -> tuple[Int64[np.ndarray, "_"], Text]:
    """Choose pairs of a text for validation by a seed; return their numbers and the pairs.

    Only pairs with text on both sides are chosen, in the order of a seeded shuffle; they are
    returned in the order of the text.
    """
    entry = store / "held_out" / f"{digest([FORMAT, text.sha256, count, seed])}.json"
    with locked(entry.parent, console):
        if not entry.exists():
            with console.status("choosing the validation pairs"):
                numbers, pairs = _chosen_by_seed(text, count, seed)
            write_entry(entry, [numbers.tolist(), pairs.sources, pairs.targets])
        numbers, *sides = read_entry(entry, tuple[list[int], tuple[str, ...], tuple[str, ...]])
    return np.array(numbers, np.int64), Text(*sides)


def _chosen_by_seed(
    text: Text | TextFiles, count: int, seed: int
) -> tuple[Int64[np.ndarray, "_"], Text]:
    asked, most = count, min(text.pairs, max(MOST_CANDIDATES, 4 * count))
    while True:
        asked = min(2 * asked + 64, most)
        candidates = shuffled_numbers(text.pairs, seed, range(asked))
        chosen = chosen_pairs(text, np.sort(candidates))
        lines = {number: pair for number, pair in chosen if has_text(pair)}
        usable = [int(number) for number in candidates if int(number) in lines]
        if len(usable) > count or asked == most:
            break
    if not usable:
        raise no_pairs(text.names, asked)
    if len(usable) <= count and asked < text.pairs:
        raise InputError(
            f"{text.names} hold text on both sides in {len(usable):,} of {asked:,} pairs, "
            f"too few to choose valid_pairs={count}; remove the blank lines, or name valid_source "
            "and valid_target"
        )
    if len(usable) <= count:
        raise InputError(
            f"valid_pairs={count} leaves none of {len(usable):,} pairs to train on; lower it, or "
            "name valid_source and valid_target"
        )
    numbers = np.sort(np.array(usable[:count], np.int64))
    sources, targets = zip(*(lines[number] for number in numbers.tolist()), strict=True)
    return numbers, Text(sources, targets)


def chosen_pairs(
    text: Text | TextFiles, numbers: Int64[np.ndarray, "_"]
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield some pairs of a text with their numbers, which are ascending."""
    for block in text.blocks(BLOCK_PAIRS):
        begin, end = np.searchsorted(numbers, [block.first, block.first + len(block.sources)])
        chosen = numbers[begin:end].tolist()
        yield from zip(chosen, block.pairs([n - block.first for n in chosen]), strict=True)


def trained_tokenizer(
    store: Path,
    texts: list[Text | TextFiles],
    without: Int64[np.ndarray, "_"],
    vocab_size: int,
    most_pairs: int,
    longest: int,
    seed: int,
    console: Console,
) -> Tokenizer:
    """Return the byte-pair encoding of texts, trained on a seeded sample of their pairs.

    Args:
        without: Numbers of pairs of the first text that it must not see, ascending.
        most_pairs: Most pairs of the sample.
        longest: Most characters of a line; longer ones are left out.
    """
    recipe = {
        "format": FORMAT,
        "texts": [text.sha256 for text in texts],
        "without": hashlib.sha256(without.tobytes()).hexdigest(),
        "vocab_size": vocab_size,
        "pairs": most_pairs,
        "longest": longest,
        "longest_word": LONGEST_WORD,
        "seed": seed,
    }
    entry = store / "tokenizers" / f"{digest(recipe)}.json"
    total = sum(text.pairs for text in texts)

    def lines() -> Iterator[str]:
        for place, text in enumerate(texts):
            share = max(1, round(most_pairs * text.pairs / total))
            numbers = sampled(share, text.pairs, seed % 2**32)
            if not place:
                numbers = np.setdiff1d(numbers, without, assume_unique=True)
            for _, pair in chosen_pairs(text, numbers):
                if has_text(pair):
                    yield from pair

    with locked(entry.parent, console):
        if entry.exists():
            return from_text(read_entry(entry, str), str(entry))
        with console.status("training the tokenizer"):
            within = LinesWithin(lines(), longest)
            tokenizer = train_byte_pair(within, vocab_size)
        if within.left_out:
            console.print(
                f"{within.left_out:,} lines left out of the training of the tokenizer: of more "
                f"than {longest:,} characters, or with a word of more than {LONGEST_WORD:,}"
            )
        write_entry(entry, to_text(tokenizer))
    return tokenizer


def corpus_task(
    text: Text | TextFiles,
    tokenizer: Tokenizer,
    filters: Filters,
    left_out: dict[str, Int64[np.ndarray, "_"]],
    drop_duplicates: bool,
) -> Task:
    """Return a corpus to prepare; `without_duplicates` then finds the pairs that are dropped."""
    recipe = {
        "format": FORMAT,
        "text": text.sha256,
        "tokenizer": tokenizer.digest(),
        "filters": filters._asdict(),
        "left_out": {
            reason: hashlib.sha256(numbers.tobytes()).hexdigest()
            for reason, numbers in left_out.items()
        },
        "drop_duplicates": drop_duplicates,
    }
    return Task(text, left_out, filters, tokenizer, digest(recipe))


def without_duplicates(store: Path, task: Task, console: Console) -> Task:
    """Return a task that leaves out its duplicates; a prepared corpus needs no search for them."""
    if (corpus_folder(store, task.key) / MANIFEST).exists():
        return task
    scratch = store / "duplicates" / task.key
    with locked(scratch, console):
        repeated = repeated_pairs(task.text.blocks(BLOCK_PAIRS), scratch)
    return task._replace(left_out=task.left_out | {"dropped as duplicates": repeated})


def prepared_corpus(store: Path, task: Task, console: Console) -> Corpus:
    """Return a prepared corpus; prepare it, if it is not there."""
    folder = corpus_folder(store, task.key)
    if not (folder / MANIFEST).exists():
        with locked(folder, console):
            if not (folder / MANIFEST).exists():
                return prepare(task, folder, console)
    return open_folder(folder)


def corpus_folder(store: Path, key: str) -> Path:
    """Return the folder of a prepared corpus."""
    return store / "corpora" / key[:32]
