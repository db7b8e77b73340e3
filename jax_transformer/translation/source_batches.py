"""Lines in windows, lines in sentences, and the sources of a window in batches of few shapes.

The library sentencex (the extra [sentences]) finds the ends of sentences by rules, without a
network.
"""

import dataclasses
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, no_type_check

import numpy as np
from jaxtyping import Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import check_fields
from jax_transformer.decoding.generation_config import Count
from jax_transformer.errors import InputError, check_installed, naming_the_extra, shorten
from jax_transformer.tokenizers.segmenters import library_faults

FIRST_WINDOW = 64  # lines
GROWTH = 16  # factor from one window to the next
LARGEST_WINDOW = 8192  # lines
PAUSE = 0.1  # seconds without another line
SHORTEST_BATCH = 8  # tokens
MOST_ROWS = 2**16  # of a batch, whatever number of tokens it may have
LANGUAGE = re.compile("[a-z]{2,3}(-[a-z]+)*")
NOT_PLAIN = re.compile(r"[\s\ud800-\udfff]")  # sentencex 1.0.32 fails at some of them


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class LineOptions:
    """How a stream of lines becomes the sources of a search, in windows and batches.

    Attributes:
        overlong: What happens to a line, or a sentence, of more tokens than the model takes,
            special tokens included: "refuse" makes it a bad line, "cut" cuts it.
        split_sentences: Code of the language of the lines, for example en: each sentence is
            translated by itself, and what stands between the sentences stays (the extra
            [sentences]). The score of a line is the sum of its sentences'. Without it, a line is
            translated as it is.
        max_tokens: Most tokens, padding included (lines times hypotheses times length), of a batch
            of more than one line on a device: a higher number needs more memory and fewer batches.
        window: Most lines that are read, sorted by length and translated together: a higher number
            needs more memory and pads less. The first window has 64 lines, for an early start, and
            each one has 16 times as many as the one before, up to this number.
    """

    overlong: Literal["refuse", "cut"] = "refuse"
    split_sentences: str | None = None
    max_tokens: Count = 4096
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


class SourceBatch(NamedTuple):
    """Sources of similar length; rows that are left repeat the first one."""

    members: list[int]  # indices of the sources in the first rows
    src: Integer[np.ndarray, "batch length"]  # padded at the right
    target_length: int  # most tokens of a translation


def usual_target_length(
    source_length: int | Integer[np.ndarray, " rows"],
) -> int | Integer[np.ndarray, " rows"]:
    """Return the number of tokens that few translations of a source exceed."""
    return 2 * source_length + 10


class Window(NamedTuple):
    """Lines that are translated together."""

    start: int  # number of lines before it
    lines: list[str]
    may_be_the_last: bool  # it is the first window, or a pause has ended it


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
        yield Window(start, window, start == 0 or paused)
        start, size = start + len(window), min(GROWTH * size, largest)


def source_batches(
    config: TransformerConfig,
    sources: Sequence[list[int]],
    target_length: Callable[[int], int],
    most_tokens: int,
    shards: int,
    may_be_the_last: bool,
) -> Iterator[SourceBatch]:
    """Yield the sources that are not empty, longest first, in few shapes.

    The length of a batch is a power of two or `config.max_length`, and its number of rows follows
    from the length, so that all windows share their shapes: a compilation takes longer than a
    batch. Only the last batch of a window that may be the last one may have fewer rows: somebody
    may wait for it. `shards` divides the number of rows.

    Args:
        target_length: Returns the most tokens of a translation from the length of its batch.
        most_tokens: Most tokens of a batch of more than one row: rows times the length of the
            sources, or the length for which long targets would be usual: the cache grows with them.
    """
    lengths = [len(ids) for ids in sources]
    members = [index for index, length in enumerate(lengths) if length]
    order = sorted(members, key=lambda index: -lengths[index])
    while order:
        # Longest first: a batch that does not fit into memory fails before any other is translated.
        length = min(_power_of_two(max(SHORTEST_BATCH, lengths[order[0]])), config.max_length)
        longest = target_length(length)
        counted = max(length, (longest - usual_target_length(0)) // 2)
        count = max(1, min(most_tokens // counted, MOST_ROWS) // shards) * shards
        members, order = order[:count], order[count:]
        if may_be_the_last and not order:
            count = min(count, -(-_power_of_two(len(members)) // shards) * shards)
        # 64 bits: `generate` then refuses an id that 32 bits would wrap around.
        src = np.full((count, length), config.pad_id, np.int64)
        for row, index in zip(src, members + members[:1] * count, strict=False):
            row[: lengths[index]] = sources[index]
        yield SourceBatch(members, src, longest)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
