"""Comparison of a config with the one that a file or module carries beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError

# Fields that change neither the parameters nor what they compute at the positions both can hold:
# a checkpoint may be trained on with another dropout or read with a longer position table.
FREE_FIELDS = (
    "max_length",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "dropout_placement",
    "embedding_dropout",
    "initialization",
)


class ConfigMismatch(InputError):
    """A config that differs from the one the weights were made with."""


def check_config(config: TransformerConfig, recorded: Mapping[str, Any]) -> None:
    """Refuse a config that contradicts what is recorded beside the tensors.

    Shapes cannot tell 4 heads from 8, nor one activation, epsilon or norm placement from another.

    Args:
        config: The config to load with.
        recorded: Recorded fields of `TransformerConfig` by name, any subset; `FREE_FIELDS` are
            not compared.

    Raises:
        ConfigMismatch: A field differs or is unknown; names every such field with both values.
    """
    own = config.to_dict()
    differing = [
        f"{name}={own.get(name, 'no such field')!r} against recorded {value!r}"
        for name, value in recorded.items()
        if name not in FREE_FIELDS and (name not in own or own[name] != value)
    ]
    if differing:
        raise ConfigMismatch(f"config differs from the weights': {'; '.join(differing)}")
