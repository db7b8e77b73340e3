"""A trained model as a folder of ONNX: two programs, a tokenizer, and a README that runs them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime

from jax_transformer.export.onnx_programs import DECODER, ENCODER, write_programs
from jax_transformer.export.proof import START_OPTIONS, check_expressible, check_proof, prove
from jax_transformer.export.readme import README, write_readme
from jax_transformer.export.shown_onnx import greedy, translate
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.translation.model_folder import TrainedModel

PROGRAMS = [ENCODER, DECODER]
# What the programs cannot express: a field, and the only values that they can.
EXPRESSIBLE: Mapping[str, tuple[Any, ...]] = {
    "decoder_attention": ("self_then_cross",),
    "token_embeddings": ("separate", "shared"),
    "output_projection": ("linear", "tied"),
}


def export_onnx(model: TrainedModel, folder: Path) -> str:
    """Write a folder of ONNX programs in float32, which the code in its README runs.

    Random sources are translated greedily by both. All ids must be equal.

    Returns:
        A line that says how many translations are equal.

    Raises:
        InputError: A field of the config has a value that the programs cannot express (names it);
            the tokenizer is of two libraries; the folder cannot be written; or a translation
            differs. Nothing is written then.
    """
    config = model.config
    check_expressible(config, EXPRESSIBLE, "an ONNX export")
    check_writable(folder, [README])
    settings = {"start_token": config.bos_id, "forced_first_token": None}
    settings |= {name: model.generation[name] for name in START_OPTIONS if name in model.generation}
    settings |= {"programs": PROGRAMS, "eos_id": config.eos_id}
    params = jax.tree.map(lambda leaf: np.array(leaf, np.float32), model.params)
    proof = prove(model._replace(params=params))
    with staged(folder) as staging:
        shown = greedy, translate
        settings = write_readme(staging, model, "onnx_readme.md", shown, settings)
        write_programs(config, params, staging)
        programs = [onnxruntime.InferenceSession(staging / name) for name in PROGRAMS]
        limits = np.full(len(proof.src), proof.max_new_tokens)
        found = greedy(programs, settings, proof.src.astype(np.int64), limits)
        return check_proof(proof, found, folder, "ONNX Runtime", exact=True)
