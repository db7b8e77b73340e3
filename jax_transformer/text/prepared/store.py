"""The folder that keeps what was computed from texts: facts, tokenizers and prepared corpora.

Each entry has the digest of all that decides it as its name. An entry that is there is used, and
nothing in it ever changes.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import MAX_TOKENIZER, read_bytes
from jax_transformer.text.corpus import ParallelCorpus
from jax_transformer.text.duplicates import DuplicateFinder, pair_digests
from jax_transformer.text.encoded import shuffled_numbers
from jax_transformer.text.parallel_text import (
    Block,
    FileFacts,
    ParallelText,
    decode_pairs,
    has_text,
)
from jax_transformer.text.prepared.corpus import MANIFEST, PreparedCorpus, open_folder
from jax_transformer.text.prepared.prepare import (
    SHARD_PAIRS,
    Filters,
    Task,
    Text,
    locked,
    prepare,
    write_whole,
)
from jax_transformer.tokenizers import BytePairTokenizer, Tokenizer, from_text, to_text
from jax_transformer.tokenizers.sample import LONGEST_WORD, LinesWithin, sampled

FORMAT = 1  # of a prepared corpus
DAMAGED = "cannot be read; delete it"
MOST_CANDIDATES = 2**20  # pairs among which the held-out ones are looked for: others are blank
MAX_HELD_OUT = 2**28  # bytes of the held-out pairs: as many as the user asks for


def default_store() -> Path:
    """Return the folder in the user's cache that holds what is prepared."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jax-transformer" / "prepared"


class MemoryText(NamedTuple):
    """A parallel text in memory, which is read like one in files.

    Attributes:
        sources: Source sentences.
        targets: Target sentences, as many as sources.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def names(self) -> str:
        """What the text is called in messages."""
        return "the sources and targets"

    def blocks(self, pairs: int) -> Iterator[Block]:
        """Yield the text in blocks of so many pairs."""
        for first in range(0, len(self.sources), pairs):
            sides = (
                [line.encode() for line in side[first : first + pairs]]
                for side in (self.sources, self.targets)
            )
            yield Block(first, first + 1, "sources", "targets", *sides, frozenset())


class KnownText(NamedTuple):
    """A text, its digest and its size.

    Attributes:
        text: The text.
        sha256: Digest of its files, as 64 hex digits.
        pairs: Number of its lines.
        files: Facts of its files, none for a text in memory.
    """

    text: Text
    sha256: str
    pairs: int
    files: tuple[FileFacts, ...] = ()


def known_text(store: Path, text: ParallelText | MemoryText, console: Console) -> KnownText:
    """Return a text with its digest; a file that did not change since the last time is not read.

    Raises:
        InputError: A file cannot be read, or two files have different numbers of lines.
    """
    if isinstance(text, MemoryText):
        content = json.dumps(text).encode()
        return KnownText(text, hashlib.sha256(content).hexdigest(), len(text.sources))
    paths = [os.path.abspath(path) for path in (*text.sources, *text.targets)]
    entry = store / "texts" / f"{digest(paths)}.json"
    with locked(entry.parent, console):
        known = []
        if entry.exists():
            known = [FileFacts.from_json(one) for one in _read_entry(entry)]
        with console.status("reading the text"):
            facts = text.facts(known)
        if facts != tuple(known):
            write_whole(entry, json.dumps([one.to_json() for one in facts]).encode())
    count = sum(one.lines for one in facts[: len(text.sources)])
    if not count:
        raise InputError(
            f"{text.names} hold no pair with text on both sides in 0 lines; name other files"
        )
    return KnownText(text, digest([one.sha256 for one in facts]), count, facts)


def held_out(
    store: Path, known: KnownText, count: int, seed: int, console: Console
) -> tuple[Int64[np.ndarray, "_"], ParallelCorpus]:
    """Choose pairs of a text for validation by a seed; return their numbers and the pairs.

    Only pairs with text on both sides are chosen, in the order of a seeded shuffle; they are
    returned in the order of the text.

    Raises:
        InputError: The text has too few pairs.
    """
    entry = store / "held_out" / f"{digest([FORMAT, known.sha256, count, seed])}.json"
    with locked(entry.parent, console):
        if not entry.exists():
            with console.status("choosing the validation pairs"):
                numbers, pairs = _chosen_by_seed(known, count, seed)
            write_whole(
                entry, json.dumps([numbers.tolist(), pairs.sources, pairs.targets]).encode()
            )
        numbers, *sides = _read_entry(entry)
    return np.array(numbers, np.int64), ParallelCorpus(*map(tuple, sides))


def _chosen_by_seed(
    known: KnownText, count: int, seed: int
) -> tuple[Int64[np.ndarray, "_"], ParallelCorpus]:
    asked, most = count, min(known.pairs, max(MOST_CANDIDATES, 4 * count))
    while True:
        asked = min(2 * asked + 64, most)
        candidates = shuffled_numbers(known.pairs, seed, range(asked))
        chosen = chosen_pairs(known.text, np.sort(candidates))
        lines = {number: pair for number, pair in chosen if has_text(pair)}
        usable = [int(number) for number in candidates if int(number) in lines]
        if len(usable) > count or asked == most:
            break
    if not usable:
        raise InputError(
            f"{known.text.names} hold no pair with text on both sides in {asked:,} lines; "
            "name other files"
        )
    if len(usable) <= count and asked < known.pairs:
        raise InputError(
            f"{known.text.names} hold text on both sides in {len(usable):,} of {asked:,} pairs, "
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
    return numbers, ParallelCorpus(sources, targets)


def chosen_pairs(
    text: Text, numbers: Int64[np.ndarray, "_"]
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield some pairs of a text with their numbers, which are ascending."""
    for block in text.blocks(SHARD_PAIRS):
        begin, end = np.searchsorted(numbers, [block.first, block.first + len(block.sources)])
        places = [int(number) - block.first for number in numbers[begin:end]]
        for place, pair in zip(places, decode_pairs(block, places), strict=True):
            yield block.first + place, pair


def trained_tokenizer(
    store: Path,
    texts: list[KnownText],
    without: Int64[np.ndarray, "_"],
    vocab_size: int,
    most_pairs: int,
    longest: int,
    seed: int,
    console: Console,
) -> BytePairTokenizer:
    """Return the byte-pair encoding of texts, trained on a seeded sample of their pairs.

    Args:
        store: Where it is kept.
        texts: The texts.
        without: Numbers of pairs of the first text that it must not see, ascending.
        vocab_size: Number of token ids.
        most_pairs: Most pairs of the sample.
        longest: Most characters of a line; longer ones are left out.
        seed: Which pairs are chosen.
        console: Shows what is done.

    Raises:
        InputError: As `BytePairTokenizer.train`.
    """
    recipe = {
        "format": FORMAT,
        "texts": [known.sha256 for known in texts],
        "without": hashlib.sha256(without.tobytes()).hexdigest(),
        "vocab_size": vocab_size,
        "pairs": most_pairs,
        "longest": longest,
        "longest_word": LONGEST_WORD,
        "seed": seed,
    }
    entry = store / "tokenizers" / f"{digest(recipe)}.json"
    total = sum(known.pairs for known in texts)

    def lines() -> Iterator[str]:
        for place, known in enumerate(texts):
            share = max(1, round(most_pairs * known.pairs / total))
            numbers = sampled(share, known.pairs, seed % 2**32)
            if not place:
                numbers = np.setdiff1d(numbers, without, assume_unique=True)
            for block in known.text.blocks(SHARD_PAIRS):
                end = block.first + len(block.sources)
                chosen = numbers[slice(*np.searchsorted(numbers, [block.first, end]))]
                for pair in decode_pairs(block, (chosen - block.first).tolist()):
                    if has_text(pair):
                        yield from pair

    with locked(entry.parent, console):
        if entry.exists():
            return from_text(read_bytes(entry, DAMAGED, 2 * MAX_TOKENIZER), str(entry))
        with console.status("training the tokenizer"):
            within = LinesWithin(lines(), longest)
            tokenizer = BytePairTokenizer.train(within, vocab_size)
        if within.left_out:
            console.print(
                f"{within.left_out:,} lines left out of the training of the tokenizer: of more "
                f"than {longest:,} characters, or with a word of more than {LONGEST_WORD:,}"
            )
        write_whole(entry, to_text(tokenizer).encode())
    return tokenizer


def corpus_task(
    store: Path,
    known: KnownText,
    tokenizer: Tokenizer,
    filters: Filters,
    left_out: dict[str, Int64[np.ndarray, "_"]],
    drop_duplicates: bool,
    console: Console,
) -> Task:
    """Return a corpus to prepare; finds its duplicates, if these are dropped.

    Args:
        store: Where the duplicates are sorted.
        known: The text.
        tokenizer: The tokenizer of both sides.
        filters: Which pairs are kept.
        left_out: Numbers of pairs that are not kept, ascending, by the reason.
        drop_duplicates: Whether a pair that repeats an earlier one is dropped.
        console: Shows what is waited for.

    Raises:
        InputError: The text cannot be used, or the disk is full.
    """
    recipe = {
        "format": FORMAT,
        "text": known.sha256,
        "tokenizer": tokenizer.digest(),
        "filters": filters._asdict(),
        "left_out": {
            reason: hashlib.sha256(numbers.tobytes()).hexdigest()
            for reason, numbers in left_out.items()
        },
        "drop_duplicates": drop_duplicates,
    }
    key = digest(recipe)
    if drop_duplicates and not (corpus_folder(store, key) / MANIFEST).exists():
        scratch = store / "duplicates" / key
        with locked(scratch, console):
            repeats = _repeated_pairs(known.text, scratch)
        left_out = {**left_out, "dropped as duplicates": repeats}
    return Task(known.text, known.files, known.pairs, left_out, filters, tokenizer, key)


def prepared_corpus(store: Path, task: Task, console: Console) -> PreparedCorpus:
    """Return a prepared corpus; prepare it, if it is not there.

    Raises:
        InputError: The text cannot be used, or the folder is damaged or cannot be written.
    """
    folder = corpus_folder(store, task.key)
    if not (folder / MANIFEST).exists():
        with locked(folder, console):
            if not (folder / MANIFEST).exists():
                return prepare(task, folder, console)
    return open_folder(folder)


def corpus_folder(store: Path, key: str) -> Path:
    """Return the folder of a prepared corpus."""
    return store / "corpora" / key[:32]


def _read_entry(entry: Path) -> list[Any]:
    """Return the list that `write_whole` has written as JSON.

    Raises:
        InputError: The file is damaged.
    """
    try:
        read = json.loads(read_bytes(entry, DAMAGED, MAX_HELD_OUT))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{entry}: is damaged ({error}); delete it") from error
    if not isinstance(read, list):
        raise InputError(f"{entry}: is damaged (no list); delete it")
    return read


def digest(value: Any) -> str:
    """Return the sha256 of a value as JSON, as 64 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _repeated_pairs(text: Text, scratch: Path) -> Int64[np.ndarray, "_"]:
    """Return the numbers of the pairs that repeat an earlier one, ascending."""
    finder = DuplicateFinder(scratch)
    for block in text.blocks(SHARD_PAIRS):
        # Blank pairs, which are dropped in any case, would all have one digest.
        runs = itertools.groupby(enumerate(decode_pairs(block)), lambda item: has_text(item[1]))
        for with_text, run in runs:
            if with_text:
                places, pairs = zip(*run, strict=True)
                finder.add(block.first + places[0], pair_digests(pairs))
    repeats = np.flatnonzero(finder.repeats())
    finder.remove()
    return repeats
