"""Translation of lines: what all batches of a call share, and a stream of lines by windows."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_transformer.decoding import GenerationConfig
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.rules import make_rules
from jax_transformer.decoding.sampling import check_sampling
from jax_transformer.decoding.slots import Ended, Group, SlotSearch
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.checks import (
    check_execution,
    check_inputs,
    check_params,
    check_whole_number,
)
from jax_transformer.model.tree import parameter_shardings
from jax_transformer.runtime.sharding import make_mesh, row_shards
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.pools import (
    padded_rows,
    power_of_two,
    round_up,
    slot_length,
    usual_target_length,
)
from jax_transformer.translation.sources import (
    LineOptions,
    Source,
    check_split,
    encode_sources,
    split_sentences,
)

SLOTS_PER_SOURCE = 8  # slots for each source of a group
SMALLEST_GROUP = 4  # sources
FEWEST_LAST_SLOTS = 32  # of the last attempt: fewer would be another program in most windows
MOST_ROWS = 2**16  # of a pool, whatever number of tokens it may have


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


def place(model: TrainedModel, mesh: Mesh) -> TrainedModel:
    """Return a model whose parameters lie on the devices of a mesh."""
    places = parameter_shardings(mesh, model.params, model.config)
    return model._replace(params=jax.device_put(model.params, places))


@dataclasses.dataclass(frozen=True)
class TextSearch:
    """What all batches of a call share; `text_search` makes it.

    Several models choose each token together. If neither the call nor the model names
    `max_new_tokens` or `max_length_factor`, a translation has at most ten tokens more than twice
    those of its line.
    """

    models: tuple[TrainedModel, ...]  # on the devices of the mesh; the first one has the tokenizer
    generation: GenerationConfig
    lines: LineOptions
    is_limited: bool  # `max_new_tokens` is named
    seed: int | None  # switches sampling on, which depends on it and on the number of the line
    mesh: Mesh  # lines are distributed over the axes data and fsdp
    execution: SearchExecution

    def limit(self, source_length: int) -> int:
        """Return the most tokens of the translations of a source.

        Without `max_new_tokens` it follows from the source alone, so that others do not matter.
        """
        if self.is_limited:
            return self.generation.max_new_tokens
        factor = self.generation.max_length_factor
        usual = int(factor * source_length) if factor else usual_target_length(source_length)
        return min(max(1, usual), self.models[0].config.max_length)

    def target_length(self, source_length: int, is_last: bool) -> int:
        """Return the most tokens of the translations in a pool of an attempt, see `pools`."""
        generation, limit = self.generation, self.limit(source_length)
        # "never" is a bound that depends on the limit.
        depends = generation.beam_size > 1 and generation.early_stopping == "never"
        first = source_length + usual_target_length(0)
        if is_last or depends or (generation.min_new_tokens or 0) >= first:
            return limit
        return min(limit, first)

    def pools(self, left: Mapping[int, Source]) -> Iterator[SlotSearch]:
        """Yield pools of few shapes for sources, longest first, in two attempts.

        A step reads the whole cache, and the limit of a translation is far above its usual length.
        So the first attempt has a short cache, and the second one, with the full limit, repeats the
        few translations that outgrow it. Windows share the shapes: a compilation takes longer than
        what a closer length saves. So a pool of the first attempt that cannot fill its slots is
        skipped, except the largest; the second attempt translates what is left in one pool.

        Args:
            left: Sources by number; the caller takes out those that are translated.
        """
        config, shards = self.models[0].config, row_shards(self.mesh)
        for is_last in (False, True):
            numbers = sorted(left, key=lambda number: -len(left[number].ids))
            by_length: dict[int, list[int]] = {}
            for number in numbers:
                source = left[numbers[0] if is_last else number]
                by_length.setdefault(slot_length(len(source.ids), config), []).append(number)
            most = max(map(len, by_length.values()), default=0)
            # Longest first: a pool that does not fit into memory fails before any is translated.
            for length, waiting in by_length.items():
                target_length = self.target_length(length, is_last)
                num_slots, _ = self.pool_sizes(length, target_length)
                if len(waiting) < min(num_slots, most):
                    continue
                fewest = FEWEST_LAST_SLOTS if is_last else 1
                needed = round_up(max(power_of_two(len(waiting)), fewest), shards)
                has_room = needed < num_slots or (is_last and len(waiting) <= num_slots)
                one_group = min(needed, num_slots) if has_room else None
                pool = self.pool(length, target_length, one_group)
                pool.waiting += waiting
                yield pool

    def pool_sizes(self, source_length: int, target_length: int) -> tuple[int, int]:
        """Return the most slots of a pool, and the sources of a group; shards divide both."""
        shards = row_shards(self.mesh)
        counted = 2 * max(source_length, (target_length - usual_target_length(0)) // 2)
        most_tokens = self.lines.max_tokens * shards // self.generation.beam_size
        num_slots = max(1, min(most_tokens // counted, MOST_ROWS) // shards) * shards
        group_size = max(SMALLEST_GROUP, num_slots // SLOTS_PER_SOURCE)
        return num_slots, min(num_slots, round_up(group_size, shards))

    def pool(
        self, source_length: int, target_length: int, one_group: int | None = None
    ) -> SlotSearch:
        """Return a search in slots in which nothing runs.

        Args:
            source_length: Length of the memory in a slot.
            target_length: Most tokens of a translation.
            one_group: Number of slots, which one group fills; None: as many as the memory takes.
        """
        num_slots, group_size = self.pool_sizes(source_length, target_length)
        if one_group is not None:
            num_slots = group_size = one_group
        generation = dataclasses.replace(self.generation, max_new_tokens=target_length)
        if target_length < self.limit(source_length):
            # A target of an attempt that has not ended is then among those that are returned.
            generation = dataclasses.replace(generation, num_hypotheses=generation.beam_size)
        return SlotSearch(
            params=tuple(model.params for model in self.models),
            configs=tuple(model.config for model in self.models),
            generation=generation,
            num_slots=num_slots,
            group_size=group_size,
            source_length=source_length,
            target_length=target_length,
            execution=self.execution,
        )

    def next_group(self, pool: SlotSearch, sources: Mapping[int, Source]) -> Group | None:
        """Return those sources that enter a pool together, with what each has of its own.

        Args:
            sources: By number; those that wait in the pool are among them, and enter in its order.
        """
        count = min(pool.num_free, pool.group_size)
        members, pool.waiting[:] = pool.waiting[:count], pool.waiting[count:]
        if not members:
            return None
        config = self.models[0].config
        ids = [sources[member].ids for member in members]
        src = padded_rows(ids, pool.group_size, pool.source_length, config)
        check_inputs("src", src, config.src_vocab_size, None, config.stack("encoder"))
        rows = [sources[member] for member in np.resize(members, len(src))]
        limits = [min(self.limit(len(source.ids)), pool.target_length) for source in rows]
        keys = None
        if self.seed is not None:
            places = np.array([(source.line, source.sentence) for source in rows], np.uint32)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.seed), places[:, 0])
            keys = jax.vmap(jax.random.fold_in)(keys, places[:, 1])
        src = src.astype(np.int32)
        rules = make_rules(pool.generation, config, src, None, np.array(limits), keys)
        return Group(members, src, rules)

    def found(self, ended: Ended, source: Source) -> list[Translation]:
        """Return the translations of a source that has ended.

        Raises:
            NonFiniteError: Its logits are NaN or infinite.
        """
        if ended.failed_at >= 0:
            raise NonFiniteError(str(source), ended.member, ended.failed_at)
        decode = self.models[0].tokenizer.decode
        return [
            Translation(decode(ids[:length]), float(score), ids[:length])
            for ids, score, length in zip(*ended.hypotheses, strict=True)
        ][: self.generation.num_hypotheses]

    def blank(self) -> list[Translation]:
        """Return the translations of a blank text."""
        return [Translation("", 0.0, np.zeros(0, np.int32))] * self.generation.num_hypotheses


def text_search(
    models: Sequence[TrainedModel],
    mesh: Mesh | None = None,
    execution: SearchExecution | None = None,
    *,
    seed: int | None = None,
    overlong: Literal["refuse", "cut"] = LineOptions.overlong,
    split_sentences: str | None = LineOptions.split_sentences,
    max_tokens: int = LineOptions.max_tokens,
    window: int = LineOptions.window,
    **options: Any,
) -> TextSearch:
    """Return the search of a call.

    Args:
        models: One, or an ensemble of models with the same tokenizer.
        mesh: From `make_mesh`; None is one device.
        execution: How the models are executed; None is what suits the device and the first model.
        overlong: As in `LineOptions`, and so are the next three.
        **options: Fields of `GenerationConfig`; one that is None has the first model's default.

    Raises:
        TypeError: An option is unknown.
        InputError: An option is out of range, or does not fit the model or another option.
    """
    lines = LineOptions(
        overlong=overlong, split_sentences=split_sentences, max_tokens=max_tokens, window=window
    )
    options = {name: value for name, value in options.items() if value is not None}
    generation = models[0].generation_config(**options)
    for each in models:
        check_params(each.params, each.config)
        generation.check_model(each.config)
    check_sampling(generation, seed is not None)
    check_split(lines.split_sentences, generation.num_hypotheses)
    check_whole_number("seed", seed or 0, least=0)
    mesh = mesh or make_mesh()
    if execution is None:
        dtype = jax.tree.leaves(models[0].params)[0].dtype.name
        device = mesh.devices.flat[0]
        execution = execution_on(device, dtype, models[0].config, SearchExecution)
    check_execution(execution, SearchExecution)
    return TextSearch(
        models=tuple(place(each, mesh) for each in models),
        generation=generation,
        lines=lines,
        is_limited="max_new_tokens" in {**models[0].generation, **options},
        seed=seed,
        mesh=mesh,
        execution=execution,
    )


def translate(
    model: TrainedModel,
    lines: Iterable[str],
    *,
    mesh: Mesh | None = None,
    console: Console | None = None,
    **options: Any,
) -> Iterator[list[Translation]]:
    """Yield the translations of each line of a list, in order; all lines are one window.

    The arguments are those of `text_search` and of `translate_windows`.
    """
    search, lines = text_search([model], mesh, **options), list(lines)
    windows = translate_windows(search, [lines], total=len(lines), console=console)
    return chain.from_iterable(windows)


def translate_windows(
    search: TextSearch,
    windows: Iterable[list[str]],
    *,
    skip: int = 0,
    prefix: str = "",
    bad_lines: list[int] | None = None,
    total: int | None = None,
    console: Console | None = None,
) -> Iterator[list[list[Translation]]]:
    """Translate lines in windows; the translation of a line does not depend on the other lines.

    In bfloat16, hypotheses of almost equal score may change places with the shape of their batch.

    Args:
        skip: Number of lines before the first window.
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
    language, (config, *_) = search.lines.split_sentences, search.models[0]
    console = console or Console(quiet=True)
    number, cut = 0, []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lines"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("translating", total=total)
        for lines in windows:
            texts = [split_sentences(line, language) for line in lines]
            sources = encode_sources(
                search.models[0],
                search.lines.overlong,
                [
                    Source(text, line, 0 if language is None else sentence)
                    for line, parts in enumerate(texts, skip + 1)
                    for sentence, text in enumerate(parts[1::2], 1)
                ],
                prefix=prefix,
                bad_lines=bad_lines,
                cut=cut,
            )
            translations = [search.blank()] * len(sources)
            left = {index: source for index, source in enumerate(sources) if source.ids}
            for pool in search.pools(left):
                while pool.waiting or pool.runs:
                    with jax.set_mesh(search.mesh):
                        all_ended = pool.advance(search.next_group(pool, left))
                    for ended in all_ended:
                        source, length = left[ended.member], ended.hypotheses.lengths.max()
                        if length == pool.target_length < search.limit(len(source.ids)):
                            continue  # it has outgrown its slot
                        translations[ended.member] = search.found(ended, source)
                        del left[ended.member]
                        share = 1 - len(left) / len(sources)
                        progress.update(task, completed=skip + int(share * len(lines)))
            yield translations if language is None else [*_joined(texts, translations)]
            skip, number = skip + len(lines), number + len(sources)
    if cut:
        kind = "lines" if language is None else "sentences"
        console.print(
            f"{len(cut):,} of {number:,} {kind} cut to max_length={config.max_length} tokens, "
            f"the first of them {cut[0]}"
        )


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
