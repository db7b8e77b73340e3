"""Folders and models of Hugging Face transformers, by the families of `convert.families`.

Folders are read and written without transformers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import files
from jax_transformer.convert.arrays import as_jax
from jax_transformer.convert.families import FAMILIES, get_family
from jax_transformer.convert.families.family import Family, config_from_json, config_to_json
from jax_transformer.convert.files.checks import faults_named
from jax_transformer.convert.transfer import to_params, to_tensors
from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jax_transformer.data.tokenizer import Tokenizer

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_OWN_TYPE = "jax_transformer"  # "model_type" in a folder that this library has written
_LONGEST_JSON = 2**20  # bytes of a config.json


def from_huggingface(
    source: str | os.PathLike[str] | PreTrainedModel, *, dtype: str | None = None
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the config and the parameters of a model of a known family.

    Nothing is downloaded, and no tokenizer is read; `load_folder` reads it.

    Args:
        source: A folder with config.json and model.safetensors or pytorch_model.bin, or a model
            of transformers.
        dtype: Floating-point type to convert the weights to; None keeps their type.

    Raises:
        InputError: A file is missing, damaged or hostile; the family is unknown; config.json has
            a value that the model cannot have (names it); or the weights do not fit the config
            (lists the faults).
    """
    if isinstance(source, str | os.PathLike):
        values, tensors = read_config(Path(source)), _read_weights(Path(source))
    elif hasattr(source, "config") and hasattr(source, "state_dict"):
        values, tensors = source.config.to_dict(), source.state_dict()
    else:
        raise InputError(f"{type(source).__name__} is neither a folder nor a model of transformers")
    family = _family_of(values)
    config = config_from_json(family, values)
    # transformers computes buffers again: a file may hold all of them, some or none.
    present = tuple(buffer for buffer in family.layout.buffers if buffer.foreign in tensors)
    layout = dataclasses.replace(family.layout, buffers=present)
    params, _ = to_params(tensors, config, layout, dtype=dtype, leaf=as_jax)
    return config, params


def load_folder(
    folder: str | os.PathLike[str],
) -> tuple[TransformerConfig, dict[str, Any], Tokenizer, dict[str, Any]]:
    """Return everything that translation needs from a folder of a known family.

    Returns:
        The config, the parameters, the tokenizer, and the generation defaults as keyword arguments
        of `jax_transformer.generate` (see `generation_options`); where the folder has no
        generation_config.json, the defaults are those that the family writes.

    Raises:
        InputError: As for `from_huggingface`, or this library cannot read the tokenizer.
    """
    folder = Path(folder)
    family = _family_of(read_config(folder))
    if family.tokenizer is None:
        raise InputError(
            f"{folder}: this library cannot read the tokenizer of a {family.architecture}; "
            "convert.from_huggingface reads the model alone"
        )
    config, params = from_huggingface(folder)
    tokenizer = family.tokenizer.read(folder, config)
    path = folder / _GENERATION
    generation = _read_json(path) if path.exists() else family.generation(config)
    return config, params, tokenizer, generation_options(generation)


def generation_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `generate` that a generation_config.json sets.

    Keys that have no counterpart are not read. A length penalty of transformers is a power of the
    length.
    """
    names = {
        "num_beams": "beam_size",
        "length_penalty": "length_penalty",
        "repetition_penalty": "repetition_penalty",
        "no_repeat_ngram_size": "no_repeat_ngram_size",
    }
    off = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}  # written by transformers as well
    found = {
        own: values[key]
        for key, own in names.items()
        if values.get(key) is not None and values[key] != off.get(key)
    }
    return {"length_penalty": 1.0, **found, "length_normalization": "power"}


def to_huggingface(
    params: Mapping[str, Any],
    config: TransformerConfig,
    directory: str | os.PathLike[str],
    *,
    family: str | None = None,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write a folder that `from_pretrained` of the family's class in transformers loads.

    It holds model.safetensors, config.json and generation_config.json, and the tokenizer's files
    where a tokenizer is given.

    Args:
        params: Parameters, as from `from_huggingface`.
        config: Their shape.
        directory: The folder, created where its parent exists.
        family: Model type of the family; None is the only family that has models of this config.
        tokenizer: The model's tokenizer, of a family whose tokenizer this library can write.
        overwrite: Whether files of those names may be replaced.

    Raises:
        InputError: A file exists, the parent folder does not, no family has this config (names
            the fields), several have it and `family` is None, the tokenizer cannot be written,
            or the parameters are not those of the config.
    """
    directory = Path(directory)
    chosen = _family_for(config) if family is None else get_family(family)
    texts = {
        _CONFIG: config_to_json(chosen, config),
        _GENERATION: chosen.generation(config),
    }
    names = [_WEIGHTS[0], *texts]
    if tokenizer is not None:
        if chosen.tokenizer is None:
            raise InputError(
                f"this library cannot write the tokenizer of a {chosen.architecture}; leave it out"
            )
        names += chosen.tokenizer.names
    taken = [name for name in names if os.path.lexists(directory / name)]
    if taken and not overwrite:
        raise InputError(
            f"{directory} already holds {', '.join(taken)}; choose another folder or allow "
            "overwriting"
        )
    tensors, _ = to_tensors(params, config, chosen.layout, buffers=False)
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)  # transformers ties the copies again
    with faults_named(directory, "cannot be written", OSError):
        directory.mkdir(exist_ok=True)
        files.write(
            directory / _WEIGHTS[0],
            {name: tensors[name] for name in first_names.values()},
            overwrite=overwrite,
            metadata={"format": "pt"},
        )
        for name in names[1:]:
            (directory / name).unlink(missing_ok=True)  # a link is replaced, not followed
        for name, content in texts.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2) + "\n")
        if tokenizer is not None:
            chosen.tokenizer.write(tokenizer, directory)


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers, of a known family or another.

    The "model_type" in config.json says so; a folder of this library has its own.
    """
    try:
        return read_config(folder).get("model_type") not in (None, _OWN_TYPE)
    except InputError:  # whoever reads the folder next reports what is wrong with it
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        InputError: The folder is missing, or the file is missing, damaged or too long.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder; nothing is downloaded: fetch the model first, for example "
            "with `hf download`"
        )
    return _read_json(folder / _CONFIG)


def _read_json(path: Path) -> dict[str, Any]:
    with faults_named(path, "is no readable JSON", OSError, ValueError, RecursionError):
        if path.stat().st_size > _LONGEST_JSON:
            raise InputError(f"{path} is longer than {_LONGEST_JSON} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a JSON object")
    return values


def _read_weights(folder: Path) -> dict[str, Any]:
    for name in _WEIGHTS:
        if (folder / name).exists():
            return files.read(folder / name)
    raise InputError(f"{folder} holds neither {' nor '.join(_WEIGHTS)}")


def _family_of(values: Mapping[str, Any]) -> Family:
    """Return the family that a config.json names."""
    try:
        return get_family(values.get("model_type"))
    except InputError as error:
        raise InputError(f"{_CONFIG}: {error}") from error


def _family_for(config: TransformerConfig) -> Family:
    """Return the only family that has models of this config."""
    fitting, reasons = [], []
    for family in FAMILIES.values():
        try:
            config_to_json(family, config)
            fitting.append(family)
        except InputError as error:
            reasons.append(str(error))
    if not fitting:
        raise InputError("; ".join(reasons))
    if len(fitting) > 1:
        names = ", ".join(family.model_type for family in fitting)
        raise InputError(f"several families have this config: choose one by family= from {names}")
    return fitting[0]
