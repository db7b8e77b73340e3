"""A trained model as a folder of ONNX: two programs, a tokenizer, and a README that runs them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime

from jax_transformer.export.onnx_programs import write_programs
from jax_transformer.export.proof import (
    check_expressible,
    check_proof,
    float32,
    greedy_search,
    prove,
)
from jax_transformer.export.readme import README, write_readme
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.translation.model_folder import TrainedModel

# What the programs cannot express: a field, and the only values that they can.
EXPRESSIBLE: Mapping[str, tuple[Any, ...]] = {
    "decoder_attention": ("self_then_cross",),
    "token_embeddings": ("separate", "shared"),
    "output_projection": ("linear", "tied"),
}


def export_onnx(model: TrainedModel, folder: Path) -> str:
    """Write a folder of ONNX programs in float32, which the code in its README runs.

    Returns a line about the proof, see `check_proof`: greedy translations by both, with equal ids.

    Raises:
        InputError: The programs cannot express a field of the config; the tokenizer is of two
            libraries; the folder cannot be written; or a translation differs. Nothing is written.
    """
    config = model.config
    check_expressible(config, EXPRESSIBLE, "an ONNX export")
    check_writable(folder, [README])
    generation, params = greedy_search(model), jax.tree.map(float32, model.params)
    settings = {
        "start_token": model.generation.get("start_token", config.bos_id),
        "forced_first_token": generation.forced_first_token,
        "eos_id": config.eos_id,
        "is_compiled": False,
    }
    proof = prove(model._replace(params=params), generation)
    with staged(folder) as staging:
        functions = [by_onnxruntime]
        settings = write_readme(staging, model, "onnx_readme.md", functions, settings)
        write_programs(config, params, staging)
        limits = np.full(len(proof.src), proof.max_new_tokens)
        found = by_onnxruntime(staging, settings)(proof.src.astype(np.int64), limits)
        return check_proof(proof, found, folder, "ONNX Runtime", exact=True)


def by_onnxruntime(folder: Path, settings: dict) -> Callable:
    """Return a greedy search: the ids, EOS included, of sources [batch, length], within limits."""
    names = ("encoder", "decoder")
    encoder, decoder = (onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in names)
    inputs = decoder.get_inputs()
    _, heads, _, width = inputs[-1].shape

    def search(src: np.ndarray, limits: np.ndarray) -> list[list[int]]:
        memory, targets = encoder.run(None, {"src": src}), [[] for _ in src]
        empty = np.zeros((len(src), heads, 0, width), np.float32)
        cache = [empty] * (len(inputs) - 1 - len(memory))
        tokens, running = np.full(len(src), settings["start_token"]), np.full(len(src), True)
        while running.any():
            values = {x.name: v for x, v in zip(inputs, [tokens, *memory, *cache], strict=True)}
            logits, *cache = decoder.run(None, values)
            logits[:, settings["pad_id"]] = -np.inf
            tokens = logits.argmax(axis=1)
            if not any(targets) and settings["forced_first_token"] is not None:
                tokens[:] = settings["forced_first_token"]
            for row in np.flatnonzero(running):
                targets[row].append(int(tokens[row]))
                running[row] = tokens[row] != settings["eos_id"] and len(targets[row]) < limits[row]
        return targets

    return search
