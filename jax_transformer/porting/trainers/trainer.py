"""A training program as one description, and the settings in its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Layout
from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.weights.torch_file import Checkpoint, Namespace

if TYPE_CHECKING:
    import numpy as np

    from jax_transformer.tokenizers import Tokenizer

PLAIN = (bool, int, float, str, list, dict, type(None))


class TrainerCheckpoint(NamedTuple):
    """What a checkpoint and the files beside it hold."""

    tensors: dict[str, np.ndarray]
    settings: Settings
    source_tokens: list[str] | None = None  # of each id; None without a recorded vocabulary
    target_tokens: list[str] | None = None

    def shape(self, name: str, axes: int = 2) -> tuple[int, ...]:
        """Return the shape of a tensor with so many axes."""
        array = self.tensors.get(name)
        if array is None or array.ndim != axes:
            raise InputError(
                f"the checkpoint has no tensor {name!r} with {axes} axes; is it of another program?"
            )
        return array.shape


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A program that trains models, and the layout of its name."""

    name: str
    marks: tuple[set[str], ...]  # names in a checkpoint that tell the program, of each version
    read: Callable[[Checkpoint], TrainerCheckpoint]
    fields: Callable[[TrainerCheckpoint], dict[str, Any]]  # of the config
    # None where the vocabulary is not recorded.
    tokenizer: Callable[[TrainerCheckpoint, TransformerConfig], Tokenizer | None]
    remedy: str  # how to save a checkpoint again without objects of the program's own classes
    layout: Layout  # of the checkpoint's tensors
    records_heads: bool = True  # whether the checkpoint has the number of attention heads

    def wrote(self, content: Mapping[str, Any]) -> bool:
        """Return whether the content of a checkpoint has the marks of the program."""
        return any(marks <= content.keys() for marks in self.marks)

    def config(self, model: TrainerCheckpoint, num_heads: int | None = None) -> TransformerConfig:
        """Return the config of a model, with the number of heads if its program records none."""
        fields = self.fields(model)
        if num_heads is not None:
            if self.records_heads:
                raise InputError(f"num_heads={num_heads}: {self.name} records the number itself")
            fields["num_heads"] = num_heads
        try:
            return TransformerConfig(**fields)
        except InputError as error:
            raise InputError(f"{model.settings.origin}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings by name, the defaults of absent ones, and one clear line for what is refused."""

    origin: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return a setting."""
        if name not in self.values and name not in self.defaults:
            raise InputError(f"{self.origin}: has no setting {name!r}; add it")
        return self.get(name, None)

    def get(self, name: str, absent: Any) -> Any:
        """Return a setting, or `absent` where it has no default either."""
        value = self.values.get(name, self.defaults.get(name, absent))
        if type(value) not in PLAIN:
            raise InputError(f"{self.origin}: {name} is a {type(value).__name__}, no plain value")
        return value

    def flag(self, *names: str) -> bool:
        """Return settings that are on or off, all of them alike; an absent one is off."""
        first = self.get(names[0], False)
        for name in names:
            if self.get(name, False) not in (True, False, None):
                raise self.refusal(name, "it must be true or false")
            if bool(self.get(name, False)) != bool(first):
                raise self.refusal(name, f"it must equal {names[0]}={first}")
        return bool(first)

    def word(self, name: str, meanings: Mapping[str, Any]) -> Any:
        """Return the meaning of a setting that has few values."""
        value = self[name]
        if not isinstance(value, str) or value not in meanings:
            raise self.refusal(name, f"it must be {' or '.join(map(repr, meanings))}")
        return meanings[value]

    def agreed(self, *names: str) -> Any:
        """Return the value that settings share, as the width of encoder and decoder."""
        first, *others = names
        for other in others:
            if self[other] != self[first]:
                raise self.refusal(other, f"it must equal {first}={shorten(self[first])}")
        return self[first]

    def off(self, names: str) -> None:
        """Refuse settings of what no config expresses, unless they are off, empty or absent."""
        for name in names.split():
            if name in self.values and self[name]:
                raise self.refusal(name, "this library has no such model")

    def refusal(self, name: str, reason: str) -> InputError:
        """Return the error for a setting that no config expresses."""
        value = shorten(self.get(name, False))
        return InputError(f"{self.origin}: {name}={value} cannot be converted; {reason}")


def as_dict(value: object) -> dict[str, Any]:
    """Return what a program saved by name, in a dict or an argparse.Namespace; else nothing."""
    values = vars(value) if isinstance(value, Namespace) else value
    if not isinstance(values, Mapping):
        return {}
    return {name: part for name, part in values.items() if isinstance(name, str)}
