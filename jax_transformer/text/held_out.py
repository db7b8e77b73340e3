"""Validation pairs or documents, which a seed chooses from a text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import json_digest
from jax_transformer.text.corpus import shuffled_numbers
from jax_transformer.text.parallel_text import BLOCK_PAIRS, Text, TextFiles, has_text, no_pairs
from jax_transformer.text.store import FORMAT, read_or_make

MOST_CANDIDATES = 2**20  # pairs among which the held-out ones are looked for: others are blank


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
