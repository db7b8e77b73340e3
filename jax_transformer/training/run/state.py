"""What a training run is: settings that stay, progress that grows; both as plain JSON."""

import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.data.batches import EncodedCorpus
from jax_transformer.data.tokenizer import BytePairTokenizer, Tokenizer
from jax_transformer.errors import InputError
from jax_transformer.model import Params
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import Metrics, TrainState

# Settings of training that decide when it ends, what is kept of it and what memory it takes, but
# no step's outcome.
MAY_CHANGE = (
    "steps",
    "cooldown_steps",
    "patience",
    "evaluation_interval",
    "keep_checkpoints",
    "remat",
)


class RunSettings(NamedTuple):
    """What a run is made of; all of it is the same when the run goes on.

    Attributes:
        config: The shape of the model.
        training_config: How it is trained; `MAY_CHANGE` names what may differ.
        tokenizer: The vocabulary.
        data_sha256: `corpus_digest` of the pairs, those held out too.
        arguments: What else the program needs to start again, as JSON; not compared.
    """

    config: TransformerConfig
    training_config: TrainingConfig
    tokenizer: Tokenizer
    data_sha256: str
    arguments: dict[str, Any]


class Position(NamedTuple):
    """A batch of the run: its epoch and its index in the epoch's plan, both from 0."""

    epoch: int
    batch: int


class RunProgress(NamedTuple):
    """How far a run has come, beside the arrays of its state.

    Attributes:
        step: Batches tried; steps left out count, skipped batches do not.
        next: The first batch that has not been tried.
        rejected: Steps that left the state as it was: not finite, or a spike.
        nonfinite: The batches of the last steps that were not finite, as far as in a row.
        skipped: Batches that are not to be tried.
        window: Batch and metrics of each step not reported yet.
        best_score: The least validation loss, or the highest BLEU with its sign turned, as
            `select_by` says; None before the first evaluation.
        best_step: The step of that evaluation.
        evaluations_since_best: Evaluations after it.
    """

    step: int = 0
    next: Position = Position(0, 0)
    rejected: int = 0
    nonfinite: tuple[Position, ...] = ()
    skipped: tuple[Position, ...] = ()
    window: tuple[tuple[Position, Metrics], ...] = ()
    best_score: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0


class RunCheckpoint(NamedTuple):
    """A run at one moment: all that changes as it goes.

    Attributes:
        progress: The plain numbers.
        state: The arrays that a step changes.
        best_params: The parameters of the best evaluation; None before the first.
    """

    progress: RunProgress
    state: TrainState
    best_params: Params | None


def check_same(saved: RunSettings, given: RunSettings, step: int) -> None:
    """Refuse to go on with a run under settings that are not its own.

    Args:
        saved: Of the run.
        given: Under which it is to go on.
        step: How far it has come: with those given, it would have come to the same.

    Raises:
        InputError: A setting differs; names it with both values.
    """
    may_change = set(MAY_CHANGE)
    if saved.training_config.schedule == "cosine":
        may_change -= {"steps", "cooldown_steps"}  # its learning rate ends with the last step
    for settings in (saved, given):
        training = settings.training_config
        if training.cooldown_steps and step > training.steps - training.cooldown_steps:
            may_change -= {"steps", "cooldown_steps"}
    for part in ("config", "training_config"):
        old, new = (dataclasses.asdict(getattr(one, part)) for one in (saved, given))
        for name in old:
            if name not in may_change:
                check_equal(name, old[name], new[name])
    check_equal("tokenizer's sha256", saved.tokenizer.digest(), given.tokenizer.digest())
    check_equal("text's sha256", saved.data_sha256, given.data_sha256)


def check_equal(name: str, saved: Any, given: Any) -> None:
    """Refuse a value that differs from the run's.

    Raises:
        InputError: It does; names it with both values.
    """
    if saved != given:
        raise InputError(
            f"{name}={given!r} is not the run's, which has {saved!r}; a resumed run keeps it"
        )


def corpus_digest(*corpora: EncodedCorpus) -> str:
    """Return the sha256 of the ids of every pair, as 64 hex digits."""
    digest = hashlib.sha256()
    for corpus in corpora:
        for side in (corpus.sources, corpus.targets):
            digest.update(np.array([len(side), *map(len, side)], np.int64).tobytes())
            digest.update(np.concatenate(side).tobytes())
    return digest.hexdigest()


def settings_to_json(settings: RunSettings) -> dict[str, Any]:
    """Return settings that `settings_from_json` gives back."""
    return {
        "config": settings.config.to_dict(),
        "training_config": dataclasses.asdict(settings.training_config),
        "tokenizer": settings.tokenizer.to_json(),
        "tokenizer_sha256": settings.tokenizer.digest(),
        "data_sha256": settings.data_sha256,
        "arguments": settings.arguments,
    }


def settings_from_json(read: dict[str, Any]) -> RunSettings:
    """Return the settings; one that is younger than the JSON has its default.

    Raises:
        InputError: A setting is unknown, or a value is wrong.
        ValueError: The tokenizer is not the one of the digest.
    """
    known = {field.name for field in dataclasses.fields(TrainingConfig)}
    for name, value in read["training_config"].items():
        if name not in known:
            raise InputError(f"{name}={value!r} is no setting of this version of the library")
    tokenizer = BytePairTokenizer.from_json(read["tokenizer"], "tokenizer")
    if tokenizer.digest() != read["tokenizer_sha256"]:
        raise ValueError("the tokenizer's sha256 differs")
    return RunSettings(
        TransformerConfig.from_dict(read["config"]),
        TrainingConfig(**read["training_config"]),
        tokenizer,
        read["data_sha256"],
        read["arguments"],
    )


def progress_to_json(progress: RunProgress) -> dict[str, Any]:
    """Return progress that `progress_from_json` gives back, every number exactly."""
    window = [
        (position, {name: np.asarray(value).item() for name, value in metrics._asdict().items()})
        for position, metrics in progress.window
    ]
    return progress._replace(window=window)._asdict()


def progress_from_json(read: dict[str, Any]) -> RunProgress:
    """Return the progress."""
    positions = {
        name: tuple(Position(*position) for position in read[name])
        for name in ("nonfinite", "skipped")
    }
    window = tuple((Position(*position), Metrics(**values)) for position, values in read["window"])
    return RunProgress(**read | positions | {"next": Position(*read["next"]), "window": window})
