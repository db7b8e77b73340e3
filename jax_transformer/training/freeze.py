"""Frozen parameters: `TrainingConfig.freeze` names them, and training keeps them bit-equal."""

import difflib
import math
import re
from fnmatch import fnmatchcase

from flax.traverse_util import flatten_dict, unflatten_dict

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import parameter_shapes

NEAREST = 3  # names that a refusal proposes


def trained_names(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the paths of parameters that no pattern of `fnmatch` matches; "*" matches "/" too."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = difflib.get_close_matches(pattern, names, NEAREST, cutoff=0.0)
            raise InputError(
                f"freeze={pattern!r} matches no parameter; the nearest are {', '.join(nearest)}"
            )
    frozen = {name for part in patterns for name in names if fnmatchcase(name, part)}
    trained = [name for name in names if name not in frozen]
    if not trained:
        stems = dict.fromkeys(f"{name.split('/')[0]}/*" for name in names)
        raise InputError(
            f"freeze={' '.join(patterns)!r} leaves no parameter to train; name fewer of "
            f"{', '.join(stems)}"
        )
    return trained


def trainable(params: Params, patterns: tuple[str, ...]) -> Params:
    """Return `params` without the frozen ones, whose paths match one of `patterns`."""
    if not patterns:
        return params
    leaves = flatten_dict(params, sep="/")
    trained = trained_names([*leaves], patterns)
    return unflatten_dict({name: leaves[name] for name in trained}, sep="/")


def merged(params: Params, trained: Params) -> Params:
    """Return all parameters, with other values for those that `trainable` returned."""
    return unflatten_dict(flatten_dict(params) | flatten_dict(trained))


def trained_parts(config: TransformerConfig, patterns: tuple[str, ...]) -> str:
    """Return the names of the parts of the model that are trained, whole or in part."""
    names = trained_names([*parameter_shapes(config)], patterns)
    text = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
    both = "token_embedding (which the encoder shares with the decoder)"
    return re.sub(r"\btoken_embedding\b", both, text)


def trained_sizes(config: TransformerConfig, patterns: tuple[str, ...]) -> tuple[int, int]:
    """Return how many parameters are trained, and how many the model has."""
    shapes = parameter_shapes(config)
    trained = trained_names([*shapes], patterns)
    return tuple(sum(math.prod(shapes[name]) for name in names) for names in (trained, shapes))
