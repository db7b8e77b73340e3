"""Parallel text in memory, from line-aligned files or .tsv files of pairs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from jax_transformer.errors import InputError
from jax_transformer.text.parallel_text import ParallelText, decode_pairs, has_text
from jax_transformer.text.text_files import LONGEST_LINE, overlong_line

PAIRS_AT_ONCE = 2**16

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True)
class ParallelCorpus:
    """Sentences and their translations: `targets[i]` translates `sources[i]`.

    Attributes:
        sources: Source sentences.
        targets: Target sentences, as many as sources.
        dropped_empty: Number of pairs that were dropped because a side was blank.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    dropped_empty: int = 0

    def report(self) -> str:
        """Return one line: the number of pairs that were read and that were dropped."""
        pairs = len(self.sources) + self.dropped_empty
        return f"{pairs:,} pairs read, {self.dropped_empty:,} dropped for an empty side"


def read_parallel(source_paths: Files, target_paths: Files = ()) -> ParallelCorpus:
    """Read line-aligned files, or .tsv files of pairs; drop and count the pairs with a blank side.

    Args:
        source_paths: A file with one source sentence on each line, or several; see `ParallelText`.
        target_paths: For each of them, the file with the translations on the same lines; none if
            the sources are .tsv files.

    Returns:
        The pairs with text on both sides, in the order of the files.

    Raises:
        InputError: A file is unreadable, the numbers of lines differ, a line is above
            `LONGEST_LINE` bytes, or every pair was dropped.
    """
    text = ParallelText(_paths(source_paths), _paths(target_paths))
    kept: list[tuple[str, str]] = []
    read = 0
    for block in text.blocks(PAIRS_AT_ONCE):
        if block.overlong:
            number = block.first_line + min(block.overlong)
            names = " or ".join(filter(None, (block.source_name, block.target_name)))
            raise overlong_line(names, number, LONGEST_LINE)
        kept += filter(has_text, decode_pairs(block))
        read += len(block.sources)
    if not kept:
        raise InputError(
            f"{text.names} hold no pair with text on both sides in {read:,} lines; name other files"
        )
    sources, targets = zip(*kept, strict=True)
    return ParallelCorpus(sources, targets, dropped_empty=read - len(kept))


def _paths(files: Files) -> tuple[Path, ...]:
    return tuple(map(Path, [files] if isinstance(files, str | os.PathLike) else files))
