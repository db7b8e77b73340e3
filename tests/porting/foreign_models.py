"""The list of foreign models, with what is true of each.

Twelve can be expressed by a config and a layout; three cannot. `build` returns a module whose
`forward(src, tgt)` takes ids [B, S] and [B, T] and makes its own masks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from jax_transformer import TransformerConfig
from tests.convert.foreign import randomized
from tests.porting.fused_models import FusedColumns, FusedHeads, FusedRows, KeysBeforeQueries
from tests.porting.outside_models import Outside
from tests.porting.separate_models import Clones, Kernels, Letters, MeanFree
from tests.porting.wrapped_models import NormInside, SequenceFirst, UnnormedDecoder, Wrapped


class ForeignModel(NamedTuple):
    """A foreign model and what is true of it.

    Attributes:
        build: Returns the module, freshly drawn.
        expected: Fields of TransformerConfig that its weights or its logits decide; the others
            have their defaults, or make no difference. Empty for a model outside the configs.
        pad_id: Id of padding.
        masks: The padding that is masked: "both" sides, the "source" alone, or "none".
        output: What the first output is: "logits" or "log_softmax".
    """

    build: Callable[[], nn.Module]
    expected: dict[str, Any]
    pad_id: int = 0
    masks: str = "both"
    output: str = "logits"

    def module(self, seed=0):
        """Return the module without dropout, no parameter at its starting value."""
        return randomized(self.build(), seed).eval()

    def config(self):
        """Return the whole config of a model that has one."""
        special_ids = {"pad_id": self.pad_id, "bos_id": 1 - self.pad_id}
        return TransformerConfig(**self.expected, **special_ids)


def sizes(source, target, d_model, num_heads, d_ff, encoder, decoder):
    """Return the fields that give the sizes."""
    names = ("src_vocab_size", "tgt_vocab_size", "d_model", "num_heads", "d_ff")
    layers = {"num_encoder_layers": encoder, "num_decoder_layers": decoder}
    lengths = (source, target, d_model, num_heads, d_ff)
    return dict(zip(names, lengths, strict=True)) | layers


PRE_NORM = {"norm_placement": "pre", "final_norm": True}
UNSCALED_LEARNED = {"embedding_scale": "none", "positions": "learned"}
NO_PROJECTION_BIAS = {"qkv_bias": False, "attention_output_bias": False}
NO_LAYER_BIAS = NO_PROJECTION_BIAS | {"feed_forward_bias": False, "norm_bias": False}
SHARED = {"token_embeddings": "shared", "output_projection": "tied", "output_bias": False}

MODELS: dict[str, ForeignModel] = {
    "fused_rows": ForeignModel(
        FusedRows,
        sizes(53, 53, 32, 4, 128, 3, 2)
        | (PRE_NORM | SHARED | UNSCALED_LEARNED | NO_LAYER_BIAS)
        | {"max_length": 23, "activation": "gelu"},
        masks="source",
    ),
    "keys_before_queries": ForeignModel(
        KeysBeforeQueries,
        sizes(41, 41, 20, 5, 36, 2, 3)
        | {"max_length": 31, "positions": "sinusoidal_halves", "norm_epsilon": 1e-6},
        pad_id=1,
    ),
    "fused_columns": ForeignModel(
        FusedColumns,
        sizes(37, 43, 36, 3, 60, 2, 2)
        | (PRE_NORM | UNSCALED_LEARNED)
        | {"max_length": 17, "output_projection": "tied", "output_bias": False}
        | {"activation": "gelu_tanh"},
        masks="none",
    ),
    "fused_heads": ForeignModel(FusedHeads, sizes(43, 47, 28, 7, 44, 2, 2)),
    "clones": ForeignModel(
        Clones,
        sizes(31, 37, 24, 4, 40, 3, 3)
        | PRE_NORM
        | {"max_length": 50, "norm": "std_norm", "norm_epsilon": 1e-6},
        output="log_softmax",
    ),
    "mean_free": ForeignModel(
        MeanFree,
        sizes(33, 51, 24, 3, 44, 2, 3)
        | (PRE_NORM | NO_LAYER_BIAS)
        | {"embedding_scale": "none", "output_bias": False}
        | {"gated_feed_forward": True, "activation": "silu"}
        | {"norm": "rms_norm", "norm_epsilon": 1e-6},
    ),
    "kernels": ForeignModel(
        Kernels,
        sizes(31, 31, 16, 4, 48, 2, 2)
        | (UNSCALED_LEARNED | NO_PROJECTION_BIAS)
        | {"max_length": 19, "embedding_norm": True, "activation": "gelu", "norm_epsilon": 1e-12},
    ),
    "letters": ForeignModel(
        Letters,
        sizes(59, 67, 42, 6, 50, 3, 2)
        | {"positions": "none", "qkv_bias": False, "activation": "silu"}
        | {"norm_placement": "pre", "norm_epsilon": 1e-3, "memory_norm": True},
    ),
    "unnormed_decoder": ForeignModel(
        UnnormedDecoder,
        sizes(37, 61, 30, 6, 30, 2, 3)
        | PRE_NORM
        | {"max_length": 27, "output_bias": False, "activation": "gelu"}
        | {"decoder_final_norm": False},
        pad_id=1,
    ),
    "sequence_first": ForeignModel(
        SequenceFirst,
        sizes(39, 45, 22, 2, 34, 3, 2) | {"max_length": 34},
    ),
    "norm_inside": ForeignModel(
        NormInside,
        sizes(57, 57, 40, 2, 62, 2, 2)
        | (SHARED | NO_PROJECTION_BIAS)
        | {"max_length": 44, "embedding_scale": "none", "embedding_norm": True}
        | {"output_scale": "inverse_sqrt_d_model", "norm_epsilon": 1e-6},
    ),
    "wrapped": ForeignModel(
        Wrapped,
        sizes(35, 49, 26, 3, 38, 2, 2)
        | (PRE_NORM | UNSCALED_LEARNED)
        | {"d_kv": 8, "max_length": 21, "qkv_bias": False}
        | {"gated_feed_forward": True, "activation": "gelu"},
        masks="source",
    ),
}

OUTSIDE: dict[str, ForeignModel] = {
    kind: ForeignModel(partial(Outside, kind), {})
    for kind in ("rotary", "convolution", "linear_bias")
}


def random_ids(model, batch=3, source=7, target=5, seed=0):
    """Return int64 ids [B, S] and [B, T] whose rows end in 0, 1, 2, ... tokens of padding.

    The vocabularies are those of the module's tables, so it works for every model.
    """
    source_size, target_size = vocabularies(model)
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for size, length in ((source_size, source), (target_size, target)):
        tokens = torch.randint(2, size, (batch, length), generator=generator)
        for row in range(1, batch):
            tokens[row, max(1, length - row) :] = model.pad_id
        ids.append(tokens)
    return tuple(ids)


def vocabularies(model):
    """Return the numbers of source and target ids."""
    if not model.expected:
        return 37, 43
    return model.expected["src_vocab_size"], model.expected["tgt_vocab_size"]
