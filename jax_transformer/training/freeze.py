"""Frozen parameters, which training keeps bit-equal: `TrainingConfig.freeze` names them.

Beside an adapter (`adapters.lora`), all other parameters are frozen.
"""

import math

from flax.traverse_util import flatten_dict, unflatten_dict

from jax_transformer.adapters import lora
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import BASE, Shape, match_paths, parameter_shapes
from jax_transformer.training.config import TrainingConfig


def run_shapes(config: TransformerConfig, training_config: TrainingConfig) -> dict[str, Shape]:
    """Return the shape of every parameter of a run by its path, those of an adapter last."""
    if (rank := training_config.lora_rank) is not None:
        shapes = parameter_shapes(config)
        whole = match_paths("lora_whole", shapes, training_config.lora_whole)
        kept = {BASE.join(path.rsplit("/", 1)): shapes[path] for path in whole}
        return shapes | kept | lora.shapes(config, rank, training_config.lora_targets)
    for name in ("lora_alpha", "lora_targets", "lora_whole", "lora_dropout"):
        if (value := getattr(training_config, name)) != getattr(TrainingConfig, name):
            raise InputError(f"{name}={value!r} needs lora_rank, for example 16")
    return parameter_shapes(config)


def trained_names(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the paths that no pattern matches, of an adapter's leaves alone where there are any.

    Patterns are those of `match_paths`. A scale is a setting of an adapter, and is not trained.
    """
    whole = {name.replace(BASE, "/") for name in names if BASE in name}
    adapter = [name for name in names if name.endswith(("/lora_a", "/lora_b")) or name in whole]
    names = adapter or names
    frozen = match_paths("freeze", names, patterns)
    trained = [name for name in names if name not in frozen]
    if not trained:
        stems = dict.fromkeys(f"{name.split('/')[0]}/*" for name in names)
        raise InputError(
            f"freeze={' '.join(patterns)!r} leaves no parameter to train; name fewer of "
            f"{', '.join(stems)}"
        )
    return trained


def trainable(params: Params, patterns: tuple[str, ...]) -> Params:
    """Return `params` without the frozen ones: those that `patterns` match.

    Beside an adapter, all but its factors and whole parameters are frozen.
    """
    leaves = flatten_dict(params, sep="/")
    trained = trained_names([*leaves], patterns)
    if len(trained) == len(leaves):
        return params
    return unflatten_dict({name: leaves[name] for name in trained}, sep="/")


def merged(params: Params, trained: Params) -> Params:
    """Return all parameters, with other values for those that `trainable` returned."""
    return unflatten_dict(flatten_dict(params) | flatten_dict(trained))


def trained_parts(config: TransformerConfig, training_config: TrainingConfig) -> str:
    """Return the names of the parts that are trained, whole or in part, and who shares a table."""
    names = trained_names([*run_shapes(config, training_config)], training_config.freeze)
    shared = {"token_embedding": "the encoder and the decoder"}
    if config.output_projection == "tied":
        shared = {"token_embedding": "the encoder, the decoder and the output projection"}
        shared |= {"target_embedding": "the decoder and the output projection"}
    parts = dict.fromkeys(name.partition("/")[0] for name in names)
    return ", ".join(
        f"{part} (which {shared[part]} share)" if part in shared else part for part in parts
    )


def trained_sizes(config: TransformerConfig, training_config: TrainingConfig) -> tuple[int, int]:
    """Return how many parameters are trained, and how many the run has."""
    shapes = run_shapes(config, training_config)
    trained = trained_names([*shapes], training_config.freeze)
    return tuple(sum(math.prod(shapes[name]) for name in names) for names in (trained, shapes))
