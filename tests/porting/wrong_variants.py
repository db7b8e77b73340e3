"""Eight ways to be wrong about a model, none of which its names and shapes can show.

The right model is the pre-norm model of `tests.convert.foreign` whose decoder norms the memory,
run as its own code runs it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.convert.foreign import PreNormMemoryNorm, randomized
from tests.convert.tools import target_masks
from tests.models import small_config

LAYOUT = "pre_norm_memory_norm"  # of the weights, right or wrong
FIRST = "encoder.layers.0"


class Variant(NamedTuple):
    """One fault.

    Attributes:
        block: The first block that differs.
        cause: What the explanation must name.
        fields: Fields of the config that are wrong.
        rename: Returns the name under which the wrong weights hold a tensor.
        transposed: Name of a square tensor that the wrong weights hold transposed.
    """

    block: str
    cause: str
    fields: dict[str, object] = {}  # noqa: RUF012
    rename: Callable[[str], str] = str
    transposed: str = ""


def exchange(one: str, other: str) -> Callable[[str], str]:
    """Return the function that exchanges two parts of names."""

    def rename(name: str) -> str:
        return name.replace(one, "\0").replace(other, one).replace("\0", other)

    return rename


ATTENTION = f"{FIRST}.self_attention"
NORM = f"{FIRST}.self_attention_residual.norm"
CROSS = "decoder.layers.0.cross_attention"
KEY = "decoder.layers.0.encoder_attention.W_k.weight"
WRONG = {
    "query and value": Variant(ATTENTION, "query and value", rename=exchange("W_q", "W_v")),
    "query and value of one layer": Variant(
        "encoder.layers.1.self_attention",
        "query and value of the attentions of encoder/layers_1",
        rename=exchange(
            "encoder.layers.1.self_attention.W_q", "encoder.layers.1.self_attention.W_v"
        ),
    ),
    "transposed": Variant(CROSS, KEY, transposed=KEY),
    "layers": Variant(
        NORM,
        "layers_0 and layers_1 of the encoder",
        rename=exchange("encoder.layers.0.", "encoder.layers.1."),
    ),
    "heads": Variant(ATTENTION, "num_heads=3", {"num_heads": 6}),
    "epsilon": Variant(NORM, "norm_epsilon=1e-05", {"norm_epsilon": 1e-3}),
    "activation": Variant(f"{FIRST}.feed_forward", "activation='relu'", {"activation": "gelu"}),
    "norm": Variant(NORM, "norm='std_norm'", {"norm": "layer_norm"}),
    "placement": Variant(ATTENTION, "norm_placement='pre'", {"norm_placement": "post"}),
}


def right_config():
    """Return the config of the right model; its heads are 3, its epsilon 1e-5."""
    return small_config(LAYOUT, num_encoder_layers=2, num_decoder_layers=1)


class Program(PreNormMemoryNorm):
    """The right model, which makes its own masks."""

    def forward(self, src, tgt):
        """Return the logits of ids alone."""
        masks = target_masks(src.numpy(), tgt.numpy(), right_config().pad_id)
        return super().forward(src, tgt, *masks)


def program():
    """Return the right model with random weights."""
    return randomized(Program(right_config()))


def ragged(config):
    """Return ids of both sides [3, 7] and [3, 5], padded at the end."""
    random = np.random.default_rng(0)
    src = random.integers(3, config.src_vocab_size, (3, 7))
    tgt = random.integers(3, config.tgt_vocab_size, (3, 5))
    src[1, 4:] = src[2, 6:] = tgt[2, 3:] = config.pad_id
    return src, tgt


def mistaken(name, state_dict):
    """Return the wrong weights, by the names of `LAYOUT`, and the wrong config of a variant."""
    variant = WRONG[name]
    tensors = {variant.rename(key): tensor for key, tensor in state_dict.items()}
    if variant.transposed:
        tensors[variant.transposed] = tensors[variant.transposed].T.contiguous()
    return tensors, dataclasses.replace(right_config(), **variant.fields)
