"""How the small models of a family are described."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """Small models of a family, and what must be refused."""

    # Arguments of the configuration class in transformers for small models that differ in every
    # size; the first is used where one model is enough.
    shapes: Mapping[str, Mapping[str, Any]]
    refused: Mapping[str, Any]  # a value that the model cannot have for keys of config.json
    impossible: tuple[Mapping[str, Any], ...]  # fields of the config that no model has
    # Ends of names of tensors that transformers computes in float32: functions (rows, columns)
    # that compute them in float64.
    tables: Mapping[str, Callable[[int, int], torch.Tensor]] = field(default_factory=dict)
    # Changes a model that has its numbers, given the arguments of its shape.
    finish: Callable[[torch.nn.Module, Mapping[str, Any]], None] | None = None
    float32: tuple[str, ...] = ()  # ends of names that stay float32 in a float16 model
