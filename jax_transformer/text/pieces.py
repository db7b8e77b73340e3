"""Pieces of texts and whole pairs, joined into rows that are full: a text is cut where a row ends.

No piece crosses a text, and each token of a text is in one piece of an epoch.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jax_transformer.errors import InputError
from jax_transformer.text.denoising import Objective

LOOK_AHEAD = 256  # texts and pairs that are considered for the next row
CANDIDATES = 32  # of them, for the end of a row
FEWEST = 8  # tokens of a piece, if the text has as many
SMALLEST_ROOM = 17  # tokens of a side: it is halved, for two texts
TOO_LONG = 2**40


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


Waiting = tuple[Piece, Objective | None]  # a text with what makes its examples, or a pair


def fill_rows(coming: Iterable[Waiting], row: tuple[int, int]) -> list[list[Piece]]:
    """Fill row by row with what fits of the next `LOOK_AHEAD` texts and pairs.

    First whole ones, in their order; then beginnings of texts fill what is left.

    Args:
        coming: Whole texts with their objective, and pairs with None.
        row: Tokens of the source and of the target that a row has.
    """
    coming, rows = itertools.starmap(_with_sizes, coming), []
    waiting = list(itertools.islice(coming, LOOK_AHEAD))
    while waiting:
        taken, left, free = _whole_ones(waiting, row)
        while (found := _next_beginning(left[:CANDIDATES], free, bool(taken))) is not None:
            place, part = found
            piece, objective = left.pop(place)
            if part.end < piece.end:
                left.insert(place, _with_sizes(piece._replace(begin=part.end), objective))
            taken.append(part)
            free = _beside(part, free)
        if not taken:
            raise InputError(
                f"a row of {row[0]} and {row[1]} tokens is too short for an example; raise "
                "pack_length"
            )
        rows.append(taken)
        waiting = left + list(itertools.islice(coming, LOOK_AHEAD - len(left)))
    return rows


def _beside(piece: Piece, free: tuple[int, int]) -> tuple[int, int]:
    return free[0] - piece.source, free[1] - piece.target


def _whole_ones(
    waiting: list[Waiting], row: tuple[int, int]
) -> tuple[list[Piece], list[Waiting], tuple[int, int]]:
    """Return the whole ones that go into a row, those that are left, and what stays free.

    Beside a text, beginnings of two must still fit, and more if one side is fuller than the other.
    """
    free, taken, left = row, [], []
    sizes = [piece.end for piece, objective in waiting[:CANDIDATES] if objective is not None]
    reserve = 3 * sum(sizes) / max(len(sizes), 1) / sum(row)
    for place, (piece, objective) in enumerate(waiting):
        fits = piece.source <= free[0] and piece.target <= free[1]
        if fits and objective is not None:
            source, target = (free[0] - piece.source) / row[0], (free[1] - piece.target) / row[1]
            fits = min(source, target) - abs(source - target) > reserve
        if not fits:
            left.append((piece, objective))
            continue
        taken.append(piece)
        free = _beside(piece, free)
        if min(free) < 1:
            left += waiting[place + 1 :]
            break
    return taken, left, free


def _next_beginning(
    waiting: list[Waiting], free: tuple[int, int], any_of_them: bool
) -> tuple[int, Piece] | None:
    """Return the place of the text that goes on with a row, and its part; None if none fits.

    Choose the text that leaves least free room on the emptier side; if it fills only one side, give
    it at most half the row, so that texts of other proportions have space. A row without whole ones
    begins with the first text.
    """
    chosen = _best_beginning(waiting, free, free, any_of_them)
    if chosen is not None and chosen[0] >= SMALLEST_ROOM and min(free) >= SMALLEST_ROOM:
        half = -(-free[0] // 2), -(-free[1] // 2)
        chosen = _best_beginning(waiting, free, half, any_of_them) or chosen
    return None if chosen is None else chosen[1:]


def _best_beginning(
    waiting: list[Waiting], free: tuple[int, int], most: tuple[int, int], any_of_them: bool
) -> tuple[int, int, Piece] | None:
    """Return what stays free on the emptier side, the place of a text, and its part.

    Args:
        most: The most tokens of the part on each side.
    """
    found = (
        (max(_beside(part, free)), place, part)
        for place, (piece, objective) in enumerate(waiting)
        if objective is not None and (part := _part_that_fits(piece, objective, most))
    )
    return min(found, default=None) if any_of_them else next(found, None)


def _with_sizes(piece: Piece, objective: Objective | None) -> Waiting:
    """Return a text with the sizes of its example; they are huge where that is too long."""
    if objective is None:
        return piece, None
    length, key = piece.end - piece.begin, piece.key(objective.seed)
    count, source, target = objective.fit(length, (objective.longest,) * 2, key)
    if count < length:
        source = target = TOO_LONG
    return piece._replace(source=source, target=target), objective


def _part_that_fits(
    piece: Piece, objective: Objective | None, free: tuple[int, int]
) -> Piece | None:
    """Return the longest beginning of a text that fits; None if none does."""
    if piece.source <= free[0] and piece.target <= free[1]:
        return piece
    length, key = piece.end - piece.begin, piece.key(objective.seed)
    if sum(free) < FEWEST + 1:  # each token is in one side at least, and EOS in the target
        return None
    count, source, target = objective.fit(length, free, key)
    if 0 < length - count < FEWEST:  # the rest would be too short
        count, source, target = objective.fit(max(length - FEWEST, 0), free, key)
    if count < FEWEST:
        return None
    return piece._replace(end=piece.begin + count, source=source, target=target)
