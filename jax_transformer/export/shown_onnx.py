"""A search by ONNX Runtime: functions that the README of an ONNX export shows.

A README copies them. So they have plain types, and import nothing of this library.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

from jax_transformer.export.shown_text import as_sources, as_text


def greedy(programs: list, settings: dict, src: np.ndarray, limits: np.ndarray) -> list[list]:
    """Return the likeliest ids of each source [batch, length], with EOS; at most limits [batch]."""
    encoder, decoder = programs
    memory, inputs = encoder.run(None, {"src": src}), decoder.get_inputs()
    _, heads, _, width = inputs[-1].shape
    cache = [np.zeros((len(src), heads, 0, width), np.float32)] * (len(inputs) - 1 - len(memory))
    tokens, targets = np.full(len(src), settings["start_token"]), [[] for _ in src]
    running = np.full(len(src), True)
    while running.any():
        values = [tokens, *memory, *cache]
        logits, *cache = decoder.run(None, {x.name: v for x, v in zip(inputs, values, strict=True)})
        logits[:, settings["pad_id"]] = -np.inf
        tokens = logits.argmax(axis=1)
        if not any(targets) and settings["forced_first_token"] is not None:
            tokens[:] = settings["forced_first_token"]
        for row in np.flatnonzero(running):
            targets[row].append(int(tokens[row]))
            running[row] = tokens[row] != settings["eos_id"] and len(targets[row]) < limits[row]
    return targets


def translate(folder: Path, lines: list[str], read_tokenizers: Callable) -> list[str]:
    """Return the translations of lines, in batches of 64 lines of similar length."""
    settings = json.loads((folder / "settings.json").read_text("utf-8"))
    programs = [onnxruntime.InferenceSession(folder / name) for name in settings["programs"]]
    encode, decode = read_tokenizers(folder, settings)
    sources, texts = as_sources(lines, encode, settings), [""] * len(lines)
    order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: -len(sources[i]))
    for start in range(0, len(order), 64):
        members = order[start : start + 64]
        lengths = np.array([len(sources[i]) for i in members])
        src = np.full((len(members), lengths.max()), settings["pad_id"])
        for row, i in zip(src, members, strict=True):
            row[: len(sources[i])] = sources[i]
        limits = np.minimum(2 * lengths + settings["extra_tokens"], settings["max_new_tokens"])
        for i, ids in zip(members, greedy(programs, settings, src, limits), strict=True):
            texts[i] = as_text(ids, decode, settings)
    return texts
