"""A trained model as a folder that `torch_reference.load` reads, to translate and train in torch.

The folder is that of this library's own models, whose weights have the names and shapes of
`torch_reference`.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import torch

import torch_reference
from jax_transformer.convert.origin import Origin
from jax_transformer.decoding import GenerationConfig
from jax_transformer.export.proof import Proof, check_proof, float32, prove
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.translation.model_folder import TrainedModel, write


def export_torch(model: TrainedModel, folder: Path, origin: Origin | None = None) -> str:
    """Write the folder in float32, in which a Hugging Face folder becomes one of this library.

    Returns a line about the proof, see `check_proof`: greedy translations by both, with equal ids.

    Args:
        origin: Where the model comes from, for a way back to a Hugging Face folder.

    Raises:
        InputError: The folder cannot be written, or a translation differs. Nothing is written.
    """
    check_writable(folder)
    model = model._replace(params=jax.tree.map(float32, model.params))
    # The search of `torch_reference` is the plain one: it starts with BOS, and forces no token.
    proof = prove(model, GenerationConfig(model.config.max_length))
    with staged(folder) as staging:
        write(staging, model, origin)
        found = list(_translate(torch_reference.load(staging).eval(), proof))
        return check_proof(proof, found, folder, "torch_reference", exact=True)


@torch.no_grad()
def _translate(module: torch_reference.Transformer, proof: Proof) -> Iterator[list[int]]:
    config, src = module.config, torch.from_numpy(proof.src)
    if config.decoder_attention == "self_over_memory":  # a later token changes earlier logits
        found = torch_reference.generate(module, src, max_new_tokens=proof.max_new_tokens)
        for ids, length in zip(found.tokens[:, 0].tolist(), found.lengths[:, 0], strict=True):
            yield ids[:length]
        return
    # Greedy search would run the model once for each token. If it finds the expected translation,
    # that is the likeliest token after each of its prefixes, and one run tells them all.
    tgt = torch.full((len(src), proof.max_new_tokens), config.pad_id)
    tgt[:, 0] = config.bos_id
    for row, ids in zip(tgt, proof.translations, strict=True):
        row[1 : len(ids)] = torch.tensor(ids[:-1])
    logits = module(src, tgt)
    logits[..., config.pad_id] = -torch.inf  # padding is never generated
    for row, ids in zip(logits.argmax(dim=-1).tolist(), proof.translations, strict=True):
        yield row[: len(ids)]
