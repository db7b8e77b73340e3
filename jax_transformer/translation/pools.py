"""Pools: sources of similar length that one search in slots translates."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.generation_config import GenerationConfig
from jax_transformer.decoding.slots import SlotSearch

SHORTEST_SOURCE = 16  # tokens, padding included
SHORTEST_SLOT = 32  # tokens of the source: a shorter one would save less than a compilation takes
SLOT_GROWTH = 4  # factor from one length of slots to the next
SLOTS_PER_SOURCE = 8  # slots for each source of a group
SMALLEST_GROUP = 4  # sources
FEWEST_LAST_SLOTS = 32  # of the last attempt: fewer would be another program in most windows
MOST_ROWS = 2**16  # of a pool, whatever number of tokens it may have


@dataclasses.dataclass
class Pool:
    """A search in slots, and the sources that wait for one.

    Attributes:
        slots: The search.
        group_size: Most sources that enter slots together.
        generation: The options of the search; the first group that enters sets them.
        waiting: Numbers of the sources that have not entered.
    """

    slots: SlotSearch
    group_size: int
    generation: GenerationConfig | None = None
    waiting: list[int] = dataclasses.field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether a source is in a slot."""
        return self.slots.num_free < self.slots.num_slots


def usual_target_length(source_length: int) -> int:
    """Return the number of tokens that few translations of a source exceed."""
    return 2 * source_length + 10


def slot_length(source_length: int, config: TransformerConfig) -> int:
    """Return the length of the memory in the slot of a source: one of few lengths."""
    length = SHORTEST_SLOT
    while length < source_length:
        length *= SLOT_GROWTH
    return min(length, config.max_length)


def pool_sizes(
    source_length: int, target_length: int, most_tokens: int, shards: int
) -> tuple[int, int]:
    """Return the number of slots of a pool, and that of the sources of a group.

    Args:
        source_length: Length of the memory in a slot.
        target_length: Most tokens of a translation.
        most_tokens: Most tokens of a pool of more than one slot: slots times the lengths of the
            source and of the target.
        shards: Divides both results.
    """
    counted = 2 * max(source_length, (target_length - usual_target_length(0)) // 2)
    num_slots = max(1, min(most_tokens // counted, MOST_ROWS) // shards) * shards
    group_size = max(SMALLEST_GROUP, num_slots // SLOTS_PER_SOURCE)
    return num_slots, min(num_slots, round_up(group_size, shards))


def padded_rows(
    rows: Sequence[Sequence[int]], count: int, longest: int, config: TransformerConfig
) -> Integer[np.ndarray, "count length"]:
    """Return ids as so many rows, padded at the right; further rows repeat the first one.

    The length is a power of two, or `longest`.
    """
    length = min(padded_length(max(map(len, rows)), config), longest)
    # 64 bits: the search then refuses an id that 32 bits would wrap around.
    padded = np.full((count, length), config.pad_id, np.int64)
    for row, ids in enumerate([*rows, *[rows[0]] * (count - len(rows))]):
        padded[row, : len(ids)] = ids
    return padded


def padded_length(length: int, config: TransformerConfig) -> int:
    """Return the length of the array of a source: a power of two, or the most of the model."""
    return min(power_of_two(max(SHORTEST_SOURCE, length)), config.max_length)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def round_up(number: int, divisor: int) -> int:
    """Return the smallest multiple of a divisor that is not below a number."""
    return -(-number // divisor) * divisor
