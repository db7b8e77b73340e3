"""Pieces of texts and whole pairs, joined into rows that are full: a text is cut where a row ends.

No piece crosses a text, and each token of a text is in one piece of an epoch.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jax_transformer.errors import InputError
from jax_transformer.text.denoising import Objective

LOOK_AHEAD = 256  # texts and pairs that are considered for the next row
FEWEST = 8  # tokens of a piece, if the text has as many


class Piece(NamedTuple):
    """A part of a text, or a pair; its key follows from epoch, number and begin."""

    number: int  # of the text or the pair in its corpus
    epoch: int  # how often the texts beside it have been drawn before
    begin: int  # its tokens of the text; 0 for a pair
    end: int
    source: int  # tokens of the source in a batch, EOS included
    target: int  # of the target

    def key(self, seed: int) -> tuple[int, ...]:
        """Return the key of the example."""
        return seed, self.epoch, self.number, self.begin


def fill_rows(
    coming: Iterable[tuple[Piece, Objective | None]], row: tuple[int, int]
) -> list[list[Piece]]:
    """Fill row by row with what fits of the next `LOOK_AHEAD` texts and pairs.

    Args:
        coming: Whole texts with their objective, and pairs with None.
        row: Tokens of the source and of the target that a row has.
    """
    coming, rows = iter(coming), []
    waiting = list(itertools.islice(coming, LOOK_AHEAD))
    while waiting:
        free, taken, left = row, [], []
        for place, (piece, objective) in enumerate(waiting):
            part = _part_that_fits(piece, objective, free)
            if part is None:
                left.append((piece, objective))
                continue
            taken.append(part)
            free = free[0] - part.source, free[1] - part.target
            if part.end < piece.end:
                left.append((piece._replace(begin=part.end), objective))
            if min(free) < 1:
                left += waiting[place + 1 :]
                break
        if not taken:
            raise InputError(
                f"a row of {row[0]} and {row[1]} tokens is too short for an example; raise "
                "pack_length"
            )
        rows.append(taken)
        waiting = left + list(itertools.islice(coming, LOOK_AHEAD - len(left)))
    return rows


def _part_that_fits(
    piece: Piece, objective: Objective | None, free: tuple[int, int]
) -> Piece | None:
    """Return the longest beginning of a text that fits, or the whole pair; None if none does."""
    if objective is None:
        return piece if piece.source <= free[0] and piece.target <= free[1] else None
    length, key = piece.end - piece.begin, piece.key(objective.seed)
    if sum(free) < min(FEWEST, length) + 2:  # each token is in one side at least, and EOS in both
        return None
    count, source, target = objective.fit(length, free, key)
    if 0 < length - count < FEWEST:  # the rest would be too short
        count, source, target = objective.fit(max(length - FEWEST, 0), free, key)
    if count < min(FEWEST, length):
        return None
    return piece._replace(end=piece.begin + count, source=source, target=target)
