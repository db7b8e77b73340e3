"""Translation of lines of text, in batches of lines of similar length and of few shapes."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32, Integer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_transformer.config import TransformerConfig
from jax_transformer.data.bucketing import bucket_lengths
from jax_transformer.decoding import generate, options
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.errors import InputError
from jax_transformer.runtime.attention_backend import execution_on
from jax_transformer.runtime.sharding import make_mesh, row_shards, shardings
from jax_transformer.translation.model_folder import TrainedModel


class Translation(NamedTuple):
    """One translation of a line.

    Attributes:
        text: The translation; "" for a blank line.
        score: Log-probability of the tokens divided by the length penalty; 0 for a blank line,
            -inf if a line has fewer possible translations than `num_hypotheses`.
        tokens: The token ids, EOS included [length].
    """

    text: str
    score: float
    tokens: Int32[np.ndarray, " length"]


def translate(
    model: TrainedModel,
    lines: Sequence[str],
    *,
    beam_size: int | None = None,
    num_hypotheses: int = 1,
    length_penalty: float | None = None,
    max_new_tokens: int | None = None,
    overlong: Literal["refuse", "cut"] = "refuse",
    max_tokens: int = 4096,
    bucket_count: int = 6,
    console: Console | None = None,
    mesh: Mesh | None = None,
) -> list[list[Translation]]:
    """Translate lines; the translation of a line does not depend on the other lines.

    Options that are None have the value of `model.generation`. A translation that has not ended
    after `max_new_tokens` tokens gets EOS as its last token.

    Args:
        model: The model.
        lines: Source lines.
        beam_size: Hypotheses of a line that beam search keeps; 1 is greedy search.
        num_hypotheses: Translations of each line, at most `beam_size`.
        length_penalty: Exponent alpha of ((5 + n) / 6)**alpha, by which the log-probability of n
            tokens is divided (Wu et al. 2016); 0.6 is that of Vaswani et al. 2017.
        max_new_tokens: Most tokens of a translation, EOS included; if the model has no default,
            ten more than twice the tokens of the line.
        overlong: What happens if a line has more than `config.max_length` tokens, EOS included:
            "refuse" to translate any line, or "cut" the line.
        max_tokens: Most tokens, padding included (lines times hypotheses times length), of a batch
            of more than one line, for each device that the lines are distributed over.
        bucket_count: Most batch shapes; each needs a compilation.
        console: Shows live progress if it is a terminal, and the number of lines that were cut.
        mesh: The devices, from `make_mesh`; lines are distributed over the axes data and fsdp.
            None is one device.

    Returns:
        For each line, in order, its translations, best first; a blank line has blank translations.

    Raises:
        InputError: A line is too long, or `generate` refuses an option: nothing has been
            translated then. Or the logits of a line are NaN or infinite; the message names it.
    """
    config, params, tokenizer, defaults = model
    given = {
        "beam_size": beam_size,
        "length_penalty": length_penalty,
        "max_new_tokens": max_new_tokens,
    }
    chosen = {"beam_size": 1, **defaults}
    chosen |= {name: value for name, value in given.items() if value is not None}
    beam_size, max_new_tokens = chosen["beam_size"], chosen.pop("max_new_tokens", None)
    options.check_sizes(config, beam_size, num_hypotheses)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens} must be at least 1")
    console = console or Console(quiet=True)
    mesh = mesh or make_mesh()
    params = jax.device_put(params, shardings(params, mesh, config))
    dtype = jax.tree.leaves(params)[0].dtype.name
    execution = execution_on(mesh.devices.flat[0], dtype, config.head_dim, dropped=False)
    most_tokens = max_tokens * row_shards(mesh) // beam_size
    sources = _encode(model, lines, overlong, console)
    blank = Translation("", 0.0, np.zeros(0, np.int32))
    translations = [[blank] * num_hypotheses for _ in lines]
    with _progress(console) as progress:
        task = progress.add_task("translating", total=sum(map(bool, sources)))
        for members, src in _batches(config, sources, most_tokens, bucket_count, row_shards(mesh)):
            ends = _ends(config, src, max_new_tokens)
            try:
                with jax.set_mesh(mesh):
                    hypotheses = generate(
                        params,
                        config,
                        src,
                        max_new_tokens=ends.shape[1],
                        prefix=ends,
                        num_hypotheses=num_hypotheses,
                        execution=execution,
                        **chosen,
                    )
            except NonFiniteError as error:
                line = f"line {members[error.row] + 1}"
                raise NonFiniteError(line, error.row, error.step) from error
            for index, *best in zip(members, *jax.device_get(hypotheses), strict=False):
                translations[index] = [
                    Translation(tokenizer.decode(ids[:length]), float(score), ids[:length])
                    for ids, score, length in zip(*best, strict=True)
                ]
            progress.advance(task, len(members))
    return translations


def _encode(
    model: TrainedModel, lines: Sequence[str], overlong: str, console: Console
) -> list[list[int]]:
    """Return the source ids of each line, EOS included; none for a blank line."""
    config, tokenizer = model.config, model.tokenizer
    sources = [ids and [*ids, config.eos_id] for ids in tokenizer.encode_batch(lines)]
    too_long = [index for index, ids in enumerate(sources) if len(ids) > config.max_length]
    if too_long and overlong != "cut":
        raise InputError(
            f"line {too_long[0] + 1} is {len(sources[too_long[0]])} tokens long, EOS included, "
            f"but the model takes max_length={config.max_length}; split the line or set overlong "
            "to 'cut'"
        )
    for index in too_long:
        sources[index] = [*sources[index][: config.max_length - 1], config.eos_id]
    if too_long:
        console.print(
            f"{len(too_long):,} of {len(lines):,} lines cut to max_length={config.max_length} "
            f"tokens, the first of them line {too_long[0] + 1}"
        )
    return sources


def _batches(
    config: TransformerConfig,
    sources: Sequence[list[int]],
    max_tokens: int,
    bucket_count: int,
    shards: int,
) -> Iterator[tuple[Integer[np.ndarray, " members"], Integer[np.ndarray, "batch length"]]]:
    """Yield the sources that are not empty, longest first, in at most `bucket_count` shapes.

    Yields:
        The indices of the sources in the first rows, and the padded rows; `shards` divides their
        number. The remaining rows repeat the first one, so that they do not prolong decoding.
    """
    order = sorted((len(ids), index) for index, ids in enumerate(sources) if ids)
    if not order:
        return
    lengths, members = np.array(order).T
    # A compilation takes longer than a batch: use at most as many shapes as full batches.
    full_batches = math.ceil(lengths.sum() / max(1, max_tokens))
    buckets = bucket_lengths(lengths, min(bucket_count, full_batches))
    ends = np.searchsorted(lengths, buckets, side="right")
    # Longest first: a batch that does not fit into memory fails before any other is translated.
    for length, bucket in reversed(list(zip(buckets, np.split(members, ends[:-1]), strict=True))):
        parts = np.array_split(bucket, math.ceil(len(bucket) / max(1, max_tokens // length)))
        count = math.ceil(len(parts[0]) / shards) * shards
        for part in parts:
            rows = [*part, *[part[0]] * (count - len(part))]
            yield part, _padded(config, [sources[index] for index in rows], length)


def _ends(
    config: TransformerConfig, src: Integer[np.ndarray, "batch length"], max_new_tokens: int | None
) -> Int32[np.ndarray, "batch new_tokens"]:
    """Return a prefix for `generate` that forces EOS at the last position of each translation.

    The position depends on the line's own length and not on that of the batch, so that the other
    lines do not matter.
    """

    def limit(length: int) -> int:
        return max_new_tokens or min(2 * length + 10, config.max_length)

    ends = np.full((len(src), limit(src.shape[1])), config.pad_id, np.int32)
    for row, length in zip(ends, np.count_nonzero(src != config.pad_id, axis=1), strict=True):
        row[limit(int(length)) - 1] = config.eos_id
    return ends


def _padded(
    config: TransformerConfig, sequences: Sequence[list[int]], length: int
) -> Integer[np.ndarray, "batch length"]:
    # 64 bits: `generate` then refuses an id that 32 bits would wrap around.
    rows = np.full((len(sequences), length), config.pad_id, np.int64)
    for row, ids in zip(rows, sequences, strict=True):
        row[: len(ids)] = ids
    return rows


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lines"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
