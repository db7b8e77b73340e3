"""Folders and models of Hugging Face transformers, read and written without transformers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from jax_transformer.config import SPECIAL_IDS, TransformerConfig
from jax_transformer.convert import languages, marian_folder
from jax_transformer.convert.families import FAMILIES, get_family
from jax_transformer.convert.families.family import (
    HEAD_BIASES,
    HEADS,
    Family,
    config_from_json,
    config_to_json,
)
from jax_transformer.convert.generation_config import (
    GENERATION_FILE,
    generation_options,
    read_generation_config,
)
from jax_transformer.convert.origin import Origin
from jax_transformer.convert.report import ConversionError
from jax_transformer.convert.table import expand, flatten, holds_names, is_in_part
from jax_transformer.convert.transfer import jax_leaf, to_params, to_tensors
from jax_transformer.errors import InputError
from jax_transformer.storage import weights
from jax_transformer.storage.folder import CONFIG_FILE, check_writable, model_folder_of, staged
from jax_transformer.storage.marian_files import is_marian
from jax_transformer.storage.reading import errors_naming, read_json
from jax_transformer.storage.weights import shards
from jax_transformer.storage.weights.arrays import FLOATS, as_numpy
from jax_transformer.storage.writing import json_bytes
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.tokenizers.readers.classes import read_class, written_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# How the names of classes end whose models have another head, or one stack.
_OTHER_CLASSES = (*HEADS.values(), "ForQuestionAnswering", "ForCausalLM", "EncoderModel")
_OWN_TYPE = "jax_transformer"  # "model_type" in a folder that this library has written


def from_huggingface(
    source: str | os.PathLike[str] | PreTrainedModel,
    *,
    dtype: str | None = None,
    part: str = "whole",
    mesh: Mesh | None = None,
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the config and the parameters of a model of a known family.

    Nothing is downloaded, and no tokenizer is read; `load_folder` reads it.

    Args:
        source: A folder with config.json and model.safetensors or pytorch_model.bin, whole or in
            shards, or a model of transformers.
        dtype: Floating-point type to convert the weights to; None keeps their type.
        part: "whole", or "encoder": the encoder alone, whose tensors alone are read. A folder of an
            encoder alone (T5EncoderModel and its kind) needs no `part`.
        mesh: Devices of `jax_transformer.make_mesh` over which the parameters are split, one after
            the other: no device holds more than its own parts. None is the default device.

    Raises:
        InputError: A file is missing, damaged or hostile; the family is unknown; config.json has
            a value that the model cannot have (names it); or the weights do not fit the config
            (lists the faults).
    """
    is_folder = isinstance(source, str | os.PathLike)
    if not is_folder and not (hasattr(source, "config") and hasattr(source, "state_dict")):
        raise InputError(f"{type(source).__name__} is neither a folder nor a model of transformers")
    if is_folder:
        values = read_config(Path(source))
    else:
        values = source.config.to_dict() | {"architectures": [type(source).__name__]}
    family = _family_of(values)
    if part == "encoder" and family.encoder_architecture is not None:
        values["architectures"] = [family.encoder_architecture]
    _check_architectures(values, family)
    reads = _reads_part(family, values, part)
    if is_folder:
        read = marian_folder.read_tensors if is_marian(Path(source)) else shards.read_weights
        tensors = read(Path(source), reads)
    else:  # a dict of our own, which the conversion empties
        tensors = {n: x for n, x in source.state_dict().items() if reads(n)}
    full = {name: family.layout_name(name) for name in tensors}
    # A tensor that has both names is left for the conversion to refuse.
    tensors = {name if full[name] in tensors else full[name]: x for name, x in tensors.items()}
    tied = family.is_tied(tensors) if family.is_tied else None
    # transformers leaves two labels unnamed, and itself takes them for three of BART: the weights
    # decide.
    sizes = [x.shape[0] for name, x in tensors.items() if name in HEAD_BIASES]
    values |= {"num_labels": sizes[0]} if sizes else {}
    config = config_from_json(family, values, tied).part(part)
    # transformers computes buffers again: a file may hold all of them, some or none.
    present = tuple(buffer for buffer in family.layout.buffers if buffer.foreign in tensors)
    layout = dataclasses.replace(family.layout, buffers=present)
    if family.uses_stored_positions:
        rounding = _rounding([as_numpy(tensors[buffer.foreign]) for buffer in present])
        config = dataclasses.replace(config, position_rounding=rounding)
    try:
        leaf = jax_leaf(mesh, config)
        params, _ = to_params(tensors, config, layout, dtype=dtype, leaf=leaf, consume=True)
    except ConversionError as error:
        sizes = [key for key in family.fields if type(family.defaults.get(key)) is int]
        if absent := [key for key in sizes if key not in values]:
            error.report.hint = error.report.hint or (
                f"{CONFIG_FILE} lacks {', '.join(absent)}: the defaults of {family.architecture} "
                "may not be those of the weights; add what differs"
            )
        raise ConversionError(error.report) from error
    return config, params


def _check_architectures(values: Mapping[str, Any], family: Family) -> None:
    """Refuse a class of transformers whose weights are not those of the family."""
    names = values.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    known = (family.encoder_architecture, *family.classes_of_heads().values())
    names = [name for name in names if name not in known]
    if names and all(name.endswith(_OTHER_CLASSES) for name in names):
        raise InputError(
            f"{CONFIG_FILE}: architectures={names[0]!r:.60} is neither a model that generates text "
            f"nor a known classifier; use the folder of a {family.architecture}"
        )


def _reads_part(family: Family, values: Mapping[str, Any], part: str) -> Callable[[str], bool]:
    """Return which tensors of a whole model a part of it reads; unknown ones stay a fault."""
    if part == "whole":
        return lambda name: not family.lacks(name)
    config = config_from_json(family, values).part(part)
    buffers = (buffer.foreign for buffer in family.layout.buffers)
    named = {row.foreign for row in expand(family.layout, config)}
    named |= {name for name in buffers if is_in_part(name, config)}

    def reads(name: str) -> bool:
        full = family.layout_name(name)
        return full in named or not (family.lacks(name) or holds_names(family.layout, [full]))

    return reads


def _rounding(tables: Sequence[np.ndarray]) -> str:
    """Return the half precision that the numbers of position tables show, or "none".

    Numbers of bfloat16 may all be numbers of float16 as well.
    """
    are_floats = tables and all(table.dtype.name in FLOATS for table in tables)
    for half in ("bfloat16", "float16") if are_floats else ():
        with np.errstate(over="ignore"):
            if all(np.array_equal(table, table.astype(np.dtype(half))) for table in tables):
                return half
    return "none"


def load_folder(
    folder: str | os.PathLike[str],
    *,
    ignore_generation_config: bool = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
    part: str = "whole",
) -> tuple[TransformerConfig, dict[str, Any], Tokenizer, dict[str, Any]]:
    """Return everything that translation needs from a folder of a known family.

    Args:
        part: As of `from_huggingface`.
        ignore_generation_config: Whether the folder's generation defaults are ignored. The start
            token, EOS and padding are those of config.json then.
        target_lang: Code of the language of the targets; None is that of the folder.

    Returns:
        The config, the parameters, the tokenizer, and the generation defaults as keyword arguments
        of `jax_transformer.generate`; they ban the ids that no token has. With language codes,
        `languages.generating` gives those that the tokenizer's target needs.
    """
    folder = Path(folder)
    config, tokenizer = load_tokenizer(
        folder,
        ignore_generation_config=ignore_generation_config,
        source_lang=source_lang,
        target_lang=target_lang,
    )
    if part == "encoder" or not config.generates:
        return *from_huggingface(folder, part=part), tokenizer, {}
    generation = {}
    if is_marian(folder) and not ignore_generation_config:
        generation = marian_folder.generation_options(folder, config)
    elif not ignore_generation_config:
        values, name = read_generation_config(folder)
        generation = generation_options(values, config, str(folder / name))
    segmenter, ids = tokenizer.target.segmenter, range(config.tgt_vocab_size)
    if absent := [i for i in ids if i >= segmenter.size or segmenter.token(i) is None]:
        banned = {*generation.get("banned_tokens", ()), *absent}
        generation["banned_tokens"] = tuple(sorted(banned))
    config, params = from_huggingface(folder)  # the weights decide a part of the config
    return config, params, tokenizer, generation


def load_tokenizer(
    folder: str | os.PathLike[str],
    *,
    ignore_generation_config: bool = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> tuple[TransformerConfig, Tokenizer]:
    """Return the config and the tokenizer of a folder; arguments as for `load_folder`.

    Without `target_lang`, the generation defaults or tokenizer_config.json may name the language.
    """
    folder = Path(folder)
    values = read_config(folder)
    family = _family_of(values)
    if family.tokenizer is None:
        raise InputError(
            f"{folder}: this library cannot read the tokenizer of a {family.architecture}; "
            "convert.from_huggingface reads the model alone"
        )
    config = config_from_json(family, values)
    tokenizer = read_class(folder, config, family.tokenizer)
    for name in ("pad_id", "eos_id"):
        token_id, wanted = getattr(tokenizer, name), getattr(config, name)
        if token_id != wanted:
            raise InputError(
                f"{folder}: the tokenizer has {name}={token_id}, but config.json says {wanted}; "
                "use the tokenizer that the model was trained with"
            )
    if tokenizer.languages is not None and target_lang is None:
        generation = {} if ignore_generation_config else read_generation_config(folder)[0]
        tokenizer = languages.with_generated_language(tokenizer, generation, config, str(folder))
    return config, tokenizer.with_languages(source_lang, target_lang, str(folder))


def to_huggingface(
    params: Mapping[str, Any],
    config: TransformerConfig,
    directory: str | os.PathLike[str],
    *,
    family: str | None = None,
    tokenizer: Tokenizer | None = None,
    origin: Origin | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = shards.MAX_SHARD_SIZE,
) -> None:
    """Write a folder that `from_pretrained` of the family's class in transformers loads.

    Of the family "marian_npz" it is a folder that Marian reads: model.npz, vocabularies and
    decoder.yml. Else it holds model.safetensors, or shards and model.safetensors.index.json;
    config.json and generation_config.json; and the tokenizer's files where a tokenizer is given.
    All files are written or none; other files of the folder stay.

    With an origin, config.json is the origin's, with the keys that `config` changes brought up to
    date, and the other files of the origin are written as they were: generation_config.json, too,
    if the origin has one.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        directory: The folder to write, whose parent exists.
        family: Model type of the family; None is the origin's, or the only family that has models
            of this config.
        tokenizer: The model's tokenizer, of the kind that the family's class reads.
        origin: The folder that the model comes from; `origin.read_origin` returns it.
        overwrite: Whether files of the same names are replaced.
        max_shard_size: Most bytes of the tensors in one file: a number, or text like "5GB". Larger
            weights become shards; a larger tensor has a shard of its own.

    Raises:
        InputError: A file exists, or other weights that could be read in the place of the new
            ones; the parent folder does not; no family has this config (names the fields), several
            have it and `family` is None; the family's class does not read this kind of tokenizer;
            the origin is of another family or vocabulary; `max_shard_size` is not a size; or the
            parameters are not those of the config. Nothing is written then.
    """
    directory = Path(directory)
    if family is None and origin is not None:
        family = origin.model_type
    chosen = _family_for(config) if family is None else get_family(family)
    for_marian = chosen.model_type == marian_folder.MODEL_TYPE
    if origin is None:
        contents = {
            CONFIG_FILE: json_bytes(config_to_json(chosen, config)),
            GENERATION_FILE: json_bytes(chosen.generation(config)),
        }
    else:
        starts = tokenizer is not None and tokenizer.languages and tokenizer.languages.starts
        brought_up = _config_of(origin, chosen, params, config, new_start=bool(starts))
        contents = {**origin.files, CONFIG_FILE: brought_up}
    if tokenizer is not None and not for_marian:
        contents = _tokenizer_files(chosen, tokenizer, config) | contents | tokenizer.contents
        contents = languages.language_files(contents, tokenizer)
    buffers = chosen.saves_buffers or config.position_rounding != "none"
    whole, _ = to_tensors(params, config, chosen.layout, buffers=buffers, copy=False)
    # Of tied copies the first is written: transformers ties them again.
    first_names = {id(tensor): name for name, tensor in reversed(whole.items())}.values()
    tensors = {
        chosen.written_name(name, config): tensor
        for name, tensor in whole.items()
        if name in first_names
    }
    tensors |= origin.other_parts() if origin else {}
    parts = shards.split(tensors, max_shard_size)
    names = shards.names_written(parts)
    if for_marian:
        tensors, contents = marian_folder.written_files(tensors, contents, tokenizer)
        names = [marian_folder.WEIGHTS]
    check_free(directory, [*names, *contents], overwrite)
    with staged(directory) as staging:
        if for_marian:
            weights.write(staging / marian_folder.WEIGHTS, tensors)
        else:
            shards.write_weights(staging, tensors, parts)
        for name, content in contents.items():
            (staging / name).write_bytes(content)


def _config_of(
    origin: Origin,
    family: Family,
    params: Mapping[str, Any],
    config: TransformerConfig,
    new_start: bool,
) -> bytes:
    """Return the config.json of an origin, in which only keys whose meaning changes are new."""
    if origin.model_type != family.model_type:
        raise InputError(
            f"origin is of the family {origin.model_type}, not {family.model_type}; leave it out"
        )
    tied = config.output_projection == "tied" if family.is_tied else None
    before = config_from_json(family, origin.config, tied)
    special_ids = ("pad_id", "eos_id") if new_start else SPECIAL_IDS
    for name in ("src_vocab_size", "tgt_vocab_size", *special_ids):
        old, new = getattr(before, name), getattr(config, name)
        if old != new:
            raise InputError(
                f"the origin's config.json says {name}={old}, but the model has {new}, which the "
                "origin's other files contradict; leave the origin out"
            )
    old, new = config_to_json(family, before), config_to_json(family, config)
    values = brought_up(origin.config, old, new)
    architecture = family.class_of(config)
    if values.get("architectures") and architecture not in values["architectures"]:
        values["architectures"] = [architecture]
    dtype = str(next(iter(flatten(params).values())).dtype)
    for key in ("dtype", "torch_dtype"):  # from_pretrained converts to this type
        if values.get(key) in FLOATS:
            values[key] = dtype
    return json_bytes(values)


def brought_up(
    values: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values with the keys that differ between old and new ones, in inner objects too."""
    changed = {key: value for key, value in new.items() if value != old.get(key)}
    for key, value in changed.items():
        if isinstance(value, dict) and key not in ("id2label", "label2id"):  # which are lists
            changed[key] = brought_up(values.get(key) or {}, old.get(key) or {}, value)
    return {**values, **changed}


def _tokenizer_files(
    family: Family, tokenizer: Tokenizer, config: TransformerConfig
) -> dict[str, bytes]:
    """Return the file that transformers needs besides the tokenizer's own files."""
    settings = family.tokenizer and written_config(tokenizer, config, family.tokenizer)
    if settings is None:
        raise InputError(
            f"a {family.architecture} cannot have a tokenizer of the kind {tokenizer.kind!r}; "
            "leave it out"
        )
    return {languages.TOKENIZER_CONFIG: json_bytes(settings)} if settings else {}


def check_free(directory: Path, names: Collection[str], overwrite: bool) -> None:
    """Refuse a folder that holds files of these names, or that cannot be written."""
    taken = [name for name in names if os.path.lexists(directory / name)]
    if taken and not overwrite:
        raise InputError(
            f"{directory} already holds {_few(taken)}; choose another folder or allow overwriting"
        )
    with errors_naming(directory, "cannot be written", OSError):
        directory.absolute().parent.stat()
    check_writable(directory)
    if stale := shards.stale_files(directory, names):
        raise InputError(
            f"{directory} holds {_few(stale)} of other weights, which could be read in the place "
            "of the new ones; remove them"
        )
    if GENERATION_FILE not in names and os.path.lexists(directory / GENERATION_FILE):
        raise InputError(
            f"{directory} holds a {GENERATION_FILE}, which the new model does not have and "
            "transformers would read; remove it"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers, by the "model_type" in config.json."""
    try:
        return read_config(folder).get("model_type") not in (None, _OWN_TYPE)
    except InputError:  # whoever reads the folder next reports what is wrong with it
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json; of Marian's, the options in its weights."""
    if is_marian(folder):
        return marian_folder.read_options(folder)
    if not os.path.isdir(folder):
        raise InputError(
            f"{folder} is no folder; nothing is downloaded: fetch the model first, for example "
            "with `hf download`"
        )
    return read_json(model_folder_of(folder) / CONFIG_FILE)


def read_model_config(path: Path) -> TransformerConfig:
    """Return the config of a model, from its folder or from its config.json alone."""
    values = read_json(path) if path.is_file() else read_config(path)
    if values.get("model_type") != _OWN_TYPE:
        return config_from_json(_family_of(values), values)
    try:
        return TransformerConfig.from_dict(values["config"])
    except (LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: holds no config of a model ({error!r})") from error


def _family_of(values: Mapping[str, Any]) -> Family:
    try:
        return get_family(values.get("model_type"))
    except InputError as error:
        raise InputError(f"{CONFIG_FILE}: {error}") from error


def _family_for(config: TransformerConfig) -> Family:
    """Return the only family that has models of this config."""
    reasons = {}
    for name, family in FAMILIES.items():
        try:
            config_to_json(family, config)
        except InputError as error:
            reasons[name] = str(error)
    families = [name for name in FAMILIES if name not in reasons]
    if not families:
        raise InputError("; ".join(reasons.values()))
    if len(families) > 1:
        names = ", ".join(families)
        raise InputError(f"several families have this config: choose one by family= from {names}")
    return FAMILIES[families[0]]
