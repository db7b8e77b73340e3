"""A trained model as StableHLO: programs that jax runs where this library is not installed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32
from safetensors.numpy import load_file

from jax_transformer.decoding import GenerationConfig, decode_step, init_cache
from jax_transformer.export.programs import export_programs, named
from jax_transformer.export.proof import Proof, check_proof, prove
from jax_transformer.export.stablehlo_readme import write_readme
from jax_transformer.model.checks import check_generates
from jax_transformer.model.self_over_memory import needs_equal_lengths
from jax_transformer.model.transformer import encode
from jax_transformer.storage import weights
from jax_transformer.storage.folder import WEIGHTS_FILE, check_writable, staged
from jax_transformer.translation.model_folder import TrainedModel

BEAM_SIZE = 4  # of a model whose own default is greedy search (Vaswani et al. 2017)
SUFFIX = ".stablehlo"


def export_stablehlo(model: TrainedModel, folder: Path, beam_size: int | None = None) -> str:
    """Write programs for CPUs, GPUs and TPUs, the parameters, the tokenizer, and a README.

    The programs are those of `export_programs`: two whole searches with the model's generation
    defaults, greedily and with beams, and the parts of a search. Random sources go through each of
    them and through this library; in float32 all ids must be equal.

    Args:
        beam_size: Hypotheses of the search with beams; None is the model's default, or 4 where
            that is greedy search.

    Returns:
        A line that says how many translations of each search are equal.

    Raises:
        InputError: The model has no token embeddings or output projection; an option does not fit
            it; the language of the sources is not known; the folder cannot be written; or a
            translation differs. Nothing is written then.
    """
    config = model.config
    check_generates(config)
    if beam_size is None:
        own = model.generation.get("beam_size", 1)
        beam_size = own if own > 1 else BEAM_SIZE
    defaults = {"max_new_tokens": config.max_length, **model.generation}
    searches = {
        "greedy": {**defaults, "beam_size": 1, "num_hypotheses": 1},
        "beam": {**defaults, "beam_size": beam_size},
    }
    for options in searches.values():
        GenerationConfig(**options).check_model(config)
    check_writable(folder, [f"decode_step{SUFFIX}"])
    exact = all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(model.params))
    lines = []
    with staged(folder) as staging:
        write_readme(staging, model, searches)
        weights.write(staging / WEIGHTS_FILE, named(model.params))
        for name, program in export_programs(model.params, config, searches).items():
            (staging / f"{name}{SUFFIX}").write_bytes(program.serialize())
        for name, options in searches.items():
            proof = prove(model, options)
            found = _translate(staging, name, proof, config.pad_id)
            lines.append(f"{name}: {check_proof(proof, found, folder, f'{name}{SUFFIX}', exact)}")
        proof, found = _steps(model, staging, proof)
        check_proof(proof, found, folder, f"decode_step{SUFFIX}", exact)
    return "; ".join(lines)


def _load(folder: Path, name: str) -> Callable[..., Any]:
    """Return a program as a process without this library has it."""
    return jax.jit(jax.export.deserialize((folder / f"{name}{SUFFIX}").read_bytes()).call)


def _translate(folder: Path, search: str, proof: Proof, pad_id: int) -> list[list[int]]:
    """Return what a search makes of the sources of a proof, as token ids."""
    batch, most = len(proof.src), proof.max_new_tokens
    prefix = np.full((batch, most), pad_id, np.int32)
    limits = np.full(batch, most, np.int32)
    params = load_file(folder / WEIGHTS_FILE)
    tokens, _, lengths = jax.device_get(_load(folder, search)(params, proof.src, prefix, limits))
    rows = zip(tokens[:, 0].tolist(), lengths[:, 0], strict=True)
    return [ids[:length] for ids, length in rows]


def _steps(model: TrainedModel, folder: Path, proof: Proof) -> tuple[Proof, list[list[int]]]:
    """Return the likeliest token after each token of a proof's translations, by both.

    The tokens are given, because a search follows its options as well.
    """
    config, src, most = model.config, proof.src, proof.max_new_tokens
    if needs_equal_lengths(config):
        src = np.pad(src, ((0, 0), (0, max(0, most - src.shape[1]))), constant_values=config.pad_id)
        most = src.shape[1]
    tokens = np.full((len(src), most), config.pad_id, np.int32)
    tokens[:, 0] = model.generation.get("start_token", config.bos_id)
    for row, ids in zip(tokens, proof.translations, strict=True):
        row[1 : 1 + len(ids)] = ids[: most - 1]
    mask = (src != config.pad_id)[:, None, None]
    here = {
        "encode": lambda params, src: encode(params, config, src),
        "init_cache": lambda params, _, memory, __: init_cache(params, config, memory, most, mask),
        "decode_step": lambda params, *given: decode_step(params, config, *given),
    }
    ours, theirs = (
        [
            row[: len(ids)].tolist()
            for row, ids in zip(_likeliest(*side, src, tokens), proof.translations, strict=True)
        ]
        for side in (
            (model.params, lambda name: jax.jit(here[name])),
            (load_file(folder / WEIGHTS_FILE), partial(_load, folder)),
        )
    )
    return Proof(src, most, ours), theirs


def _likeliest(
    params: Mapping[str, Any],
    load: Callable[[str], Callable[..., Any]],
    src: Int32[np.ndarray, "B S"],
    tokens: Int32[np.ndarray, "B T"],
) -> Int32[np.ndarray, "B T"]:
    """Return the likeliest token after each token, by the programs that are loaded by name."""
    ancestors = np.full((len(tokens), 1, tokens.shape[1]), -1, np.int32)
    memory = load("encode")(params, src)
    cache, step = load("init_cache")(params, src, memory, ancestors), load("decode_step")
    found = []
    for column in tokens.T:
        logits, cache = step(params, cache, column[:, None])
        found.append(np.asarray(logits)[:, 0].argmax(-1).astype(np.int32))
    return np.stack(found, axis=1)
