"""What a seed draws from a text: held-out pairs, and lines that a tokenizer is trained on."""

import hashlib
import itertools
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import json_digest
from jax_transformer.text.corpus import shuffled_numbers
from jax_transformer.text.denoising import MODE_TOKENS, SENTINEL
from jax_transformer.text.parallel_text import BLOCK_PAIRS, Text, TextFiles, has_text, no_pairs
from jax_transformer.text.store import FORMAT, read_or_make
from jax_transformer.tokenizers import (
    Tokenizer,
    from_text,
    to_text,
    train_byte_pair,
    train_unigram,
)

MOST_CANDIDATES = 2**20  # pairs among which the held-out ones are looked for: others are blank
# Characters of a word. For each character, the trainer takes as long in words of 3,000 as of 500
# characters, 4 times as long in words of 30,000, and 25 times as long in words of 300,000.
LONGEST_WORD = 1_000


def held_out(
    store: Path, text: Text | TextFiles, count: int, seed: int, console: Console
) -> tuple[Int64[np.ndarray, "_"], Text]:
    """Return the numbers and the lines of validation pairs or documents, which have text.

    A seeded shuffle chooses them; they are returned in the order of the text.
    """
    entry = store / "held_out" / f"{json_digest([FORMAT, text.sha256, count, seed])}.json"

    def choose() -> list[Any]:
        with console.status("choosing the validation pairs"):
            lines = _chosen_by_seed(text, count, seed)
        return [list(lines), *zip(*lines.values(), strict=True)]

    declared = tuple[list[int], tuple[str, ...], tuple[str, ...]]
    if text.reading.documents:
        declared = tuple[list[int], tuple[str, ...]]
    numbers, *sides = read_or_make(entry, declared, console, choose)
    return np.array(numbers, np.int64), Text(*sides)


def _chosen_by_seed(text: Text | TextFiles, count: int, seed: int) -> dict[int, tuple[str, ...]]:
    asked, most = count, min(text.pairs, max(MOST_CANDIDATES, 4 * count))
    while True:
        asked = min(2 * asked + 64, most)
        candidates = shuffled_numbers(text.pairs, seed, range(asked))
        chosen = chosen_pairs(text, np.sort(candidates))
        lines = {number: pair for number, pair in chosen if has_text(pair)}
        usable = [number for number in candidates.tolist() if number in lines]
        if len(usable) > count or asked == most:
            break
    if not usable:
        raise no_pairs(text.names, asked)
    if len(usable) <= count:
        raise InputError(
            f"valid_pairs={count} leaves none of {len(usable):,} pairs to train on, which have "
            f"text on both sides among {asked:,}; lower it, or name valid_source and valid_target"
        )
    return {number: lines[number] for number in sorted(usable[:count])}


def chosen_pairs(
    text: Text | TextFiles, numbers: Int64[np.ndarray, "_"]
) -> Iterator[tuple[int, tuple[str, ...]]]:
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
    byte_fallback: bool,
    most_pairs: int,
    longest: int,
    seed: int,
    console: Console,
    sentinels: int = 0,
) -> Tokenizer:
    """Return the tokenizer of texts, trained on a seeded sample of `most_pairs` pairs.

    It is a byte-pair encoding, or with `sentinels` a unigram model with tokens for denoising. It
    sees no line of more than `longest` characters (documents are cut), and of the first text
    none of the pairs whose numbers `without` has, ascending.
    """
    recipe = {
        "format": FORMAT,
        "texts": [text.sha256 for text in texts],
        "without": hashlib.sha256(without.tobytes()).hexdigest(),
        "vocab_size": vocab_size,
        "byte_fallback": byte_fallback,
        **({"sentinels": sentinels} if sentinels else {}),
        "pairs": most_pairs,
        "longest": longest,
        "longest_word": LONGEST_WORD,
        "seed": seed,
    }
    entry = store / "tokenizers" / f"{json_digest(recipe)}.json"
    total, left_out = sum(text.pairs for text in texts), 0

    def lines() -> Iterator[str]:
        nonlocal left_out
        for place, text in enumerate(texts):
            share = max(1, round(most_pairs * text.pairs / total))
            numbers = sampled(share, text.pairs, seed % 2**32)
            if not place:
                numbers = np.setdiff1d(numbers, without, assume_unique=True)
            for _, pair in chosen_pairs(text, numbers):
                if text.reading.documents and has_text(pair):
                    (document,) = pair
                    starts = range(0, len(document), longest)
                    pair = tuple(document[start : start + longest] for start in starts)
                for line in pair if has_text(pair) else ():
                    if len(line) > longest or has_long_word(line):
                        left_out += 1
                    else:
                        yield line

    def train() -> str:
        with console.status("training the tokenizer"):
            if sentinels:
                names = [SENTINEL.format(number) for number in range(sentinels)]
                tokens = [*names, *MODE_TOKENS]
                tokenizer = train_unigram(
                    lines(), vocab_size, special_tokens=tokens, byte_fallback=byte_fallback
                )
            else:
                tokenizer = train_byte_pair(lines(), vocab_size, byte_fallback=byte_fallback)
        if left_out:
            console.print(
                f"{left_out:,} lines left out of the training of the tokenizer: of more "
                f"than {longest:,} characters, or with a word of more than {LONGEST_WORD:,}"
            )
        return to_text(tokenizer)

    return from_text(read_or_make(entry, str, console, train), str(entry))


def sampled(count: int, pairs: int, seed: int) -> Int64[np.ndarray, "sampled"]:
    """Return the numbers of a random sample of pairs, ascending, in time and memory of its size."""
    if pairs <= count:
        return np.arange(pairs)
    shuffled = grain.MapDataset.range(pairs).shuffle(seed=seed)
    return np.sort([shuffled[place] for place in range(count)])


def has_long_word(line: str) -> bool:
    """Return whether a word is so long that training slows down: its time grows as the square."""
    if len(line) <= LONGEST_WORD:  # nearly all lines
        return False
    runs = itertools.groupby(line, lambda c: c.isspace() or unicodedata.category(c)[0] in "PS")
    return any(len(list(run)) > LONGEST_WORD for ends, run in runs if not ends)
