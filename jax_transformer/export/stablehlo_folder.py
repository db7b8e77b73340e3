"""A trained model as StableHLO: programs that jax runs where this library is not installed."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Int, Int32
from safetensors.numpy import load_file

from jax_transformer import __version__
from jax_transformer.decoding import GenerationConfig, decode_step, init_cache
from jax_transformer.decoding.cache import Cache
from jax_transformer.export.programs import export_programs, named
from jax_transformer.export.proof import Proof, check_proof, prove
from jax_transformer.export.readme import write_readme
from jax_transformer.model.checks import check_text
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
    defaults, greedily and with beams, and the parts of a search. Returns a line about the proof of
    each search, see `check_proof`: in float32 all ids must be equal.

    Args:
        beam_size: Hypotheses of the search with beams; None is the model's default, or 4 where
            that is greedy search.

    Raises:
        InputError: The model has no token embeddings or output projection; an option does not fit
            it; the folder cannot be written; or a translation differs. Nothing is written.
    """
    config = model.config
    check_text(config)
    own = model.generation_config()
    if beam_size is None:
        beam_size = own.beam_size if own.beam_size > 1 else BEAM_SIZE
    searches = {
        "greedy": dataclasses.replace(own, beam_size=1, num_hypotheses=1),
        "beam": dataclasses.replace(own, beam_size=beam_size),
    }
    for generation in searches.values():
        generation.check_model(config)
    check_writable(folder)
    # What is compiled in; `max_new_tokens` is an argument of the programs.
    usual = vars(GenerationConfig(own.max_new_tokens))
    shown = {
        name: {key: value for key, value in vars(generation).items() if value != usual[key]}
        for name, generation in searches.items()
    }
    bound = " `init_cache` needs S equal to T." if needs_equal_lengths(config) else ""
    if config.has_position_table:
        bound = f" S and T are at most {config.max_length}; jax refuses more.{bound}"
    exact = all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(model.params))
    lines = []
    with staged(folder) as staging:
        settings = write_readme(
            staging,
            model,
            "stablehlo_readme.md",
            (by_stablehlo, load, likeliest),
            {"is_compiled": True},
            version=__version__,
            jax_version=jax.__version__,
            searches=json.dumps(shown, indent=2),
            bound=bound,
        )
        weights.write(staging / WEIGHTS_FILE, named(model.params))
        for name, program in export_programs(model.params, config, searches).items():
            (staging / f"{name}{SUFFIX}").write_bytes(program.serialize())
        for name, generation in searches.items():
            proof = prove(model, generation)
            limits = np.full(len(proof.src), proof.max_new_tokens)
            found = by_stablehlo(staging, settings, name)(proof.src, limits)
            lines.append(f"{name}: {check_proof(proof, found, folder, f'{name}{SUFFIX}', exact)}")
        proof, found = _steps(model, staging, proof)
        check_proof(proof, found, folder, f"decode_step{SUFFIX}", exact)
    return "; ".join(lines)


def load(folder: Path, name: str) -> Callable:
    """Return a program, which jax compiles for each new set of sizes."""
    return jax.jit(jax.export.deserialize((folder / f"{name}.stablehlo").read_bytes()).call)


def by_stablehlo(folder: Path, settings: dict, name: str) -> Callable:
    """Return a search: the ids, EOS included, of sources [batch, length], within limits [batch]."""
    params, program = jax.device_put(load_file(folder / "model.safetensors")), load(folder, name)

    def search(src: np.ndarray, limits: np.ndarray) -> list[list[int]]:
        most = min(2 * src.shape[1] + settings["extra_tokens"], settings["max_new_tokens"])
        prefix = np.full((len(src), most), settings["pad_id"], np.int32)
        found = program(params, np.int32(src), prefix, np.int32(limits))
        tokens, _, lengths = jax.device_get(found)
        rows = zip(tokens[:, 0].tolist(), lengths[:, 0], strict=True)
        return [ids[:length] for ids, length in rows]

    return search


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


def _steps(model: TrainedModel, folder: Path, proof: Proof) -> tuple[Proof, list[list[int]]]:
    """Return the likeliest token after each token of a proof's translations, by both.

    The tokens are given, because a search follows its options as well.
    """
    config, src, most = model.config, proof.src, proof.max_new_tokens
    if needs_equal_lengths(config):
        src = np.pad(src, ((0, 0), (0, max(0, most - src.shape[1]))), constant_values=config.pad_id)
        most = src.shape[1]
    tgt = np.full((len(src), most), config.pad_id, np.int32)
    tgt[:, 0] = model.generation.get("start_token", config.bos_id)
    for row, ids in zip(tgt, proof.translations, strict=True):
        row[1 : 1 + len(ids)] = ids[: most - 1]
    memory = encode(model.params, config, src)
    mask = (src != config.pad_id)[:, None, None]

    def step(cache: Cache, tokens: Int32[Array, " B"]) -> tuple[Cache, Int[Array, " B"]]:
        logits, cache = decode_step(model.params, config, cache, tokens)
        return cache, logits.argmax(-1)

    _, found = jax.lax.scan(step, init_cache(model.params, config, memory, most, mask), tgt.T)
    ours, theirs = (
        [row[: len(ids)].tolist() for row, ids in zip(rows, proof.translations, strict=True)]
        for rows in (np.asarray(found).T, likeliest(folder, src, tgt))
    )
    return Proof(src, most, ours), theirs
