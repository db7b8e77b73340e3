"""Time and memory of conversions: python -m benchmarks.conversion nllb-200-distilled-600M.

Random weights in the shape of a model. Memory is the most that is resident, parameters and files'
contents alike, in multiples of the weights' bytes: on top of the imports, and with them. Needs
Linux (/proc), and four times the weights' bytes on the disk.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch  # noqa: F401 else its import would count as part of a conversion
import tyro

from jax_transformer import TransformerConfig, init_params
from jax_transformer.convert.families import get_family
from jax_transformer.convert.families.family import config_from_json
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.storage import weights as files
from jax_transformer.storage.weights.shards import weight_names
from jax_transformer.tokenizers import READERS, Tokenizer
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel

_BART_LARGE = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
    "activation_function": "relu",
    "scale_embedding": True,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
# The keys of config.json that give a model its shape.
MODELS: dict[str, dict[str, Any]] = {
    "nllb-200-distilled-600M": _BART_LARGE | {"model_type": "m2m_100", "vocab_size": 256_206},
    "mbart-large-50": _BART_LARGE | {"model_type": "mbart", "vocab_size": 250_054},
    "flan-t5-large": {
        "model_type": "t5",
        "vocab_size": 32_128,
        "d_model": 1024,
        "d_kv": 64,
        "num_heads": 16,
        "d_ff": 2816,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
}


def memory(field: str) -> int:
    """Return a memory figure of this process in bytes: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def shape_of(model: str) -> tuple[str, TransformerConfig]:
    """Return family and config of "opus-mt", of a name of `MODELS` or of a config.json."""
    if model == "opus-mt":
        return "marian", TransformerConfig.preset("marian")
    values = MODELS[model] if model in MODELS else json.loads(Path(model).read_text("utf-8"))
    family = get_family(values["model_type"])
    return family.model_type, config_from_json(family, values)


def tokenizer_of(config: TransformerConfig) -> Tokenizer:
    """Return a tokenizer of as many words as the model has: a model folder wants one."""
    vocabulary = {f"w{index}": index for index in range(config.src_vocab_size)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w3"}
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
    content = {"version": "1.0", "added_tokens": [], "model": model, **dict.fromkeys(names)}
    settings = {name: getattr(config, name) for name in ("pad_id", "bos_id", "eos_id")}
    files = {"tokenizer.json": json.dumps(content).encode()}
    return READERS["tokenizer_json"](files, settings | {"unk_id": 3}, "benchmark")


def write_huggingface(folder: Path, model: str, dtype: str) -> Callable[[], Any]:
    """Return the call that writes random parameters as a Hugging Face folder."""
    family, config = shape_of(model)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return random.standard_normal(leaf.shape, np.float32).astype(kind, copy=False)

    params = jax.tree.map(draw, shapes)
    return lambda: to_huggingface(params, config, folder / "model", family=family)


def huggingface_to_own(folder: Path, model: str, dtype: str) -> Callable[[], Any]:
    """Return the call that reads a Hugging Face folder and writes a folder of this library."""
    tokenizer = tokenizer_of(shape_of(model)[1])

    def convert() -> None:
        config, params = from_huggingface(folder / "model")
        model_folder.write(folder / "own", TrainedModel(config, params, tokenizer))

    return convert


def own_to_huggingface(folder: Path, model: str, dtype: str) -> Callable[[], Any]:
    """Return the call that reads a folder of this library and writes a Hugging Face folder."""

    def convert() -> None:
        loaded = model_folder.load(folder / "own")
        to_huggingface(loaded.params, loaded.config, folder / "back", family=shape_of(model)[0])

    return convert


def read_safetensors(folder: Path, model: str, dtype: str) -> Callable[[], Any]:
    """Return the call that reads model.safetensors."""
    return lambda: from_huggingface(folder / "model")


def read_bin(folder: Path, model: str, dtype: str) -> Callable[[], Any]:
    """Return the call that reads pytorch_model.bin."""
    return lambda: from_huggingface(folder / "old")


def measure(
    prepare: Callable[[Path, str, str], Callable[[], Any]], folder: Path, model: str, dtype: str
) -> tuple[float, int, int]:
    """Return seconds, and the peak of the first call there is: above the imports, and in all."""
    jnp.zeros(1).block_until_ready()
    imported = memory("VmRSS")
    call = prepare(folder, model, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    call()
    peak = memory("VmHWM")
    return time.perf_counter() - start, peak - imported, peak


STEPS = (
    write_huggingface,
    read_safetensors,
    huggingface_to_own,
    own_to_huggingface,
    read_bin,
)


def main(
    model: tyro.conf.Positional[str] = "opus-mt",
    /,
    dtype: Literal["float32", "bfloat16"] = "float32",
    folder: Path | None = None,
) -> None:
    """Print a row for each conversion, each measured in a process of its own.

    Args:
        model: "opus-mt", a name of MODELS in this file, or the path of a config.json of a family.
        dtype: Type of the weights.
        folder: Where the files are written for the time of the run; if None, the system's folder.
    """
    print(f"{f'{model}, {dtype}':40}seconds   peak / bytes of the weights   with the imports")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        for prepare in STEPS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, above, peak = pool.apply(measure, (prepare, place, model, dtype))
            home = place / "model"
            size = sum((home / name).stat().st_size for name in weight_names(home))
            row = f"{prepare.__name__:40}{seconds:7.2f}{above / size:30.2f}{peak / size:19.2f}"
            print(row, flush=True)
            if prepare is own_to_huggingface:
                (place / "old").mkdir()
                (home / "config.json").rename(place / "old" / "config.json")
                weights = files.read(home / "model.safetensors")
                files.write(place / "old" / "pytorch_model.bin", weights)
    print(f"{size / 1e9:.2f} GB of weights", file=sys.stderr)


if __name__ == "__main__":
    tyro.cli(main)
