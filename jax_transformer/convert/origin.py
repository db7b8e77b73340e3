"""What a Hugging Face folder holds besides the model: a trained model carries it in one file.

The file is `huggingface_origin.json`; `to_huggingface` writes its content back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jax_transformer.convert import marian_folder
from jax_transformer.convert.families import get_family
from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE, WEIGHTS_FILE
from jax_transformer.storage.marian_files import is_marian
from jax_transformer.storage.reading import (
    MAX_CARRIED,
    errors_naming,
    parse_json,
    read_bytes,
    read_json,
)
from jax_transformer.storage.weights.shards import read_weights, weight_names
from jax_transformer.storage.writing import json_bytes
from jax_transformer.tokenizers.readers.classes import tokenizer_names

ORIGIN_FILE = "huggingface_origin.json"
MAX_CARRIED_TOGETHER = 2**25  # bytes of all files that are carried over, as base64 in one file
MAX_ORIGIN = 2**26  # bytes of `ORIGIN_FILE`: 4/3 of them, and the content of config.json
# Ends of the names of weights and of their indices: with other weights they would be stale.
WEIGHTS = tuple(
    ".bin .ckpt .gguf .h5 .index.json .mlmodel .msgpack .npz .onnx "
    ".onnx_data .ot .pb .pt .pth .safetensors .tflite".split()
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a Hugging Face folder holds besides weights and tokenizer."""

    model_type: str
    config: dict[str, Any]  # the content of config.json
    files: dict[str, bytes]  # such as generation_config.json, a model card
    folder: str | None = None  # that has tensors of parts that this library lacks; else None

    def to_bytes(self) -> bytes:
        """Return the content of `ORIGIN_FILE`; `from_bytes` is the inverse."""
        fields = msgspec.to_builtins(self)
        return json_bytes({name: value for name, value in fields.items() if value is not None})

    def other_parts(self) -> dict[str, np.ndarray]:
        """Return the tensors of the folder that are of parts that this library lacks."""
        family = get_family(self.model_type)
        if self.folder is None or not family.other_parts:
            return {}
        folder = Path(self.folder)
        with errors_naming(folder, "has tensors that are copied; bring it back", OSError):
            folder.stat()
        return read_weights(folder, family.lacks)

    @classmethod
    def from_bytes(cls, content: bytes) -> Origin:
        """Return the origin from the content of `ORIGIN_FILE`."""
        try:
            origin = msgspec.convert(parse_json(content, ORIGIN_FILE), cls)
        except msgspec.ValidationError as error:
            raise InputError(f"{ORIGIN_FILE}: is damaged ({error})") from error
        for name in origin.files:
            # The names become paths when the model is written as a Hugging Face folder.
            is_free = name.isprintable() and name not in ("", ".", "..", CONFIG_FILE, WEIGHTS_FILE)
            if not is_free or "/" in name or "\\" in name or name.endswith(WEIGHTS):
                raise InputError(
                    f"{ORIGIN_FILE}: the name {name[:60]!r} is not that of a file to carry over"
                )
        return origin


def read_origin(folder: Path) -> tuple[Origin, list[str]]:
    """Return the origin of a Hugging Face folder, and the names of what it leaves out.

    It leaves out other weights, folders, special files, and what is too large: a file of more than
    16 MiB, or all files above 32 MiB together.
    """
    if is_marian(folder):
        config, elsewhere = marian_folder.read_options(folder), marian_folder.names_read(folder)
        folder = folder if folder.is_dir() else folder.parent
    else:
        config = read_json(folder / CONFIG_FILE)
        elsewhere = {CONFIG_FILE, *weight_names(folder)}
    family = get_family(config.get("model_type"))
    if family.tokenizer is not None:
        elsewhere.update(tokenizer_names(folder, family.tokenizer))
    files, left, carried = {}, [], 0
    with errors_naming(folder, "cannot be read", OSError):
        for path in sorted(folder.iterdir()):
            if path.name in elsewhere:
                continue
            size = path.stat().st_size if path.is_file() else MAX_CARRIED + 1
            together = carried + size
            fits = size <= MAX_CARRIED and together <= MAX_CARRIED_TOGETHER
            if fits and not path.name.endswith(WEIGHTS):
                files[path.name] = read_bytes(path, "cannot be read", MAX_CARRIED)
                carried = together
            else:
                left.append(path.name)
    origin = Origin(family.model_type, config, files, str(folder.absolute()))
    return origin if origin.other_parts() else dataclasses.replace(origin, folder=None), left
