"""What BART, Marian, Pegasus, M2M100 and others share: names of weights, most of config.json."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.families.family import (
    ACTIVATIONS,
    ENCODER_DECODER,
    Family,
    flag,
    generation,
)
from jax_transformer.convert.layouts.torch_nn import layer_rows, norm
from jax_transformer.convert.table import Buffer, Layout, Operation, Row, transpose
from jax_transformer.model.tree import STACKS

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
SINUSOIDS = PositionTable(("length", "d_model"))
FIELDS: Mapping[str, str | tuple[str, ...]] = {
    "d_model": "d_model",
    "encoder_attention_heads": "num_heads",
    "decoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "d_ff",
    "decoder_ffn_dim": "d_ff",
    "encoder_layers": "num_encoder_layers",
    "decoder_layers": "num_decoder_layers",
    "max_position_embeddings": "max_length",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "pad_token_id": "pad_id",
    "decoder_start_token_id": "bos_id",
    "eos_token_id": "eos_id",
}
WORDS: Mapping[str, Mapping[Any, Mapping[str, Any]]] = {
    "activation_function": ACTIVATIONS,
    "scale_embedding": flag("embedding_scale", "sqrt_d_model", "none"),
}
FIXED: Mapping[str, tuple[Any, ...]] = ENCODER_DECODER | {"tie_word_embeddings": (True,)}
# Layerdrop skips whole layers in training, by chance.
TRAINING_ONLY: Mapping[str, float] = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
# Without a start id, mBART and PLBart generate from BOS. In training, transformers moves the last
# token of a target to its front: the whole target is then CODE, text, EOS, CODE, whose first token
# is the config's `bos_id`.
START_FROM_BOS = {"decoder_start_token_id": lambda values: values.get("bos_token_id")}


def sizes(layers: int, heads: int, d_ff: int) -> dict[str, int]:
    """Return the keys of config.json for stacks of equal sizes."""
    keys = {"layers": layers, "attention_heads": heads, "ffn_dim": d_ff}
    return {f"{stack}_{key}": size for stack in STACKS for key, size in keys.items()}


# What an absent key means in most classes of configurations.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_265,
    "d_model": 1024,
    **sizes(12, 16, 4096),
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


def family(
    model_type: str, architecture: str, preset: str, *, defaults: Mapping[str, Any], **others: Any
) -> Family:
    """Return a family with one table of tokens; the arguments replace the usual attributes."""
    usual = {
        "layout": layout(model_type),
        "generation": generation,
        "fields": {"vocab_size": ("src_vocab_size", "tgt_vocab_size"), **FIELDS},
        "words": WORDS,
        "fixed": FIXED,
        "training_only": TRAINING_ONLY,
        "full_name": full_name,
    }
    return Family(model_type, architecture, preset, defaults=DEFAULTS | defaults, **usual | others)


def full_name(name: str) -> str:
    """Return the name that a tensor of BartModel has in BartForConditionalGeneration."""
    return f"model.{name}" if name.startswith(("shared.", "encoder.", "decoder.")) else name


def layout(
    name: str,
    position_table: Callable[[TransformerConfig], np.ndarray] | None = None,
    position_leaf: str = "weight",
) -> Layout:
    """Return the names and shapes of a family's weights; a config has a part of them.

    As in transformers, an absent bias of the output means zeros.
    """
    rows = (
        # A table that encoder, decoder and output share has its own name and three copies. With two
        # tables, the output is tied to the decoder's table.
        Row("model.shared.weight", "token_embedding/embedding"),
        Row("model.encoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("lm_head.weight", "token_embedding/embedding", when=("output_projection", "tied")),
        Row("model.encoder.embed_tokens.weight", "source_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "target_embedding/embedding"),
        Row("lm_head.weight", "target_embedding/embedding", when=("output_projection", "tied")),
        Row("lm_head.weight", "output_projection/kernel", transpose),
        *stack_rows("model."),
        Row("final_logits_bias", "output_projection/bias", Operation(shape=(1, -1)), zeros=True),
    )
    buffers = ()
    if position_table is not None:
        names = (f"model.{stack}.embed_positions.{position_leaf}" for stack in STACKS)
        buffers = tuple(Buffer(name, position_table) for name in names)
    # Files converted from fairseq have a number there, the version of its format.
    return Layout(name, rows, buffers, unused=tuple(f"model.{stack}.version" for stack in STACKS))


def stack_rows(prefix: str) -> list[Row]:
    """Return the rows of the stacks by the names of fairseq, which transformers kept."""
    rows, feed_forward = [], ("fc1", "fc2", "final_layer_norm")
    attentions = {"self_attention": ("self_attn", "self_attn_layer_norm")}
    for stack, side in zip(STACKS, ("source", "target"), strict=True):
        foreign = f"{prefix}{stack}"
        rows += [
            Row(f"{foreign}.embed_positions.weight", f"{side}_positions/embedding"),
            *norm(f"{foreign}.layernorm_embedding", f"{side}_embedding_norm"),
            *layer_rows(f"{foreign}.layers", stack, attentions, PROJECTIONS, feed_forward),
            *norm(f"{foreign}.layer_norm", f"{stack}/norm"),
        ]
        attentions["cross_attention"] = ("encoder_attn", "encoder_attn_layer_norm")
    return rows
