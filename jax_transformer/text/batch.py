"""A batch as a training step reads it, and ragged ids as one array; needs no data library."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jax_transformer.errors import InputError, shorten


class Batch(NamedTuple):
    """Pairs as rows of one length, padded at the right; a row may be all padding.

    A row contains one pair. In a packed batch it contains several pairs side by side: its segments
    1, 2, ... of source and of target; padding is segment 0.

    Attributes:
        src: Source ids, then EOS [batch, length].
        tgt_in: BOS, then target ids [batch, length].
        tgt_out: Target ids, then EOS [batch, length].
        src_segments: Segment of each source token [batch, length]; None if it is not packed.
        tgt_segments: Segment of each target token [batch, length]; None if it is not packed.
    """

    src: Int32[np.ndarray, "batch length"]
    tgt_in: Int32[np.ndarray, "batch length"]
    tgt_out: Int32[np.ndarray, "batch length"]
    src_segments: Int32[np.ndarray, "batch length"] | None = None
    tgt_segments: Int32[np.ndarray, "batch length"] | None = None


def pad(
    rows: Sequence[Sequence[int]], pad_id: int, length: int | None = None
) -> Int32[np.ndarray, "batch length"]:
    """Return rows of ids as one array, padded at the right.

        src = jax_transformer.pad([[5, 6, 2], [7, 2]], config.pad_id)

    Args:
        rows: Ids, as `tokenizer.encode_source(lines)` returns them; their lengths may differ.
        pad_id: `config.pad_id`.
        length: Length of the array; None is that of the longest row. `jax.jit` compiles each
            length anew, so few lengths are better than many.

    Returns:
        Ids [batch, length].

    Raises:
        InputError: A row is no sequence of whole numbers, an id does not fit in 32 bits, or a row
            is longer than `length`.
    """
    try:
        longest = max(map(len, rows), default=0)
        length = longest if length is None else length
        if longest > length:
            raise InputError(f"a row has {longest} ids, more than length={length}; raise length")
        padded = np.full((len(rows), length), operator.index(pad_id), np.int32)
        for ids, row in zip(padded, rows, strict=True):
            ids[: len(row)] = [operator.index(token_id) for token_id in row]
    except (TypeError, OverflowError) as error:
        raise InputError(
            f"rows={shorten(rows)} must be rows of ids, whole numbers of 32 bits, as "
            "encode_source returns them"
        ) from error
    return padded
