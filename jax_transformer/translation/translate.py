"""Translation of lines: what all batches of a call share, and a stream of lines by windows."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32, Integer, PRNGKeyArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_transformer.decoding import GenerationConfig
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.hypotheses import make_selection
from jax_transformer.decoding.sampling import check_sampling
from jax_transformer.decoding.slots import Ended, Group, Running, empty_slots, search_in_slots
from jax_transformer.errors import InputError
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.checks import (
    check_execution,
    check_generates,
    check_inputs,
    check_params,
    check_whole_number,
)
from jax_transformer.model.tree import parameter_shardings
from jax_transformer.runtime.sharding import make_mesh, row_shards
from jax_transformer.text.encoding import encode_lines
from jax_transformer.text.text_files import is_blank
from jax_transformer.tokenizers import LineError
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.source_batches import (
    LineOptions,
    Pool,
    Window,
    check_split,
    grouped,
    source_pools,
    split_sentences,
    usual_target_length,
)


class Translation(NamedTuple):
    """One translation of a line.

    The score is the log-probability of the tokens divided by the length penalty: 0 for a blank
    line, -inf if a line has fewer possible translations than `num_hypotheses`. A line that was
    split into sentences has the sum of their scores, and the tokens of one after the other.

    Attributes:
        text: The translation; "" for a blank line.
        score: Log-probability, divided by the length penalty.
        tokens: Ids, EOS included [length].
    """

    text: str
    score: float
    tokens: Int32[np.ndarray, " length"]


class Place(NamedTuple):
    """Where a source stands."""

    line: int  # from 1
    sentence: int = 0  # of the line, from 1; 0 is the whole line

    def __str__(self) -> str:
        line = f"line {self.line}"
        return f"sentence {self.sentence} of {line}" if self.sentence else line


def place(model: TrainedModel, mesh: Mesh) -> TrainedModel:
    """Return a model whose parameters lie on the devices of a mesh."""
    places = parameter_shardings(mesh, model.params, model.config)
    return model._replace(params=jax.device_put(model.params, places))


@dataclasses.dataclass(frozen=True)
class TextSearch:
    """What all batches of a call share; `text_search` makes it.

    Several models choose each token together. If neither the call nor the model names
    `max_new_tokens`, a translation has at most ten tokens more than twice those of its line.
    """

    models: tuple[TrainedModel, ...]  # on the devices of the mesh; the first one has the tokenizer
    generation: GenerationConfig
    lines: LineOptions
    is_limited: bool  # `max_new_tokens` is named
    seed: int | None  # switches sampling on, which depends on it and on the number of the line
    mesh: Mesh  # lines are distributed over the axes data and fsdp
    execution: SearchExecution | None  # None is what suits the device and the work

    def suited_execution(self) -> SearchExecution:
        """Return how lines are translated."""
        if self.execution is not None:
            return self.execution
        config, params, *_ = self.models[0]
        suited = self.mesh.devices.flat[0], jax.tree.leaves(params)[0].dtype.name, config.head_dim
        capped = config.attention_softcap is not None
        return execution_on(*suited, kind=SearchExecution, capped=capped)

    def limit(self, source_length: int) -> int:
        """Return the most tokens of the translations of a source.

        Without `max_new_tokens` it follows from the source alone, so that others do not matter.
        """
        if self.is_limited:
            return self.generation.max_new_tokens
        return min(usual_target_length(source_length), self.models[0].config.max_length)

    def target_length(self, source_length: int, is_last: bool) -> int:
        """Return the most tokens of the translations in a pool of sources of a length.

        The last attempt has their limit. The first one has a length that few translations reach,
        with a smaller and faster cache, where a search that ends below it finds the same.
        """
        generation, limit = self.generation, self.limit(source_length)
        # "never" is a bound that depends on the limit.
        depends = generation.beam_size > 1 and generation.early_stopping == "never"
        first = source_length + usual_target_length(0)
        if is_last or depends or (generation.min_new_tokens or 0) >= first:
            return limit
        return min(limit, first)

    def translations(
        self, pool: Pool, sources: Sequence[list[int]], places: Sequence[Place]
    ) -> Iterator[tuple[int, list[Translation] | None]]:
        """Yield each member and its translations; None if the pool's limit is too low for it.

        Args:
            sources: Ids of each source of a window.
            places: Where each one stands.
        """
        with jax.set_mesh(self.mesh):
            groups = self.groups(pool, sources, places)
            for ended in search_in_slots(self.empty_slots(pool), groups):
                member, (_, _, lengths), _ = ended
                if lengths.max() == pool.target_length < self.limit(len(sources[member])):
                    yield member, None
                else:
                    yield member, self.found(ended, places[member])

    def empty_slots(self, pool: Pool) -> Running:
        """Return a search in the slots of a pool, in which nothing runs."""
        configs, params, *_ = zip(*self.models, strict=True)
        sizes = pool.num_slots, pool.source_length, pool.target_length, self.generation.beam_size
        return empty_slots(params, configs, *sizes, self.suited_execution())

    def groups(
        self,
        pool: Pool,
        sources: Sequence[list[int]] | Mapping[int, list[int]],
        places: Sequence[Place] | Mapping[int, Place],
    ) -> Iterator[Group]:
        """Yield the groups of a pool, with what each source has of its own."""
        config, generation = self.models[0].config, self.generation
        options = {"max_new_tokens": pool.target_length}
        if pool.target_length < self.limit(pool.source_length):
            # A target of an attempt that has not ended is then among those that are returned.
            options["num_hypotheses"] = generation.beam_size
        options = dataclasses.replace(generation, **options)
        for members, src in grouped(pool, sources, config):
            check_inputs("src", src, config.src_vocab_size, None, config.stack("encoder"))
            rows = np.resize(members, len(src))  # any for the rows that are left
            limits = [min(self.limit(len(sources[row])), pool.target_length) for row in rows]
            keys = None
            if self.seed is not None:
                numbers = np.array([places[row] for row in rows], np.uint32)
                keys = jax.vmap(partial(_key_of, jax.random.key(self.seed)))(numbers)
            src = src.astype(np.int32)
            selection = make_selection(options, config, src, None, np.array(limits), keys)
            yield Group(members, src, selection)

    def found(self, ended: Ended, where: Place) -> list[Translation]:
        """Return the translations of a source that has ended.

        Raises:
            NonFiniteError: Its logits are NaN or infinite.
        """
        member, hypotheses, failed_at = ended
        if failed_at >= 0:
            raise NonFiniteError(str(where), member, failed_at)
        decode = self.models[0].tokenizer.decode
        return [
            Translation(decode(ids[:length]), float(score), ids[:length])
            for ids, score, length in zip(*hypotheses, strict=True)
        ][: self.generation.num_hypotheses]


def _key_of(key: PRNGKeyArray, place: Integer[Array, "2"]) -> PRNGKeyArray:
    return jax.random.fold_in(jax.random.fold_in(key, place[0]), place[1])


def text_search(
    models: Sequence[TrainedModel],
    mesh: Mesh | None = None,
    execution: SearchExecution | None = None,
    *,
    seed: int | None = None,
    **options: Any,
) -> TextSearch:
    """Return the search of a call.

    Args:
        models: One, or an ensemble of models with the same tokenizer.
        mesh: From `make_mesh`; None is one device.
        **options: Fields of `LineOptions` and of `GenerationConfig`; one of the latter that is None
            has the first model's default.

    Raises:
        TypeError: An option is unknown.
        InputError: An option is out of range, or does not fit the model or another option.
    """
    names = [each.name for each in dataclasses.fields(LineOptions) if each.name in options]
    lines = LineOptions(**{name: options.pop(name) for name in names})
    named = {name: value for name, value in options.items() if value is not None}
    generation = models[0].generation_config(**named)
    for each in models:
        check_generates(each.config)
        check_params(each.params, each.config)
        generation.check_model(each.config)
    check_sampling(generation, seed is not None)
    check_split(lines.split_sentences, generation.num_hypotheses)
    check_whole_number("seed", seed or 0, least=0)
    if execution is not None:
        check_execution(execution, SearchExecution)
    is_limited = "max_new_tokens" in {**models[0].generation, **named}
    mesh = mesh or make_mesh()
    placed = tuple(place(each, mesh) for each in models)
    return TextSearch(placed, generation, lines, is_limited, seed, mesh, execution)


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
        **options: As for `text_search`.
    """
    search, lines = text_search([model], mesh, **options), list(lines)
    shown = {"total": len(lines), "console": console}
    return chain.from_iterable(translate_windows(search, [Window(0, lines)], **shown))


def translate_windows(
    search: TextSearch,
    windows: Iterable[Window],
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
        For each window and line of it the translations, best first.

    Raises:
        InputError: A line is too long, or is no source of this model, before its window is
            translated; or the logits of a line are NaN or infinite. The message names the line.
    """
    language, generation = search.lines.split_sentences, search.generation
    console = console or Console(quiet=True)
    config, shards = search.models[0].config, row_shards(search.mesh)
    blank = blank_translations(generation)
    number, cut, kind = 0, [], "lines" if language is None else "sentences"
    most_tokens = search.lines.max_tokens * shards // generation.beam_size
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("lines"))
    shown = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*bar, TimeRemainingColumn(), **shown) as progress:
        task = progress.add_task("translating", total=total)
        for window in windows:
            texts, places = _split(window, language)
            lines = [source for parts in texts for source in parts[1::2]]
            lines = ["" if is_blank(line) else prefix + line for line in lines]
            sources = encode_sources(search, lines, places, bad_lines, cut)
            translations = [blank] * len(sources)
            left = len(sources) - sources.count([])
            for is_last in (False, True):
                target_length = partial(search.target_length, is_last=is_last)
                lengths = [len(source) for source in sources]
                sizes = most_tokens, shards, is_last
                for pool in source_pools(config, lengths, target_length, *sizes):
                    for index, hypotheses in search.translations(pool, sources, places):
                        if hypotheses is not None:
                            translations[index], sources[index] = hypotheses, []
                            left -= 1
                        share = 1 - left / len(sources)
                        done = window.start + int(share * len(window.lines))
                        progress.update(task, completed=done)
            yield translations if language is None else [*_joined(texts, translations)]
            number += len(sources)
    if cut:
        console.print(
            f"{len(cut):,} of {number:,} {kind} cut to max_length={config.max_length} tokens, "
            f"the first of them {cut[0]}"
        )


def blank_translations(generation: GenerationConfig) -> list[Translation]:
    """Return the translations of a blank text."""
    return [Translation("", 0.0, np.zeros(0, np.int32))] * generation.num_hypotheses


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


def encode_sources(
    search: TextSearch,
    lines: Sequence[str],
    places: Sequence[Place],
    bad_lines: list[int] | None = None,
    cut: list[Place] | None = None,
) -> list[list[int]]:
    """Return the ids of each source, none for a blank or bad one.

    Args:
        bad_lines: Takes the numbers of the lines of bad sources; if None, the first is refused.
        cut: Takes the places of sources that were cut.
    """
    (config, _, tokenizer, _), sources = search.models[0], []
    *encoded, blank = encode_lines(tokenizer.encode_source, [*lines, ""])
    blank, most = tokenizer.without_padding(blank), config.max_length
    for line, source, where in zip(lines, encoded, places, strict=True):
        ids, fault = [], ""
        if isinstance(source, LineError):
            fault = source.fault
        elif len(ids := tokenizer.without_padding(source)) > most:
            if search.lines.overlong == "cut":
                ids = tokenizer.without_padding(*tokenizer.encode_source([line], most))
                if cut is not None:
                    cut.append(where)
            else:
                longer = "" if config.positions == "learned" else "raise max_length, "
                fault = (
                    f"is {len(ids)} tokens long, EOS included, but the model takes max_length="
                    f"{most}; {longer}split the line or set overlong to 'cut'"
                )
        if fault and bad_lines is None:
            raise InputError(f"{where} {fault}")
        if fault:
            bad_lines.append(where.line)
        sources.append([] if fault or ids == blank else ids)
    return sources
