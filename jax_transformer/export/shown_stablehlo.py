"""Searches by programs of jax.export: functions that the README of a StableHLO export shows.

A README copies them. So they have plain types, and import nothing of this library.
"""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from jax_transformer.export.shown_text import as_sources, as_text


def load(folder: Path, name: str) -> Callable:
    """Return a program, which jax compiles for each new set of sizes."""
    return jax.jit(jax.export.deserialize((folder / f"{name}.stablehlo").read_bytes()).call)


def translate(folder: Path, search: str, lines: list[str], read_tokenizers: Callable) -> list[str]:
    """Return the translations of lines by a search, in batches of 64 lines of similar length."""
    settings = json.loads((folder / "settings.json").read_text("utf-8"))
    params, program = jax.device_put(load_file(folder / "model.safetensors")), load(folder, search)
    encode, decode = read_tokenizers(folder, settings)
    sources, texts = as_sources(lines, encode, settings), [""] * len(lines)
    order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: -len(sources[i]))
    for start in range(0, len(order), 64):
        members = order[start : start + 64]
        # Powers of two and always 64 rows: few sets of sizes are compiled.
        length = 1 << (max(8, len(sources[members[0]])) - 1).bit_length()
        src = np.full((64, min(length, settings["longest"])), settings["pad_id"], np.int32)
        for row, i in zip(src, members, strict=False):
            row[: len(sources[i])] = sources[i]
        usual = 2 * np.array([src.shape[1], *(src != settings["pad_id"]).sum(1)])
        most, *limits = np.minimum(usual + settings["extra_tokens"], settings["max_new_tokens"])
        prefix = np.full((64, most), settings["pad_id"], np.int32)
        tokens, _, lengths = jax.device_get(program(params, src, prefix, np.int32(limits)))
        for i, ids, count in zip(members, tokens[:, 0].tolist(), lengths[:, 0], strict=False):
            texts[i] = as_text(ids[:count], decode, settings)
    return texts


def likeliest(folder: Path, src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
    """Return the likeliest token after each token of targets [batch, length], step by step."""
    params = load_file(folder / "model.safetensors")
    programs = (load(folder, name) for name in ("encode", "init_cache", "decode_step"))
    encode, init_cache, decode_step = programs
    ancestors = np.full((len(tgt), 1, tgt.shape[1]), -1, np.int32)  # one hypothesis of each source
    cache, found = init_cache(params, src, encode(params, src), ancestors), []
    for tokens in tgt.T:
        logits, cache = decode_step(params, cache, tokens[:, None])
        found.append(np.asarray(logits)[:, 0].argmax(-1))
    return np.stack(found, axis=1)
