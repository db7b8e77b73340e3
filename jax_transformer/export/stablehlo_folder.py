"""A trained model as StableHLO: programs that jax runs where this library is not installed."""

import json
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Int, Int32
from safetensors.numpy import load_file

from jax_transformer import __version__
from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import GenerationConfig, decode_step, init_cache
from jax_transformer.decoding.cache import Cache
from jax_transformer.export.programs import export_programs, named
from jax_transformer.export.proof import Proof, check_proof, prove
from jax_transformer.export.readme import write_readme
from jax_transformer.export.shown_stablehlo import likeliest, load, translate
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
    # The number of tokens is an argument.
    compiled_in = {
        name: {key: value for key, value in options.items() if key != "max_new_tokens"}
        for name, options in searches.items()
    }
    exact = all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(model.params))
    lines = []
    with staged(folder) as staging:
        write_readme(
            staging,
            model,
            "stablehlo_readme.md",
            (load, translate, likeliest),
            {"searches": compiled_in},
            version=__version__,
            jax_version=jax.__version__,
            searches=json.dumps(compiled_in, indent=2),
            bound=_bound(config),
        )
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


def _bound(config: TransformerConfig) -> str:
    """Return a sentence about the lengths that the programs take."""
    bounds = []
    if config.has_position_table:
        bounds.append(f" S and T are at most {config.max_length}; jax refuses more.")
    if needs_equal_lengths(config):
        bounds.append(" `init_cache` needs S equal to T.")
    return "".join(bounds)


def _translate(folder: Path, search: str, proof: Proof, pad_id: int) -> list[list[int]]:
    """Return what a search makes of the sources of a proof, as token ids."""
    batch, most = len(proof.src), proof.max_new_tokens
    prefix = np.full((batch, most), pad_id, np.int32)
    limits = np.full(batch, most, np.int32)
    params = load_file(folder / WEIGHTS_FILE)
    tokens, _, lengths = jax.device_get(load(folder, search)(params, proof.src, prefix, limits))
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
