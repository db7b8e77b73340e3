"""What BART, Marian, Pegasus, M2M100 and the others of this lineage in transformers have in common.

They share the names of their weights and most keys of config.json.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families.family import ACTIVATIONS, Family
from jax_transformer.convert.layouts.torch_nn import layer_rows, norm
from jax_transformer.convert.position_table import PositionTable
from jax_transformer.convert.table import Buffer, Layout, Operation, Row

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
SINUSOIDS = PositionTable(("length", "d_model"))
FIELDS: Mapping[str, str | tuple[str, ...]] = MappingProxyType(
    {
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
)
WORDS: Mapping[str, Mapping[Any, Mapping[str, Any]]] = MappingProxyType(
    {
        "activation_function": ACTIVATIONS,
        "scale_embedding": {
            True: {"embedding_scale": "sqrt_d_model"},
            False: {"embedding_scale": "none"},
        },
    }
)
FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
        "tie_word_embeddings": (True,),
    }
)
# Layerdrop skips whole layers in training, by chance.
TRAINING_ONLY: Mapping[str, float] = MappingProxyType(
    {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
)
# One table of tokens, and a vocabulary: all but Marian.
SHARED_FIELDS: Mapping[str, str | tuple[str, ...]] = MappingProxyType(
    {"vocab_size": ("src_vocab_size", "tgt_vocab_size"), **FIELDS}
)
# What most classes of configurations take an absent key for.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "activation_function": "gelu",
        "scale_embedding": False,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }
)


def family(
    model_type: str,
    architecture: str,
    preset: str,
    *,
    defaults: Mapping[str, Any],
    **others: Any,
) -> Family:
    """Return a family with one table of tokens; the arguments replace the usual attributes."""
    usual = {
        "layout": layout(model_type),
        "generation": generation,
        "fields": SHARED_FIELDS,
        "words": WORDS,
        "fixed": FIXED,
        "training_only": TRAINING_ONLY,
    }
    defaults = {**DEFAULTS, **defaults}
    return Family(model_type, architecture, preset, defaults=defaults, **(usual | others))


def generation(config: TransformerConfig) -> dict[str, Any]:
    """Return the generation defaults of a family whose targets all end with EOS."""
    return {
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "forced_eos_token_id": config.eos_id,
        "max_length": config.max_length,
        "pad_token_id": config.pad_id,
    }


def layout(
    name: str,
    position_table: Callable[[TransformerConfig], np.ndarray] | None = None,
    position_leaf: str = "weight",
) -> Layout:
    """Return the names and shapes of the weights of a family.

    A model has only those of the tensors whose parameters its config has: one token table or two,
    learned positions, norms of the embeddings, norms at the ends of the stacks, the bias of the
    output. As in transformers, an absent bias of the output means zeros.
    """
    rows = (
        # A table that encoder, decoder and output share has its own name and three copies.
        Row("model.shared.weight", "token_embedding/embedding"),
        Row("model.encoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("lm_head.weight", "token_embedding/embedding"),
        # With two tables, the output is tied to the decoder's table.
        Row("model.encoder.embed_tokens.weight", "source_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "target_embedding/embedding"),
        Row("lm_head.weight", "target_embedding/embedding"),
        *_embedding("encoder", "source"),
        *_embedding("decoder", "target"),
        *_layers("encoder", {"self_attention": "self_attn"}),
        *_layers("decoder", {"self_attention": "self_attn", "cross_attention": "encoder_attn"}),
        *norm("model.encoder.layer_norm", "encoder/norm"),
        *norm("model.decoder.layer_norm", "decoder/norm"),
        Row("final_logits_bias", "output_projection/bias", Operation(shape=(1, -1)), zeros=True),
    )
    buffers = (
        ()
        if position_table is None
        else tuple(
            Buffer(f"model.{stack}.embed_positions.{position_leaf}", position_table)
            for stack in ("encoder", "decoder")
        )
    )
    # Files converted from fairseq have a number there, the version of its format.
    versions = tuple(f"model.{stack}.version" for stack in ("encoder", "decoder"))
    return Layout(name, rows, buffers, unused=versions)


def _embedding(stack: str, side: str) -> list[Row]:
    """Return the rows between a stack's token embeddings and its layers."""
    return [
        Row(f"model.{stack}.embed_positions.weight", f"{side}_positions/embedding"),
        *norm(f"model.{stack}.layernorm_embedding", f"{side}_embedding_norm"),
    ]


def _layers(stack: str, attentions: Mapping[str, str]) -> list[Row]:
    """Return the rows of a stack's layers, given the foreign name of each attention."""
    return layer_rows(
        f"model.{stack}.layers.{{i}}",
        f"{stack}/layers_{{i}}",
        {own: (name, f"{name}_layer_norm") for own, name in attentions.items()},
        PROJECTIONS,
        ("fc1", "fc2", "final_layer_norm"),
    )
