"""Lines in windows, lines in sentences, and the sources of a window in pools of few shapes.

The library sentencex (the extra [sentences]) finds the ends of sentences by rules, without a
network.
"""

import dataclasses
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, no_type_check

import numpy as np
from jaxtyping import Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import check_fields
from jax_transformer.decoding.generation_config import Count
from jax_transformer.errors import InputError, check_installed, naming_the_extra, shorten
from jax_transformer.tokenizers.segmenters import library_faults

FIRST_WINDOW = 128  # lines
GROWTH = 16  # factor from one window to the next
LARGEST_WINDOW = 8192  # lines
PAUSE = 0.1  # seconds without another line
SHORTEST_SOURCE = 16  # tokens, padding included
SHORTEST_SLOT = 32  # tokens of the source: a shorter one would save less than a compilation takes
SLOT_GROWTH = 4  # factor from one length of slots to the next
SLOTS_PER_SOURCE = 8  # slots for each source of a group
SMALLEST_GROUP = 4  # sources
FEWEST_LAST_SLOTS = 32  # of the last attempt: fewer would be another program in most windows
MOST_ROWS = 2**16  # of a pool, whatever number of tokens it may have
LANGUAGE = re.compile("[a-z]{2,3}(-[a-z]+)*")
NOT_PLAIN = re.compile(r"[\s\ud800-\udfff]")  # sentencex 1.0.32 fails at some of them


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class LineOptions:
    """How a stream of lines becomes the sources of a search, in windows and pools.

    Attributes:
        overlong: What happens to a line, or a sentence, of more tokens than the model takes,
            special tokens included: "refuse" makes it a bad line, "cut" cuts it.
        split_sentences: Code of the language of the lines, for example en: each sentence is
            translated by itself, and what stands between the sentences stays (the extra
            [sentences]). The score of a line is the sum of its sentences'. Without it, a line is
            translated as it is.
        max_tokens: Most tokens, padding included (lines times hypotheses times the lengths of
            source and target), that a device translates at a time, if these are several lines: a
            higher number needs more memory and fewer steps.
        window: Most lines that are read, sorted by length and translated together: a higher number
            needs more memory and waits less. The first window has 128 lines, for an early start,
            and each one has 16 times as many as the one before, up to this number.
    """

    overlong: Literal["refuse", "cut"] = "refuse"
    split_sentences: str | None = None
    max_tokens: Count = 8192
    window: Count = LARGEST_WINDOW

    def __post_init__(self) -> None:
        check_fields(self)


def check_split(language: str | None, num_hypotheses: int = 1, alignments: bool = False) -> None:
    """Refuse a language that is not a code, and what cannot be joined from sentences."""
    if language is None:
        return
    named = f"split_sentences={shorten(language)}"
    if not LANGUAGE.fullmatch(language):
        raise InputError(f"{named} must be the code of the text's language, for example 'en'")
    if num_hypotheses > 1:
        raise InputError(f"{named} joins the best translations: set num_hypotheses=1")
    if alignments:
        raise InputError(f"{named}: alignments are of whole lines; leave one of the two out")
    with naming_the_extra("split_sentences"):
        check_installed("sentencex")


def split_sentences(text: str, language: str) -> list[str]:
    """Return the parts of a text: what stands before, between and behind its sentences, and them.

    The sentences are the parts 1, 3, 5 and so on; white space alone is around them. All parts
    together are the text. A line break always ends a sentence.

    Args:
        language: Code of the language of the text, of two letters where ISO 639 has such a code.
            Without rules for it, sentencex uses those of a related language or of English.
    """
    import sentencex

    parts = [""]
    for line in text.splitlines(keepends=True):
        with library_faults("the text cannot be split into sentences"):
            found = sentencex.segment(language, NOT_PLAIN.sub(" ", line))
        ends = [0, *accumulate(map(len, found)), len(line)]
        for start, end in pairwise(ends):
            if sentence := line[start:end].strip():
                before, _, after = line[start:end].partition(sentence)
                parts[-1] += before
                parts += [sentence, after]
            else:
                parts[-1] += line[start:end]
    return parts


class Pool(NamedTuple):
    """Sources that one search in slots translates.

    Attributes:
        members: Numbers of the sources, longest first.
        source_length: Most tokens of a source.
        target_length: Most tokens of a translation.
        num_slots: Number of sources that are translated at a time.
        group: Number of sources that enter slots together.
    """

    members: list[int]
    source_length: int
    target_length: int
    num_slots: int
    group: int


def usual_target_length(source_length: int) -> int:
    """Return the number of tokens that few translations of a source exceed."""
    return 2 * source_length + 10


class Window(NamedTuple):
    """Lines that are translated together."""

    start: int  # number of lines before it
    lines: list[str]


def with_pauses(lines: Iterable[str]) -> Iterator[str | None]:
    """Yield lines as they arrive, and None after each `PAUSE` without one; a thread reads them."""
    arrived: queue.Queue[str | BaseException] = queue.Queue(LARGEST_WINDOW)

    def read() -> None:
        try:
            for line in lines:
                arrived.put(line)
            arrived.put(StopIteration())
        except BaseException as error:
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=PAUSE)
        except queue.Empty:
            line = None
        if isinstance(line, StopIteration):
            return
        if isinstance(line, BaseException):
            raise line
        yield line


def windows(lines: Iterable[str | None], largest: int, skip: int = 0) -> Iterator[Window]:
    """Yield the lines of a stream in windows, small ones first, as `LineOptions.window` says.

    None among the lines ends a window, as `with_pauses` yields it.

    Args:
        skip: Number of lines before `lines`, a sum of the first sizes: the windows are then those
            of the whole stream.
    """
    lines, start, size = iter(lines), 0, min(FIRST_WINDOW, largest)
    while start < skip:
        start, size = start + size, min(GROWTH * size, largest)
    while True:
        window, paused = [], False
        for line in lines:
            if line is not None:
                window.append(line)
            paused = line is None and bool(window)
            if paused or len(window) == size:
                break
        if not window:
            return
        yield Window(start, window)
        start, size = start + len(window), min(GROWTH * size, largest)


def source_pools(
    config: TransformerConfig,
    lengths: Sequence[int],
    target_length: Callable[[int], int],
    most_tokens: int,
    shards: int,
    is_last: bool,
) -> Iterator[Pool]:
    """Yield the sources that are not empty, longest first, in pools of few shapes.

    Windows share the shapes: a compilation takes longer than what a closer length saves. So the
    sources of the last attempt are one pool, and others that are too few to fill their slots are
    left to it, unless they are the most.

    Args:
        lengths: Number of tokens of each source.
        target_length: Returns the most tokens of a translation from the length of its pool.
        most_tokens: Most tokens of a pool of more than one slot: slots times the lengths of the
            source and of the target.
        shards: Divides the number of slots, and that of a group.
    """
    members: dict[int, list[int]] = {}
    order = sorted(filter(lengths.__getitem__, range(len(lengths))), key=lambda n: -lengths[n])
    for index in order:
        length = slot_length(lengths[order[0] if is_last else index], config)
        members.setdefault(length, []).append(index)
    # Longest first: a pool that does not fit into memory fails before any other is translated.
    for length, own in members.items():
        pool = empty_pool(length, target_length(length), most_tokens, shards)._replace(members=own)
        slots = pool.num_slots
        if len(own) < min(slots, max(map(len, members.values()))):
            continue
        fewest = FEWEST_LAST_SLOTS if is_last else 1
        fewer = -(-max(_power_of_two(len(own)), fewest) // shards) * shards
        if fewer < slots or (is_last and len(own) <= slots):  # one group
            fewer = min(fewer, slots)
            pool = pool._replace(num_slots=fewer, group=fewer)
        yield pool


def slot_length(source_length: int, config: TransformerConfig) -> int:
    """Return the length of the memory in the slot of a source: one of few lengths."""
    length = SHORTEST_SLOT
    while length < source_length:
        length *= SLOT_GROWTH
    return min(length, config.max_length)


def empty_pool(source_length: int, target_length: int, most_tokens: int, shards: int) -> Pool:
    """Return a pool of as many slots as the tokens allow; the arguments are as above."""
    counted = 2 * max(source_length, (target_length - usual_target_length(0)) // 2)
    slots = max(1, min(most_tokens // counted, MOST_ROWS) // shards) * shards
    group = max(SMALLEST_GROUP, slots // SLOTS_PER_SOURCE)
    group = min(slots, -(-group // shards) * shards)
    return Pool([], source_length, target_length, slots, group)


def grouped(
    pool: Pool, sources: Sequence[list[int]] | Mapping[int, list[int]], config: TransformerConfig
) -> Iterator[tuple[list[int], Integer[np.ndarray, "group length"]]]:
    """Yield the numbers of the sources of each group, and their ids, padded at the right.

    The length is a power of two, or that of the pool. Rows that are left repeat the first one.
    """
    for start in range(0, len(pool.members), pool.group):
        members = pool.members[start : start + pool.group]
        longest = max(len(sources[index]) for index in members)
        length = min(padded_length(longest, config), pool.source_length)
        # 64 bits: the search then refuses an id that 32 bits would wrap around.
        src = np.full((pool.group, length), config.pad_id, np.int64)
        for row, index in zip(src, members + members[:1] * pool.group, strict=False):
            row[: len(sources[index])] = sources[index]
        yield members, src


def padded_length(length: int, config: TransformerConfig) -> int:
    """Return the length of the array of a source: a power of two, or the most of the model."""
    return min(_power_of_two(max(SHORTEST_SOURCE, length)), config.max_length)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
