"""Translation of a stream of lines, in batches of lines of similar length and of few shapes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32, Key
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_transformer.decoding import GenerationConfig, Hypotheses, generate
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.sampling import check_sampling
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.checks import check_execution, check_whole_number
from jax_transformer.model.tree import parameter_shardings
from jax_transformer.runtime.sharding import make_mesh, row_shards
from jax_transformer.text.encoding import encode_lines
from jax_transformer.text.text_files import is_blank
from jax_transformer.tokenizers import LineError
from jax_transformer.translation.long_text import check_split, split_sentences
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.source_batches import (
    SourceBatch,
    Window,
    source_batches,
    usual_target_length,
    window_sizes,
    windows,
)

# The number of a line, from 1, and that of its sentence; 0 is the whole line.
Place = tuple[int, int]
# Lines of a window times parameters from which sources leave their batch when they have ended: the
# steps that this saves take longer than to load the larger programs.
MUCH_WORK = 2e10


class Translation(NamedTuple):
    """One translation of a line.

    The score is the log-probability of the tokens divided by the length penalty: 0 for a blank
    line, -inf if a line has fewer possible translations than `num_hypotheses`. A line that was
    split into sentences has the sum of their scores, and the tokens of one after the other.
    """

    text: str  # "" for a blank line
    score: float
    tokens: Int32[np.ndarray, " length"]  # EOS included


class _Reading(NamedTuple):
    """How lines become sources: arguments of `translate_windows`."""

    overlong: str
    split_sentences: str | None
    prefix: str
    seed: int | None
    bad_lines: list[int] | None


def place(model: TrainedModel, mesh: Mesh) -> TrainedModel:
    """Return a model whose parameters lie on the devices of a mesh."""
    places = parameter_shardings(mesh, model.params, model.config)
    return model._replace(params=jax.device_put(model.params, places))


def translate(
    model: TrainedModel, lines: Iterable[str | None], **options: Any
) -> Iterator[list[Translation]]:
    """Yield the translations of each line, in order; options as for `translate_windows`."""
    return chain.from_iterable(translate_windows(model, lines, **options))


def translate_windows(
    model: TrainedModel,
    lines: Iterable[str | None],
    *,
    overlong: Literal["refuse", "cut"] = "refuse",
    bad_lines: list[int] | None = None,
    split_sentences: str | None = None,
    prefix: str = "",
    seed: int | None = None,
    max_tokens: int = 4096,
    window: int | None = None,
    skip: int = 0,
    total: int | None = None,
    console: Console | None = None,
    mesh: Mesh | None = None,
    execution: SearchExecution | None = None,
    ensemble: Sequence[TrainedModel] = (),
    **options: Any,
) -> Iterator[list[list[Translation]]]:
    """Translate a stream of lines; the translation of a line does not depend on the other lines.

    In bfloat16, hypotheses of almost equal score may change places with the shape of their batch.

    Lines are read, translated and yielded in windows: 64 lines first, for an early start, then 16
    times as many in each window up to `window`. Lines of similar length share a batch.

    Args:
        lines: Source lines; None among them is a pause, before which a window ends.
        overlong: What happens if a line, or a sentence, has more than `config.max_length` tokens,
            special tokens included: "refuse" makes it a bad line, "cut" cuts it.
        bad_lines: Takes the numbers, from 1, of lines that are too long or no source of this model,
            whose translations are then blank. If None, the window of the first one is refused.
        split_sentences: Code of the language of the lines, whose sentences are then translated
            apart; what stands between them stays (the extra [sentences]). None translates lines.
        prefix: Put before every text that is translated by itself and is not blank.
        seed: Switches sampling on: what is drawn depends on it and on the number of the line.
        max_tokens: Most tokens, padding included (lines times hypotheses times length), of a batch
            of more than one line, for each device that the lines are distributed over.
        window: Lines of the largest window; None reads all lines into one window.
        skip: Number of lines that were translated before, and that `lines` does not contain: a sum
            of the first `window_sizes`. The windows are then those of the whole input.
        total: Number of lines, for the progress; None if it is not known.
        console: Shows live progress if it is a terminal, and the number of lines that were cut.
        mesh: The devices, from `make_mesh`; lines are distributed over the axes data and fsdp.
            None is one device.
        execution: How the model is executed; None is what suits the device.
        ensemble: Models with the same tokenizer that choose each token together with `model`.
        **options: Fields of `GenerationConfig`; one that is None has the value of
            `model.generation`. Without any `max_new_tokens`, a translation has at most ten tokens
            more than twice those of the line.

    Returns:
        An iterator over the windows: for each line its translations, best first.

    Raises:
        InputError: `generate` refuses an option, or a number is too small. While the iterator runs:
            a line is too long, or it is no source of this model, before its window is translated;
            or the logits of a line are NaN or infinite. The message names the line.
    """
    config, params, *_ = model
    reading = _Reading(overlong, split_sentences, prefix, seed, bad_lines)
    chosen = _chosen(model, reading, options)
    check_whole_number("max_tokens", max_tokens, least=1)
    if window is not None:
        check_whole_number("window", window, least=1)
    check_whole_number("skip", skip, least=0)
    sizes = None if window is None else window_sizes(window)
    if sizes is None:
        lines = [line for line in lines if line is not None]
        sizes, total = [len(lines)], len(lines)
    mesh = mesh or make_mesh()
    leaving = execution  # in windows of much work
    if execution is None:
        device, dtype = mesh.devices.flat[0], jax.tree.leaves(params)[0].dtype.name
        suited = partial(execution_on, device, dtype, config.head_dim)
        may_leave = device.platform == "cpu" and row_shards(mesh) == 1
        execution = suited(kind=SearchExecution)
        leaving = suited(kind=SearchExecution, smaller_batches=may_leave)
    check_execution(execution, SearchExecution)
    configs, params, *_ = zip(*(place(each, mesh) for each in (model, *ensemble)), strict=True)
    models = (params, configs) if ensemble else (params[0], config)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))

    def search_of(num_sources: int) -> Callable[..., Hypotheses]:
        """Return the search for the batches of a window."""
        much = num_sources * num_parameters >= MUCH_WORK
        return partial(generate, *models, execution=leaving if much else execution)

    return _translate(
        model._replace(generation=chosen),
        windows(lines, sizes, skip),
        reading,
        max_tokens * row_shards(mesh) // chosen["beam_size"],
        total,
        console or Console(quiet=True),
        mesh,
        search_of,
    )


def _chosen(model: TrainedModel, reading: _Reading, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of every search; refuse what contradicts the model or each other."""
    chosen = {"beam_size": 1, "num_hypotheses": 1, **model.generation}
    chosen |= {name: value for name, value in options.items() if value is not None}
    checked = GenerationConfig(**{"max_new_tokens": model.config.max_length} | chosen)
    checked.check_model(model.config)
    check_sampling(checked, reading.seed is not None)
    check_whole_number("seed", reading.seed or 0, least=0)
    check_split(reading.split_sentences, checked.num_hypotheses)
    if reading.overlong not in ("refuse", "cut"):
        raise InputError(f"overlong={shorten(reading.overlong)} must be 'refuse' or 'cut'")
    # Those of the model too, among them the ids that no token has.
    banned = {*model.generation.get("banned_tokens", ()), *checked.banned_tokens}
    return chosen | ({"banned_tokens": tuple(sorted(banned))} if banned else {})


def _translate(
    model: TrainedModel,
    parts: Iterator[Window],
    reading: _Reading,
    most_tokens: int,
    total: int | None,
    console: Console,
    mesh: Mesh,
    search_of: Callable[[int], Callable[..., Hypotheses]],
) -> Iterator[list[list[Translation]]]:
    blank = [Translation("", 0.0, np.zeros(0, np.int32))] * model.generation["num_hypotheses"]
    number, cut, kind = 0, [], "lines" if reading.split_sentences is None else "sentences"
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("lines"))
    shown = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*bar, TimeRemainingColumn(), **shown) as progress:
        task = progress.add_task("translating", total=total)
        for window in parts:
            texts, places = _split(window, reading.split_sentences)
            sources, cut_places = _encode(model, texts, places, reading)
            cut += cut_places
            search = search_of(len(sources))
            translations = [blank] * len(sources)
            sizes = most_tokens, row_shards(mesh), window.is_small
            for is_last in (False, True):
                target_length = partial(_target_length, model, is_last=is_last)
                for batch in source_batches(model.config, sources, target_length, *sizes):
                    members = [places[index] for index in batch.members]
                    best = _translate_batch(model, batch, members, reading.seed, mesh, search)
                    for index, hypotheses in zip(batch.members, best, strict=True):
                        if hypotheses is not None:
                            translations[index], sources[index] = hypotheses, []
                    share = sources.count([]) / len(sources)
                    progress.update(task, completed=window.start + int(share * len(window.lines)))
            yield translations if kind == "lines" else [*_joined(texts, translations)]
            number += len(sources)
    if cut:
        console.print(
            f"{len(cut):,} of {number:,} {kind} cut to max_length={model.config.max_length} "
            f"tokens, the first of them {_name(cut[0])}"
        )


def _split(window: Window, language: str | None) -> tuple[list[list[str]], list[Place]]:
    """Return the parts of each line, as `split_sentences` does, and the places of the odd ones."""
    whole = language is None
    texts = [["", line, ""] if whole else split_sentences(line, language) for line in window.lines]
    numbered = [(n, len(parts) // 2) for n, parts in enumerate(texts, window.start + 1)]
    return texts, [(n, 0 if whole else i + 1) for n, count in numbered for i in range(count)]


def _name(place: Place) -> str:
    line, sentence = place
    return f"sentence {sentence} of line {line}" if sentence else f"line {line}"


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
    model: TrainedModel, texts: list[list[str]], places: list[Place], reading: _Reading
) -> tuple[list[list[int]], list[Place]]:
    """Return the ids of each source, none for a blank or bad one; the places of cut ones."""
    config, tokenizer = model.config, model.tokenizer
    lines = [source for parts in texts for source in parts[1::2]]
    lines = ["" if is_blank(line) else reading.prefix + line for line in lines]
    *sources, blank = encode_lines(tokenizer.encode_source, [*lines, ""])
    without = tokenizer.without_padding
    sources = [ids if isinstance(ids, LineError) else without(ids) for ids in sources]
    for index, ids in enumerate(sources):
        fault = ids.fault if isinstance(ids, LineError) else ""
        if not fault and len(ids) > config.max_length and reading.overlong != "cut":
            longer = "" if config.positions == "learned" else "raise max_length, "
            fault = (
                f"is {len(ids)} tokens long, EOS included, but the model takes max_length="
                f"{config.max_length}; {longer}split the line or set overlong to 'cut'"
            )
        if fault and reading.bad_lines is None:
            raise InputError(f"{_name(places[index])} {fault}")
        if fault:
            reading.bad_lines.append(places[index][0])
        sources[index] = [] if fault or ids == blank else ids
    too_long = [index for index, ids in enumerate(sources) if len(ids) > config.max_length]
    cut = tokenizer.encode_source([lines[index] for index in too_long], config.max_length)
    for index, ids in zip(too_long, cut, strict=True):
        sources[index] = without(ids)
    return sources, [places[index] for index in too_long]


def _target_length(model: TrainedModel, source_length: int, is_last: bool) -> int:
    """Return the most tokens of the translations in a batch of sources of a length.

    The last attempt has the limit of the model. The first one has a limit that few translations
    reach, with a smaller and faster cache, where a search that ends below it finds the same.
    """
    config, generation = model.config, model.generation
    usual = min(usual_target_length(source_length), config.max_length)
    most = generation.get("max_new_tokens", usual)
    # "never" is a bound that depends on the limit.
    depends = generation["beam_size"] > 1 and generation.get("early_stopping", "never") == "never"
    if is_last or depends or (generation.get("min_new_tokens") or 0) >= usual:
        return most
    return min(most, usual)


def _translate_batch(
    model: TrainedModel,
    batch: SourceBatch,
    members: list[Place],
    seed: int | None,
    mesh: Mesh,
    search: Callable[..., Hypotheses],
) -> list[list[Translation] | None]:
    """Return the translations of each member; None if the batch's limit is too low for it."""
    config, _, tokenizer, generation = model
    options = {**generation, "max_new_tokens": batch.target_length}
    if "max_new_tokens" not in generation:
        # The limit follows from the line's own length, so that the other lines do not matter.
        lengths = np.count_nonzero(batch.src != config.pad_id, axis=1)
        options["length_limits"] = np.minimum(usual_target_length(lengths), config.max_length)
    is_attempt = batch.target_length < generation.get("max_new_tokens", 0)
    if is_attempt:  # a target that has not ended is then among those that are returned
        options["num_hypotheses"] = generation["beam_size"]
    if seed is not None:
        options["key"] = _keys(seed, members, len(batch.src))
    try:
        with jax.set_mesh(mesh):
            hypotheses = search(batch.src, **options)
    except NonFiniteError as error:
        raise NonFiniteError(_name(members[error.row]), error.row, error.step) from error
    rows = zip(batch.members, *jax.device_get(hypotheses), strict=False)
    return [
        None
        if is_attempt and lengths.max() == batch.target_length
        else [
            Translation(tokenizer.decode(ids[:length]), float(score), ids[:length])
            for ids, score, length in zip(tokens, scores, lengths, strict=True)
        ][: generation["num_hypotheses"]]
        for _, tokens, scores, lengths in rows
    ]


def _keys(seed: int, places: list[Place], rows: int) -> Key[Array, " rows"]:
    """Return the key of each place, and any for the rows that are left."""
    key, numbers = jax.random.key(seed), np.resize(np.array(places, np.uint32), (rows, 2))
    fold_in = jax.random.fold_in
    return jax.vmap(lambda place: fold_in(fold_in(key, place[0]), place[1]))(numbers)
