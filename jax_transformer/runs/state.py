"""The settings of a training run, which stay, and its progress, which grows; both as plain JSON."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked_fields
from jax_transformer.convert.origin import ORIGIN_FILE, Origin
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.storage.reading import MAX_TOKENIZER, with_tuples
from jax_transformer.tokenizers import Tokenizer, describe, from_description
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import Metrics, TrainState

# Most steps in a row with a loss or gradient that is not finite; the run then stops.
MOST_NONFINITE = 10
# Training settings that decide when the run ends, what it keeps and how much memory it takes, but
# not the outcome of a step.
MAY_CHANGE = {each.name for each in dataclasses.fields(TrainingConfig) if each.metadata}
KEPT = "; a resumed run keeps it"  # follows what differs, in the message about a setting
OTHERWISE = "; for another, start a new run from this one, by --init and --init-keeps"


class RunSettings(NamedTuple):
    """The settings of a run; `check_same` compares those of a resumed run with these."""

    config: TransformerConfig
    training_config: TrainingConfig
    tokenizer: Tokenizer
    text_sha256: str  # of the text, of what is kept of it, and of the tokenizer
    arguments: dict[str, Any]  # what else the program needs to start again, as JSON
    generation: Mapping[str, Any] | None = None  # defaults of the model that the run starts from
    origin: Origin | None = None  # the Hugging Face folder of that model


class Position(NamedTuple):
    """A batch of the run: its epoch, the window in it and its number in the window, from 0."""

    epoch: int
    window: int
    batch: int


class RunProgress(NamedTuple):
    """The progress of a run, beside the arrays of its state."""

    step: int = 0  # batches tried; rejected steps count, skipped batches do not
    next: Position = Position(0, 0, 0)  # the first batch that has not been tried
    rejected: int = 0  # steps that left the state unchanged: not finite, or a spike
    nonfinite: tuple[Position, ...] = ()  # latest batches in a row, at most MOST_NONFINITE
    skipped: tuple[Position, ...] = ()  # batches that must not be tried
    window: tuple[tuple[Position, Metrics], ...] = ()  # steps that are not reported yet
    best_score: float | None = None  # lowest loss in nats a token; minus the best BLEU or chrF
    best_step: int | None = None
    evaluations_since_best: int = 0

    def after_step(self, position: Position, metrics: Metrics) -> "RunProgress":
        """Return the progress after one more step, on the batch at a position."""
        return self._replace(
            step=self.step + 1,
            next=position._replace(batch=position.batch + 1),
            window=(*self.window, (position, metrics)),
        )

    def after_report(self) -> "RunProgress":
        """Return the progress with an empty window, its steps counted in the other fields."""
        nonfinite = self.nonfinite
        for position, metrics in self.window:
            if len(nonfinite) < MOST_NONFINITE:
                nonfinite = () if metrics.finite else (*nonfinite, position)
        rejected = sum(not metrics.finite or metrics.spike for _, metrics in self.window)
        return self._replace(window=(), nonfinite=nonfinite, rejected=self.rejected + int(rejected))

    def after_evaluation(self, score: float) -> "RunProgress":
        """Return the progress after an evaluation; `best_step` is `step` if it is the best one."""
        if self.best_score is None or score < self.best_score:
            return self._replace(best_score=score, best_step=self.step, evaluations_since_best=0)
        return self._replace(evaluations_since_best=self.evaluations_since_best + 1)

    def skipping(self, positions: Iterable[Position]) -> "RunProgress":
        """Return the progress with more batches to skip."""
        skipped = tuple(dict.fromkeys((*self.skipped, *positions)))
        if skipped == self.skipped:
            return self
        return self._replace(skipped=skipped, nonfinite=())


class RunCheckpoint(NamedTuple):
    """A run at one moment: everything that changes while it trains."""

    progress: RunProgress
    state: TrainState
    best_params: Params | None  # of the best evaluation; None before the first


def check_same(saved: RunSettings, named: RunSettings, step: int) -> None:
    """Refuse to resume a run under other settings; those of later steps alone may differ."""
    reason = ""  # why the number of steps is kept, too
    if saved.training_config.schedule == "cosine":
        reason = ", because the learning rate of a cosine ends with the last step"
    for settings in (saved, named):
        training = settings.training_config
        if training.cooldown_steps and step > training.steps - training.cooldown_steps:
            reason = (
                f", because step {step:,} lies in the cooldown, the last "
                f"{training.cooldown_steps:,} of {training.steps:,} steps"
            )
    kept = {"steps", "cooldown_steps"} if reason else set()
    for part in ("config", "training_config"):
        old, new = (dataclasses.asdict(getattr(settings, part)) for settings in (saved, named))
        for name in old:
            if name in kept or name not in MAY_CHANGE:
                check_equal(name, old[name], new[name], reason if name in kept else "")
    check_equal("tokenizer's sha256", saved.tokenizer.digest(), named.tokenizer.digest())
    check_equal("text's sha256", saved.text_sha256, named.text_sha256)


def check_equal(name: str, saved: Any, named: Any, reason: str = "") -> None:
    """Refuse a value that differs from the run's."""
    if saved != named:
        raise InputError(
            f"{name}={named!r} is not the run's, which has {saved!r}{KEPT}{reason}{OTHERWISE}"
        )


def settings_to_json(settings: RunSettings) -> dict[str, Any]:
    """Return settings as JSON; `settings_from_json` is the inverse."""
    return {
        "config": settings.config.to_dict(),
        "training_config": dataclasses.asdict(settings.training_config),
        "tokenizer": describe(settings.tokenizer),
        "tokenizer_sha256": settings.tokenizer.digest(),
        "text_sha256": settings.text_sha256,
        "arguments": settings.arguments,
        "generation": None if settings.generation is None else dict(settings.generation),
        "origin_sha256": None if settings.origin is None else _digest(settings.origin),
    }


def start_files(settings: RunSettings) -> dict[str, bytes]:
    """Return the files that a run writes once: those of its tokenizer, and the model's origin."""
    files = dict(settings.tokenizer.contents)
    if settings.origin is not None:
        files[ORIGIN_FILE] = settings.origin.to_bytes()
    return files


def settings_from_json(read: dict[str, Any], start: Path) -> RunSettings:
    """Return the settings; the folder `start` has the `start_files`."""
    contents = {name: _read(start / name) for name in read["tokenizer"]["files"]}
    tokenizer = from_description(read["tokenizer"], contents, "tokenizer")
    if tokenizer.digest() != read["tokenizer_sha256"]:
        raise ValueError("the tokenizer's sha256 differs")
    origin = None
    if read["origin_sha256"] is not None:
        origin = Origin.from_bytes(_read(start / ORIGIN_FILE))
        if _digest(origin) != read["origin_sha256"]:
            raise ValueError("the origin's sha256 differs")
    return RunSettings(
        config=TransformerConfig.from_dict(read["config"]),
        training_config=TrainingConfig(**checked_fields(TrainingConfig, read["training_config"])),
        tokenizer=tokenizer,
        text_sha256=read["text_sha256"],
        arguments=read["arguments"],
        generation=with_tuples(read["generation"]),
        origin=origin,
    )


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_TOKENIZER + 1)
    if len(content) > MAX_TOKENIZER:
        raise ValueError(f"{path.name} is longer than any that is written")
    return content


def _digest(origin: Origin) -> str:
    return hashlib.sha256(origin.to_bytes()).hexdigest()


def progress_to_json(progress: RunProgress) -> dict[str, Any]:
    """Return progress as JSON; `progress_from_json` gives back every number exactly."""
    window = [
        (position, {name: np.asarray(value).tolist() for name, value in metrics._asdict().items()})
        for position, metrics in progress.window
    ]
    return progress._replace(window=window)._asdict()


def progress_from_json(read: dict[str, Any]) -> RunProgress:
    """Return the progress."""
    return RunProgress(**read)._replace(
        next=Position(*read["next"]),
        nonfinite=tuple(Position(*position) for position in read["nonfinite"]),
        skipped=tuple(Position(*position) for position in read["skipped"]),
        window=tuple((Position(*place), Metrics(**values)) for place, values in read["window"]),
    )
