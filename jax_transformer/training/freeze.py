"""Frozen parameters: `TrainingConfig.freeze` names them, and training keeps them bit-equal."""

import difflib
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import flatten, nest
from jax_transformer.errors import InputError
from jax_transformer.model.parameters import parameter_shapes
from jax_transformer.model.transformer import Params

NEAREST = 3  # names that a refusal proposes


def trained_names(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names of the parameters that no pattern matches, in the same order.

    Args:
        names: Paths of the parameters, as "encoder/layers_0/self_attention/query/kernel".
        patterns: Patterns of `fnmatch`; "*" also matches "/".

    Raises:
        InputError: A pattern matches no parameter, or all parameters are frozen.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = difflib.get_close_matches(pattern, names, NEAREST, cutoff=0.0)
            raise InputError(
                f"freeze={pattern!r} matches no parameter; the nearest are {', '.join(nearest)}"
            )
    trained = [
        name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not trained:
        raise InputError(
            f"freeze={' '.join(patterns)!r} leaves no parameter to train; name fewer of "
            f"{', '.join(_stems(names))}"
        )
    return trained


def _stems(names: list[str]) -> list[str]:
    """Return the first parts of the names, as patterns, each once."""
    return list(dict.fromkeys(f"{name.split('/')[0]}/*" for name in names))


def trainable(params: Params, patterns: tuple[str, ...]) -> Params:
    """Return the parameters that are trained: a nested dict without the frozen parameters.

    Without patterns it is `params` itself.

    Raises:
        InputError: As `trained_names`.
    """
    if not patterns:
        return params
    leaves = flatten(params)
    return nest({name: leaves[name] for name in trained_names([*leaves], patterns)})


def merged(params: Params, trained: Params) -> Params:
    """Return all parameters: those of `trained`, and of `params` where `trained` has none.

    Args:
        params: All parameters.
        trained: Some of them with other values, as `trainable` returns them.
    """
    return {
        name: _merged_value(value, trained[name]) if name in trained else value
        for name, value in params.items()
    }


def _merged_value(value: Any, trained: Any) -> Any:
    return merged(value, trained) if isinstance(value, Mapping) else trained


def trained_sizes(config: TransformerConfig, patterns: tuple[str, ...]) -> tuple[int, int]:
    """Return how many parameters are trained, and how many the model has.

    Raises:
        InputError: As `trained_names`.
    """
    shapes = parameter_shapes(config)
    trained = trained_names([*shapes], patterns)
    return tuple(sum(math.prod(shapes[name]) for name in names) for names in (trained, shapes))
