"""The weights of a Hugging Face folder: one file, or shards and the index that names them.

An index is JSON: {"metadata": {"total_size": BYTES}, "weight_map": {TENSOR: FILE}}. Names, split
and the order in which files are preferred are those of transformers 5.23 and huggingface_hub.
Nothing in an index is trusted: it must name plain files of its own folder, and agree with each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.folder import WEIGHTS_FILE
from jax_transformer.storage.reading import read_json
from jax_transformer.storage.weights import formats
from jax_transformer.storage.weights.checks import WeightFileError, check_name

INDEX_FILE = "model.safetensors.index.json"
# In the order in which transformers prefers them.
PREFERRED = (WEIGHTS_FILE, INDEX_FILE, "pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_SHARD_SIZE = "50GB"  # the default of save_pretrained in transformers 5.23
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # bytes
SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


def weight_names(folder: Path) -> list[str]:
    """Return the names of the files with a folder's weights; of an index, it and its shards."""
    for name in PREFERRED:
        if (folder / name).exists():
            shards = _shards(folder / name) if name.endswith(".index.json") else {}
            return [name, *shards]
    raise InputError(f"{folder} holds none of {', '.join(PREFERRED)}")


def read_weights(folder: Path, reads: Callable[[str], bool] | None = None) -> dict[str, np.ndarray]:
    """Return the tensors of a folder, all shards together; `reads` as of `formats.read`."""
    first = weight_names(folder)[0]
    if not first.endswith(".index.json"):
        return formats.read(folder / first, reads=reads)
    tensors: dict[str, np.ndarray] = {}
    shards = {
        shard: wanted
        for shard, names in _shards(folder / first).items()
        if (wanted := {name for name in names if reads is None or reads(name)})
    }
    for shard in shards:
        if not os.path.lexists(folder / shard):
            raise WeightFileError(f"{folder / first}: the shard {shard} is missing; fetch it again")
    for shard, names in shards.items():
        tensors_of_shard = formats.read(folder / shard, reads=reads)
        for differing, fault in (
            (names - tensors_of_shard.keys(), "is in the index, but not in this shard"),
            (tensors_of_shard.keys() - names, "is not of this shard, by the index"),
        ):
            if differing:
                raise WeightFileError(f"{folder / shard}: {shorten(min(differing))} {fault}")
        tensors.update(tensors_of_shard)
    return tensors


def _shards(index: Path) -> dict[str, set[str]]:
    """Return the names of the tensors in each shard of an index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightFileError(f"{index}: weight_map must be an object that names tensors")
    suffix = index.name.removesuffix(".index.json")[index.name.index(".") :]
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        check_name(index, name)
        plain = isinstance(shard, str) and len(shard) <= 255 and shard.isprintable()
        if not plain or "/" in shard or "\\" in shard or not shard.endswith(suffix):
            raise WeightFileError(
                f"{index}: {name} is in {shorten(shard)}, which is not the name of a {suffix} "
                "file in this folder"
            )
        shards.setdefault(shard, set()).add(name)
    return dict(sorted(shards.items()))


def parse_shard_size(size: int | str) -> int:
    """Return a size in bytes; text is a number and a unit: "5GB" is 5 * 10**9 bytes."""
    number = size
    if isinstance(size, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]B)", size.strip().upper(), re.ASCII)
        number = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if number < 1:
        raise InputError(
            f"max_shard_size={size!r} must be a number of bytes of at least 1, or a number and a "
            f"unit out of {', '.join(UNITS)}, as '5GB'"
        )
    return number


def split(tensors: Mapping[str, Any], max_shard_size: int | str) -> dict[str, list[str]]:
    """Return the tensors of each file: `WEIGHTS_FILE`, or shards; a large tensor has its own."""
    limit = parse_shard_size(max_shard_size)
    shards: list[list[str]] = []
    current: list[str] = []
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            shards.append([name])
            continue
        if tensor.nbytes > room:
            shards.append(current)
            current, room = [], limit
        current.append(name)
        room -= tensor.nbytes
    shards += [current] if current else []
    count = len(shards)
    if count == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def names_written(shards: Mapping[str, Collection[str]]) -> list[str]:
    """Return the names of the files that `write_weights` writes for a split."""
    return [*shards] if WEIGHTS_FILE in shards else [*shards, INDEX_FILE]


def stale_files(folder: Path, written: Collection[str]) -> list[str]:
    """Return the names of other safetensors weights, which transformers could read instead."""
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir())
    weights = [n for n in names if n in (WEIGHTS_FILE, INDEX_FILE) or SHARD.fullmatch(n)]
    return [name for name in weights if name not in written]


def write_weights(
    folder: Path, tensors: Mapping[str, Any], shards: Mapping[str, Collection[str]]
) -> None:
    """Write tensors into the files of a `split`, with an index if there are several."""
    for shard, names in shards.items():
        of_shard = {name: tensors[name] for name in names}
        formats.write(folder / shard, of_shard, metadata={"format": "pt"})
    if WEIGHTS_FILE not in shards:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: shard for shard, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")
