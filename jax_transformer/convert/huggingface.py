"""Folders and models of Hugging Face transformers, which need not be installed for the former."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import files
from jax_transformer.convert.arrays import as_jax
from jax_transformer.convert.families import marian
from jax_transformer.convert.files.checks import faults_named
from jax_transformer.convert.transfer import to_params, to_tensors
from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from transformers import MarianMTModel

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_LONGEST_CONFIG = 2**20  # bytes of a config.json


def from_huggingface(
    source: "str | os.PathLike | MarianMTModel", *, dtype: str | None = None
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the config and the parameters of a Marian translation model.

    Nothing is downloaded, and no tokenizer is read.

    Args:
        source: A folder with config.json and model.safetensors or pytorch_model.bin, or a
            transformers.MarianMTModel.
        dtype: Floating-point type to convert the weights to; None keeps theirs.

    Raises:
        InputError: A file is missing, damaged or hostile, config.json has a value that the model
            cannot honour (names it), or the weights are not those of the config (lists every
            fault).
    """
    if isinstance(source, str | os.PathLike):
        values, tensors = _read_folder(Path(source))
    elif hasattr(source, "config") and hasattr(source, "state_dict"):
        values, tensors = source.config.to_dict(), source.state_dict()
    else:
        raise InputError(f"{type(source).__name__} is neither a folder nor a MarianMTModel")
    config = marian.config_from_json(values)
    _check_sizes(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    buffers = any(buffer.foreign in tensors for buffer in marian.LAYOUT.buffers)
    params, _ = to_params(tensors, config, marian.LAYOUT, dtype=dtype, buffers=buffers, leaf=as_jax)
    return config, params


def to_huggingface(
    params: Mapping[str, Any],
    config: TransformerConfig,
    directory: str | os.PathLike,
    *,
    overwrite: bool = False,
) -> None:
    """Write a folder that transformers.MarianMTModel.from_pretrained loads.

    It holds model.safetensors, config.json and generation_config.json; a tokenizer's files are
    left to their owner.

    Args:
        params: Parameters, as from `from_huggingface`.
        config: Their shape.
        directory: The folder, created where its parent exists.
        overwrite: Whether files of those names may be replaced.

    Raises:
        InputError: A file exists, the parent folder does not, no MarianMTModel has this config
            (names the fields), or the parameters are not those of the config.
    """
    directory = Path(directory)
    values = marian.config_to_json(config)
    generation = {
        "bad_words_ids": [[config.pad_id]],  # the decoder starts from it, but never returns to it
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "forced_eos_token_id": config.eos_id,
        "max_length": config.max_length,
        "pad_token_id": config.pad_id,
    }
    texts = {"config.json": values, "generation_config.json": generation}
    taken = [name for name in (_WEIGHTS[0], *texts) if os.path.lexists(directory / name)]
    if taken and not overwrite:
        raise InputError(
            f"{directory} already holds {', '.join(taken)}; choose another folder or allow "
            "overwriting"
        )
    tensors, _ = to_tensors(params, config, marian.LAYOUT, buffers=False)
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)  # transformers ties the copies again by itself
    with faults_named(directory, "cannot be written", OSError):
        directory.mkdir(exist_ok=True)
        files.write(
            directory / _WEIGHTS[0],
            {name: tensors[name] for name in names.values()},
            overwrite=overwrite,
            metadata={"format": "pt"},
        )
        for name, content in texts.items():
            (directory / name).unlink(missing_ok=True)  # a link is replaced, not followed
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2) + "\n")


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json holds, and the tensors."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder; nothing is downloaded: fetch the model first, for example "
            "with `hf download`"
        )
    path = folder / "config.json"
    with faults_named(path, "is no readable JSON", OSError, ValueError, RecursionError):
        if path.stat().st_size > _LONGEST_CONFIG:
            raise InputError(f"{path} is longer than {_LONGEST_CONFIG} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a JSON object")
    for name in _WEIGHTS:
        if (folder / name).exists():
            return values, files.read(folder / name)
    raise InputError(f"{folder} holds neither {' nor '.join(_WEIGHTS)}")


def _check_sizes(config: TransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a config that claims a model far beyond the weights, before it takes memory or time.

    What is left is found tensor by tensor.
    """
    layers = config.num_encoder_layers + config.num_decoder_layers
    largest = max((math.prod(shape) for shape in shapes.values()), default=0)
    sizes = {
        "encoder_layers and decoder_layers": (layers, len(shapes) // 16),  # tensors of a layer
        "d_model": (config.d_model, largest),
        "encoder_ffn_dim": (config.d_ff, largest),
        "vocab_size": (config.src_vocab_size, largest),
        "decoder_vocab_size": (config.tgt_vocab_size, largest),
    }
    for buffer in marian.LAYOUT.buffers:
        if buffer.foreign in shapes:
            sizes["max_position_embeddings"] = (config.max_length, max(shapes[buffer.foreign]))
    for name, (claimed, found) in sizes.items():
        if claimed > found:
            raise InputError(
                f"config.json: {name}={claimed}, but the {len(shapes)} weights allow at most "
                f"{found}"
            )
