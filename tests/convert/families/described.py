"""How the small models of a family are described."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Case:
    """Small models of a family, and what must be refused.

    Attributes:
        shapes: Arguments of the configuration class in transformers for small models that differ
            in every size; the first is used where one model is enough.
        refused: A value that the model cannot have for keys of config.json.
        required: Keys of config.json that may not be absent.
        impossible: Fields of TransformerConfig that no model of the family has.
        tables: Ends of names of tensors that transformers computes in float32, with a function
            (rows, columns) that computes them in float64.
        finish: Changes a model that has its numbers, given the arguments of its shape.
        float32: Ends of names of tensors that transformers keeps in float32 in a float16 model.
    """

    shapes: Mapping[str, Mapping[str, Any]]
    refused: Mapping[str, Any]
    required: tuple[str, ...]
    impossible: tuple[Mapping[str, Any], ...]
    tables: Mapping[str, Callable[[int, int], torch.Tensor]] = dataclasses.field(
        default_factory=dict
    )
    finish: Callable[[torch.nn.Module, Mapping[str, Any]], None] | None = None
    float32: tuple[str, ...] = ()
