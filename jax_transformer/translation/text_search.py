"""The search for lines of text: what all batches of a call share, and the search of one batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32, Key

from jax_transformer.decoding import GenerationConfig, generate
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.sampling import check_sampling
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.checks import check_execution, check_whole_number
from jax_transformer.model.tree import parameter_shardings
from jax_transformer.runtime.sharding import make_mesh, row_shards
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.source_batches import SourceBatch, usual_target_length

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

    Attributes:
        models: On the devices of the mesh. Several models choose each token together; the first one
            has the tokenizer.
        generation: The options of the search, made once.
        is_limited: Whether the call or the model names `max_new_tokens`. If not, a translation has
            at most ten tokens more than twice those of its line.
        seed: Switches sampling on: what is drawn depends on it and on the number of the line.
        mesh: The devices; lines are distributed over the axes data and fsdp.
        execution: How the models are executed; None is what suits the device and the work.
    """

    models: tuple[TrainedModel, ...]
    generation: GenerationConfig
    is_limited: bool
    seed: int | None
    mesh: Mesh
    execution: SearchExecution | None

    def execution_for(self, num_sources: int) -> SearchExecution:
        """Return how a window of so many sources is translated."""
        if self.execution is not None:
            return self.execution
        leaves = [leaf for model in self.models for leaf in jax.tree.leaves(model.params)]
        device, config = self.mesh.devices.flat[0], self.models[0].config
        is_much = num_sources * sum(leaf.size for leaf in leaves) >= MUCH_WORK
        may_leave = is_much and device.platform == "cpu" and row_shards(self.mesh) == 1
        suited = device, leaves[0].dtype.name, config.head_dim
        return execution_on(*suited, kind=SearchExecution, smaller_batches=may_leave)

    def target_length(self, source_length: int, is_last: bool) -> int:
        """Return the most tokens of the translations in a batch of sources of a length.

        The last attempt has the limit of the options. The first one has a limit that few
        translations reach, with a smaller and faster cache, where a search that ends below it finds
        the same.
        """
        generation = self.generation
        usual = min(usual_target_length(source_length), self.models[0].config.max_length)
        if not self.is_limited:
            return usual
        # "never" is a bound that depends on the limit.
        depends = generation.beam_size > 1 and generation.early_stopping == "never"
        if is_last or depends or (generation.min_new_tokens or 0) >= usual:
            return generation.max_new_tokens
        return min(generation.max_new_tokens, usual)

    def translations(
        self, batch: SourceBatch, places: Sequence[Place], execution: SearchExecution
    ) -> list[list[Translation] | None]:
        """Return the translations of each member; None if the batch's limit is too low for it."""
        config, _, tokenizer, _ = self.models[0]
        options: dict[str, Any] = {"max_new_tokens": batch.target_length}
        if not self.is_limited:
            # The limit follows from the line's own length, so that the other lines do not matter.
            lengths = np.count_nonzero(batch.src != config.pad_id, axis=1)
            options["length_limits"] = np.minimum(usual_target_length(lengths), config.max_length)
        is_attempt = self.is_limited and batch.target_length < self.generation.max_new_tokens
        if is_attempt:  # a target that has not ended is then among those that are returned
            options["num_hypotheses"] = self.generation.beam_size
        if self.seed is not None:
            options["key"] = _keys(self.seed, places, len(batch.src))
        configs, params, *_ = zip(*self.models, strict=True)
        options["execution"] = execution
        try:
            with jax.set_mesh(self.mesh):
                hypotheses = generate(params, configs, batch.src, self.generation, **options)
        except NonFiniteError as error:
            raise NonFiniteError(str(places[error.row]), error.row, error.step) from error
        rows = zip(batch.members, *jax.device_get(hypotheses), strict=False)
        return [
            None
            if is_attempt and lengths.max() == batch.target_length
            else [
                Translation(tokenizer.decode(ids[:length]), float(score), ids[:length])
                for ids, score, length in zip(tokens, scores, lengths, strict=True)
            ][: self.generation.num_hypotheses]
            for _, tokens, scores, lengths in rows
        ]


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
        **options: Fields of `GenerationConfig`; one that is None has the first model's default.

    Raises:
        TypeError: An option is unknown.
        InputError: An option is out of range, or does not fit the model or another option.
    """
    named = {name: value for name, value in options.items() if value is not None}
    generation = models[0].generation_config(**named)
    generation.check_model(models[0].config)
    check_sampling(generation, seed is not None)
    check_whole_number("seed", seed or 0, least=0)
    if execution is not None:
        check_execution(execution, SearchExecution)
    is_limited = "max_new_tokens" in {**models[0].generation, **named}
    mesh = mesh or make_mesh()
    placed = tuple(place(each, mesh) for each in models)
    return TextSearch(placed, generation, is_limited, seed, mesh, execution)


def _keys(seed: int, places: Sequence[Place], rows: int) -> Key[Array, " rows"]:
    """Return the key of each place, and any for the rows that are left."""
    key, numbers = jax.random.key(seed), np.resize(np.array(places, np.uint32), (rows, 2))
    fold_in = jax.random.fold_in
    return jax.vmap(lambda place: fold_in(fold_in(key, place[0]), place[1]))(numbers)
