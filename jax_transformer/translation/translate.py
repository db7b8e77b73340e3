"""Translation of a stream of lines, window by window."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, no_type_check

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_transformer.config.declared import check_fields
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import row_shards
from jax_transformer.text.encoding import encode_lines
from jax_transformer.text.text_files import is_blank
from jax_transformer.tokenizers import LineError
from jax_transformer.translation.long_text import check_split, split_sentences
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.source_batches import BatchOptions, Window, source_batches
from jax_transformer.translation.text_search import Place, TextSearch, Translation, text_search


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class LineOptions:
    """How lines become the sources of a search.

    Attributes:
        overlong: What happens to a line, or a sentence, of more tokens than the model takes,
            special tokens included: "refuse" makes it a bad line, "cut" cuts it.
        split_sentences: Code of the language of the lines, for example en: each sentence is
            translated by itself, and what stands between the sentences stays (the extra
            [sentences]). The score of a line is the sum of its sentences'. Without it, a line is
            translated as it is.
    """

    overlong: Literal["refuse", "cut"] = "refuse"
    split_sentences: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_split(self.split_sentences)


def split_options(
    options: Mapping[str, Any],
) -> tuple[LineOptions, BatchOptions, dict[str, Any]]:
    """Return options by name as those of lines, those of batches, and the rest."""
    rest = dict(options)
    parts = []
    for part in (LineOptions, BatchOptions):
        names = [each.name for each in dataclasses.fields(part) if each.name in rest]
        parts.append(part(**{name: rest.pop(name) for name in names}))
    return *parts, rest


def translate(
    model: TrainedModel,
    lines: Iterable[str],
    *,
    mesh: Mesh | None = None,
    console: Console | None = None,
    **options: Any,
) -> Iterator[list[Translation]]:
    """Yield the translations of each line of a list, in order; all lines are one window.

    Args:
        mesh: As for `text_search`.
        console: As for `translate_windows`.
        **options: Fields of `LineOptions`, `BatchOptions` and `GenerationConfig`, and `seed`.
    """
    reading, batching, named = split_options(options)
    search, lines = text_search([model], mesh, **named), list(lines)
    window, shown = Window(0, lines, True), {"total": len(lines), "console": console}
    return chain.from_iterable(translate_windows(search, [window], reading, batching, **shown))


def translate_windows(
    search: TextSearch,
    windows: Iterable[Window],
    reading: LineOptions,
    batching: BatchOptions,
    *,
    prefix: str = "",
    bad_lines: list[int] | None = None,
    total: int | None = None,
    console: Console | None = None,
) -> Iterator[list[list[Translation]]]:
    """Translate lines in windows; the translation of a line does not depend on the other lines.

    In bfloat16, hypotheses of almost equal score may change places with the shape of their batch.

    Args:
        prefix: Put before every text that is translated by itself and is not blank.
        bad_lines: Takes the numbers, from 1, of lines that are too long or no source of this model,
            whose translations are then blank. If None, the window of the first one is refused.
        total: Number of lines, for the progress; None if it is not known.
        console: Shows live progress if it is a terminal, and the number of lines that were cut.

    Yields:
        For each window: for each line its translations, best first.

    Raises:
        InputError: Sentences are split for more than one hypothesis; a line is too long, or is no
            source of this model, before its window is translated; or the logits of a line are NaN
            or infinite. The message names the line.
    """
    check_split(reading.split_sentences, search.generation.num_hypotheses)
    console = console or Console(quiet=True)
    config, shards, generation = search.models[0].config, row_shards(search.mesh), search.generation
    blank = [Translation("", 0.0, np.zeros(0, np.int32))] * generation.num_hypotheses
    number, cut, kind = 0, [], "lines" if reading.split_sentences is None else "sentences"
    most_tokens = batching.max_tokens * shards // generation.beam_size
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("lines"))
    shown = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*bar, TimeRemainingColumn(), **shown) as progress:
        task = progress.add_task("translating", total=total)
        for window in windows:
            texts, places = _split(window, reading.split_sentences)
            lines = [source for parts in texts for source in parts[1::2]]
            lines = ["" if is_blank(line) else prefix + line for line in lines]
            sources = _encode(search.models[0], lines, places, reading, bad_lines)
            cut += [places[index] for index in _cut(search.models[0], lines, sources)]
            execution, translations = search.execution_for(len(sources)), [blank] * len(sources)
            sizes = most_tokens, shards, window.may_be_the_last
            for is_last in (False, True):
                target_length = partial(search.target_length, is_last=is_last)
                for batch in source_batches(config, sources, target_length, *sizes):
                    members = [places[index] for index in batch.members]
                    found = search.translations(batch, members, execution)
                    for index, hypotheses in zip(batch.members, found, strict=True):
                        if hypotheses is not None:
                            translations[index], sources[index] = hypotheses, []
                    share = sources.count([]) / len(sources)
                    progress.update(task, completed=window.start + int(share * len(window.lines)))
            yield translations if kind == "lines" else [*_joined(texts, translations)]
            number += len(sources)
    if cut:
        console.print(
            f"{len(cut):,} of {number:,} {kind} cut to max_length={config.max_length} tokens, "
            f"the first of them {cut[0]}"
        )


def _split(window: Window, language: str | None) -> tuple[list[list[str]], list[Place]]:
    """Return the parts of each line, see `split_sentences`, and the places of the sentences."""
    whole = language is None
    texts = [["", line, ""] if whole else split_sentences(line, language) for line in window.lines]
    numbered = [(n, len(parts) // 2) for n, parts in enumerate(texts, window.start + 1)]
    return texts, [Place(n, 0 if whole else i + 1) for n, count in numbered for i in range(count)]


def _joined(
    texts: list[list[str]], translations: list[list[Translation]]
) -> Iterator[list[Translation]]:
    """Yield the translation of each line from the best ones of its sentences."""
    best = iter([hypotheses[0] for hypotheses in translations])
    for parts in texts:
        of_line = [*islice(best, len(parts) // 2)]
        parts[1::2] = [sentence.text for sentence in of_line]
        tokens = np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in of_line)])
        yield [Translation("".join(parts), sum((each.score for each in of_line), 0.0), tokens)]


def _encode(
    model: TrainedModel,
    lines: Sequence[str],
    places: Sequence[Place],
    reading: LineOptions,
    bad_lines: list[int] | None,
) -> list[list[int]]:
    """Return the ids of each source, overlong ones too; none for a blank or bad one."""
    config, tokenizer = model.config, model.tokenizer
    *encoded, blank = encode_lines(tokenizer.encode_source, [*lines, ""])
    blank, sources = tokenizer.without_padding(blank), []
    for source, place in zip(encoded, places, strict=True):
        ids, fault = [], ""
        if isinstance(source, LineError):
            fault = source.fault
        else:
            ids = tokenizer.without_padding(source)
            if len(ids) > config.max_length and reading.overlong != "cut":
                longer = "" if config.positions == "learned" else "raise max_length, "
                fault = (
                    f"is {len(ids)} tokens long, EOS included, but the model takes max_length="
                    f"{config.max_length}; {longer}split the line or set overlong to 'cut'"
                )
        if fault and bad_lines is None:
            raise InputError(f"{place} {fault}")
        if fault:
            bad_lines.append(place.line)
        sources.append([] if fault or ids == blank else ids)
    return sources


def _cut(model: TrainedModel, lines: Sequence[str], sources: list[list[int]]) -> list[int]:
    """Cut the sources that are too long for the model, and return their indices."""
    most, tokenizer = model.config.max_length, model.tokenizer
    too_long = [index for index, ids in enumerate(sources) if len(ids) > most]
    cut = tokenizer.encode_source([lines[index] for index in too_long], most)
    for index, ids in zip(too_long, cut, strict=True):
        sources[index] = tokenizer.without_padding(ids)
    return too_long
