"""What is attacked: small models, tokenizers, texts and runs, each made once and kept on disk."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_transformer import TransformerConfig, convert
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.runs.loop import CHECKPOINTS
from jax_transformer.storage import weights as files
from jax_transformer.text import number_words
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel
from tests.models import one_layer, random_params, tiny_model
from tests.runs.runs import make_settings, save

SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "max_length": 64, "dropout": 0.0}


def stocked(stock: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Return the file or folder of this name in the stock; make it first where it is missing."""
    path = stock / name.replace("/", "-")
    if not os.path.lexists(path):
        unfinished = stock / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(path)
    return path


def digest_of(*values: Any) -> str:
    """Return the sha256 of arrays, bytes and what has a repr."""
    digest = hashlib.sha256()
    for path, value in jax.tree_util.tree_leaves_with_path(values):
        digest.update(jax.tree_util.keystr(path).encode())
        if hasattr(value, "dtype"):
            array = np.asarray(value)
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


@functools.cache
def lines() -> tuple[list[str], list[str]]:
    """Return sources and targets of the embedded number words."""
    training, _ = number_words.corpus(0)
    return training.sources[:300], training.targets[:300]


@functools.cache
def model(seed: int = 0) -> TrainedModel:
    """Return a tiny model with a tokenizer; the parameters are random."""
    sources, targets = lines()
    return tiny_model([*sources, *targets], 60, seed, **SIZES)


@functools.cache
def config(preset: str) -> TransformerConfig:
    """Return a tiny config of a preset, with as many ids as the tokenizer has."""
    return one_layer(preset, model().config.src_vocab_size, **SIZES)


@functools.cache
def params(preset: str) -> dict[str, Any]:
    """Return random parameters of `config`."""
    return random_params(config(preset))


def own_folder(path: Path) -> None:
    """Write the folder of a model of this library."""
    model_folder.save(path, model())


def weight_file(path: Path, suffix: str) -> None:
    """Write the weights in the layout of the reference, and the config in `config.json`."""
    path.mkdir()
    tensors, _ = convert.to_tensors(model().params, model().config, LAYOUTS["reference"])
    described = json.dumps(model().config.to_dict())
    metadata = {"config": described} if suffix == ".safetensors" else None
    files.write(path / f"weights{suffix}", tensors, metadata=metadata)
    (path / "config.json").write_text(described)


def layout_file(path: Path) -> None:
    """Write a layout with its config as TOML."""
    path.mkdir()
    convert.write_layout(path / "layout.toml", LAYOUTS["reference"], model().config)


def text(path: Path) -> None:
    """Write a parallel text: two files."""
    path.mkdir()
    for name, side in zip(("source.txt", "target.txt"), lines(), strict=True):
        (path / name).write_text("".join(f"{line}\n" for line in side), "utf-8")


def bart_folder(path: Path, overwrite: bool = False) -> None:
    """Write a Hugging Face folder of BART without a tokenizer."""
    options = {"family": "bart", "overwrite": overwrite}
    convert.to_huggingface(params("bart"), config("bart"), path, **options)


def run_folder(path: Path) -> None:
    """Write two checkpoints of a run."""
    save(path / CHECKPOINTS, make_settings(), (4, 8))
