"""From lines to what is translated by itself: windows of lines, their sentences, and their ids.

The library sentencex (the extra [sentences]) finds the ends of sentences by rules, without a
network.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, no_type_check

from jax_transformer.config.declared import check_fields
from jax_transformer.decoding.generation_config import Count
from jax_transformer.errors import InputError, check_installed, naming_the_extra, shorten
from jax_transformer.text.text_files import is_blank
from jax_transformer.tokenizers import LineError, encode_lines
from jax_transformer.tokenizers.segmenters import library_faults
from jax_transformer.translation.model_folder import TrainedModel

FIRST_WINDOW = 128  # lines
GROWTH = 16  # factor from one window to the next
LARGEST_WINDOW = 8192  # lines
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


class Source(NamedTuple):
    """What is translated by itself: a line, or a sentence of one."""

    text: str
    line: int  # from 1
    sentence: int = 0  # of the line, from 1; 0 is the whole line
    ids: Sequence[int] = ()  # from `encode_sources`; none of a blank or bad text
    name: str = ""  # in messages, where the user knows no line

    def __str__(self) -> str:
        line = self.name or f"line {self.line}"
        return f"sentence {self.sentence} of {line}" if self.sentence else line


def checked_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts; refuse one text alone, and what is no string."""
    if isinstance(texts, str):
        raise InputError(f"texts={shorten(texts)} must be a list of texts")
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise InputError(f"text {number} is {shorten(text)}, and must be a string")
        yield text


def windows(lines: Iterable[str | None], largest: int, skip: int = 0) -> Iterator[list[str]]:
    """Yield the lines of a stream in windows, small ones first, as `LineOptions.window` says.

    None among the lines ends a window.

    Args:
        skip: Number of lines before `lines`, a sum of the first sizes: the windows are then those
            of the whole stream.
    """
    start, size = 0, min(FIRST_WINDOW, largest)
    while start < skip:
        start, size = start + size, min(GROWTH * size, largest)
    window: list[str] = []
    for line in lines:
        if line is not None:
            window.append(line)
        if len(window) == size or (line is None and window):
            yield window
            window, size = [], min(GROWTH * size, largest)
    if window:
        yield window


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


def split_sentences(text: str, language: str | None) -> list[str]:
    """Return the parts of a text: what stands before, between and behind its sentences, and them.

    The sentences are the parts 1, 3, 5 and so on; white space alone is around them. All parts
    together are the text. A line break always ends a sentence.

    Args:
        language: Code of the language of the text, of two letters where ISO 639 has such a code.
            Without rules for it, sentencex uses those of a related language or of English.
            None: the whole text is one sentence.
    """
    if language is None:
        return ["", text, ""]
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


def encode_sources(
    model: TrainedModel,
    overlong: Literal["refuse", "cut"],
    sources: Sequence[Source],
    *,
    prefix: str = "",
    bad_lines: list[int] | None = None,
    cut: list[Source] | None = None,
) -> list[Source]:
    """Return sources with their ids.

    Args:
        overlong: As in `LineOptions`.
        prefix: Put before every text that is not blank.
        bad_lines: Takes the numbers of the lines of bad sources; if None, the first is refused.
        cut: Takes the sources that were cut.
    """
    config, _, tokenizer, _ = model
    texts = ["" if is_blank(source.text) else prefix + source.text for source in sources]
    *encoded, blank = encode_lines(tokenizer.encode_source, [*texts, ""])
    blank, most, with_ids = tokenizer.without_padding(blank), config.max_length, []
    for source, text, found in zip(sources, texts, encoded, strict=True):
        ids, fault = [], ""
        if isinstance(found, LineError):
            fault = found.fault
        elif len(ids := tokenizer.without_padding(found)) > most:
            if overlong == "cut":
                ids = tokenizer.without_padding(*tokenizer.encode_source([text], most))
                if cut is not None:
                    cut.append(source)
            else:
                longer = "" if config.positions == "learned" else "raise max_length, "
                fault = (
                    f"is {len(ids)} tokens long, EOS included, but the model takes max_length="
                    f"{most}; {longer}split it or set overlong to 'cut'"
                )
        if fault and bad_lines is None:
            raise InputError(f"{source} {fault}")
        if fault:
            bad_lines.append(source.line)
        with_ids.append(source._replace(ids=() if fault or ids == blank else ids))
    return with_ids
