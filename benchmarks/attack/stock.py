"""What is attacked: small models, tokenizers, texts and runs, each made once and kept on disk."""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer import TransformerConfig
from jax_transformer.convert import to_tensors, write_layout
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.storage import weights as files
from jax_transformer.text import number_words
from jax_transformer.tokenizers import Tokenizer, train_byte_pair
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel

SIZES = {
    "d_model": 16,
    "num_heads": 2,
    "d_ff": 24,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "max_length": 64,
    "dropout": 0.0,
}
FAMILY_SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
}


def stocked(stock: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Return the file or folder of this name in the stock; make it first where it is missing."""
    path = stock / name
    if not os.path.lexists(path):
        unfinished = stock / f"unfinished-{name}"
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        make(unfinished)
        unfinished.rename(path)
    return path


@functools.cache
def lines() -> tuple[list[str], list[str]]:
    """Return sources and targets of the embedded number words."""
    training, _ = number_words.corpus(0)
    return training.sources[:300], training.targets[:300]


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a byte-pair encoding of the number words."""
    sources, targets = lines()
    return train_byte_pair(sources + targets, vocab_size=60)


def config(preset: str = "vaswani2017", **fields: Any) -> TransformerConfig:
    """Return the config of a tiny model for `tokenizer`."""
    size = tokenizer().src_vocab_size
    ids = {"src_vocab_size": size, "tgt_vocab_size": size, "pad_id": tokenizer().pad_id}
    ids |= {"bos_id": tokenizer().bos_id, "eos_id": tokenizer().eos_id}
    return TransformerConfig.preset(preset, **(ids | SIZES | fields))


def params(config: TransformerConfig, seed: int = 0) -> dict[str, Any]:
    """Return parameters of NumPy for a config, drawn without running anything on a device."""
    import jax

    from jax_transformer import init_params

    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(init_params, config=config), jax.random.key(0))
    return jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(leaf.dtype), shapes)


@functools.cache
def model(seed: int = 0) -> TrainedModel:
    """Return a tiny model with a tokenizer; the parameters are random."""
    described = config()
    return TrainedModel(described, params(described, seed), tokenizer(), {"max_new_tokens": 8})


def own_folder(path: Path) -> None:
    """Write the folder of a model of this library."""
    model_folder.save(path, model())


def weight_file(suffix: str, layout: str = "reference") -> Callable[[Path], None]:
    """Return what writes the weights to a folder, with the config in `config.json`."""
    import json

    def make(path: Path) -> None:
        path.mkdir()
        described = model().config
        tensors, _ = to_tensors(model().params, described, LAYOUTS[layout], copy=False)
        recorded = {"config": json.dumps(described.to_dict())}
        metadata = recorded if suffix == ".safetensors" else None
        files.write(path / f"weights{suffix}", tensors, metadata=metadata)
        (path / "config.json").write_text(json.dumps(described.to_dict()))

    return make


def layout_file(path: Path) -> None:
    """Write a layout with its config as TOML."""
    path.mkdir()
    write_layout(path / "layout.toml", LAYOUTS["reference"], config())


def text(path: Path) -> None:
    """Write a parallel text: two files."""
    path.mkdir()
    for name, side in zip(("source.txt", "target.txt"), lines(), strict=True):
        (path / name).write_text("".join(f"{line}\n" for line in side), "utf-8")


def family_folder(family: str) -> Callable[[Path], None]:
    """Return what writes a Hugging Face folder of a family, of random weights."""

    def make(path: Path) -> None:
        from benchmarks.huggingface_models import build

        with open(os.devnull, "w") as null:
            kept = os.dup(2)
            os.dup2(null.fileno(), 2)  # sentencepiece writes its progress there
            try:
                build(family, path, *lines(), 0, pieces=60, **FAMILY_SIZES)
            finally:
                os.dup2(kept, 2)
                os.close(kept)

    return make


def own_family_folder(path: Path) -> None:
    """Write a Hugging Face folder of the family BART without a tokenizer, without transformers."""
    from jax_transformer.convert import to_huggingface

    described = config("bart")
    to_huggingface(params(described), described, path, family="bart")


def run_folder(path: Path) -> None:
    """Train a few steps of a tiny run, which leaves checkpoints."""
    from tests.runs.kill_resume import Task, train_or_resume

    with open(os.devnull, "w") as null:
        kept = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            train_or_resume(path, Task(6, keep=2))
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def record_folder(path: Path) -> None:
    """Write a record of what a program computed, and its weights, for `suggest`."""
    path.mkdir()
    draw = np.random.default_rng(0)
    size = tokenizer().src_vocab_size
    tensors = {"pad": np.array(0)}
    for batch in range(2):
        src, tgt = (draw.integers(1, size, (3, length)) for length in (7, 5))
        tensors |= {f"{batch}.src": src, f"{batch}.tgt": tgt}
        tensors[f"{batch}.logits"] = draw.normal(size=(3, 5, size))
        tensors[f"{batch}.block.encoder"] = draw.normal(size=(3, 7, 16))
    files.write(path / "record.safetensors", tensors)


def has(*modules: str) -> bool:
    """Return whether libraries are installed."""
    return all(importlib.util.find_spec(module) for module in modules)
