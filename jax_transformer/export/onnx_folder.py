"""A trained model as a folder of ONNX: two programs, a tokenizer, and a README that runs them.

The programs, an encoder and a decoder step with its cache, are the blocks of `torch_reference`,
which PyTorch writes with the batch and all lengths left open. Letters in shapes: B batch, S source
length, P target positions in the cache, D d_model, H heads, K head_dim, V target vocabulary.
"""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import to_torch
from jax_transformer.export.proof import (
    check_expressible,
    check_proof,
    float32,
    greedy_search,
    prove,
)
from jax_transformer.export.readme import write_readme
from jax_transformer.model.functional import sinusoids_of
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.translation.model_folder import TrainedModel
from torch_reference import Transformer, masks
from torch_reference.layers import AttentionCache, LayerCache, RelativeAttentionBias

# What the programs cannot express: a field, and the only values that they can.
EXPRESSIBLE: Mapping[str, tuple[Any, ...]] = {
    "decoder_attention": ("self_then_cross",),
    "token_embeddings": ("separate", "shared"),
    "output_projection": ("linear", "tied"),
    "source_features": (None,),
}

Heads = Float[Tensor, "B H _ K"]


def export_onnx(model: TrainedModel, folder: Path) -> str:
    """Write a folder of ONNX programs in float32, which the code in its README runs.

    Returns a line about the proof, see `check_proof`: greedy translations by both, with equal ids.

    Raises:
        InputError: The programs cannot express a field of the config; the tokenizer is of two
            libraries; the folder cannot be written; or a translation differs. Nothing is written.
    """
    config = model.config
    check_expressible(config, EXPRESSIBLE, "an ONNX export")
    check_writable(folder)
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

    def search(src: np.ndarray, limits: np.ndarray) -> list[list[int]]:
        memory, targets = encoder.run(None, {"src": src}), [[] for _ in src]
        cache = [np.zeros_like(heads[:, :, :0]) for heads in memory[1:]]  # no target yet
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


def write_programs(config: TransformerConfig, params: Mapping[str, Any], folder: Path) -> None:
    """Write both programs, with the parameters in files beside them."""
    model = _with_tables(config, params)
    layers = range(config.num_decoder_layers)
    names = [f"{kind}_{number}" for number in layers for kind in ("keys", "values")]
    memory, cache = ([f"{of}_{name}" for name in names] for of in ("memory", "cache"))
    encoder, step = Encoder(model).eval(), DecoderStep(model).eval()
    # PyTorch traces examples: lengths that are equal in them would be one length in the program.
    src, target = (torch.ones((2, length), dtype=torch.int64) for length in (5, 3))
    with torch.no_grad():
        (src_mask, kept), (_, past) = encoder(src), encoder(target)
    _write_program(
        folder / "encoder.onnx",
        encoder,
        (src,),
        ({0: "batch", 1: "source"},),
        input_names=["src"],
        output_names=["src_mask", *memory],
    )
    of_source, of_target = ([{0: "batch", 2: side}] * len(names) for side in ("source", "target"))
    _write_program(
        folder / "decoder.onnx",
        step,
        (src[:, 0], src_mask, kept, past),
        ({0: "batch"}, {0: "batch", 3: "source"}, of_source, of_target),
        input_names=["tokens", "src_mask", *memory, *cache],
        output_names=["logits", *(f"new_{name}" for name in cache)],
    )


class Encoder(nn.Module):
    """Sources to the mask of their padding, and each decoder layer's keys and values of them."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Int[Tensor, "B S"]) -> tuple[Bool[Tensor, "B 1 1 S"], list[Heads]]:
        """Return the mask, and keys and values of every layer in turn."""
        src_mask = masks.source_mask(src, self.model.config)
        cache = self.model.decoder.init_cache(self.model.encode(src, src_mask), src_mask)
        return src_mask, [heads for layer in cache for heads in layer.cross_attention]


class DecoderStep(nn.Module):
    """One token of each target to the logits of the next one."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Int[Tensor, " B"],
        src_mask: Bool[Tensor, "B 1 1 S"],
        memory: list[Heads],
        cache: list[Heads],
    ) -> tuple[Float[Tensor, "B V"], list[Heads]]:
        """Return the logits, and the cache with this position written.

        Args:
            memory: What the encoder returns: keys and values [B, H, S, K] of every layer in turn.
            cache: Keys and values [B, H, P, K] of the target so far, in the same order.
        """
        targets = map(AttentionCache, cache[::2], cache[1::2])
        sources = map(AttentionCache, memory[::2], memory[1::2])
        layers = [*map(LayerCache, targets, sources)]
        logits, layers = self.model.step(tokens, layers, src_mask)
        return logits, [heads for layer in layers for heads in layer.self_attention]


class BiasTable(RelativeAttentionBias):
    """A relative bias whose buckets are a table: a logarithm of another library may round apart."""

    def __init__(self, bias: RelativeAttentionBias) -> None:
        super().__init__(bias.config, bias.bidirectional)
        # From this distance on, all distances of a side share a bucket.
        self.furthest = bias.config.relative_attention_max_distance
        distances = torch.arange(-self.furthest, self.furthest + 1)
        self.register_buffer("table", bias.by_distance(distances).detach())

    def by_distance(self, distance: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape H"]:
        """Return the biases of distances, each a key's position minus a query's."""
        return self.table[distance.clamp(-self.furthest, self.furthest) + self.furthest]


def _with_tables(config: TransformerConfig, params: Mapping[str, Any]) -> Transformer:
    """Return the model in PyTorch; what is computed from positions alone is a table in it."""
    if config.has_position_table and config.positions != "learned":
        params = dict(params)
        for side, stack in (("source", "encoder"), ("target", "decoder")):
            table = sinusoids_of(config, config.max_length, config.stack(stack).d_model)
            params[f"{side}_positions"] = {"embedding": table.astype(np.float32)}
        config = dataclasses.replace(
            config, positions="learned", position_offset=0, position_rounding="none"
        )
    model = Transformer(config).eval()
    model.load_state_dict(to_torch(params, config))
    for name, module in [*model.named_modules()]:
        if isinstance(module, RelativeAttentionBias):
            model.set_submodule(name, BiasTable(module))
    return model


def _write_program(
    path: Path, program: nn.Module, examples: tuple, shapes: tuple, **names: list[str]
) -> None:
    logger = logging.getLogger("torch.onnx")  # tells PyTorch's own developers
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            exported = torch.onnx.export(
                program, examples, dynamic_shapes=shapes, dynamo=True, verbose=False, **names
            )
    finally:
        logger.setLevel(level)
    for node in exported.model.graph.all_nodes():
        node.metadata_props.clear()  # where in this machine's files a node comes from
    exported.save(path, external_data=True)  # one file has at most 2 GiB
