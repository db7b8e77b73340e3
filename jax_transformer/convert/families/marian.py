"""MarianMTModel: translation models of Marian, as opus-mt (Junczys-Dowmunt et al. 2018)."""

from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families.family import ACTIVATIONS, Family
from jax_transformer.convert.layouts.torch_nn import linear, norm
from jax_transformer.convert.table import Buffer, Layout, Operation, Row
from jax_transformer.functional import sinusoidal_positions


def _layers(stack: str, attentions: dict[str, str]) -> list[Row]:
    """Return the rows of a stack's layers, given the foreign name of each attention."""
    foreign, path = f"model.{stack}.layers.{{i}}", f"{stack}/layers_{{i}}"
    rows = [
        *linear(f"{foreign}.fc1", f"{path}/feed_forward/inner"),
        *linear(f"{foreign}.fc2", f"{path}/feed_forward/outer"),
        *norm(f"{foreign}.final_layer_norm", f"{path}/feed_forward_residual/norm"),
    ]
    for own, name in attentions.items():
        rows += norm(f"{foreign}.{name}_layer_norm", f"{path}/{own}_residual/norm")
        for projection in ("query", "key", "value"):
            rows += linear(f"{foreign}.{name}.{projection[0]}_proj", f"{path}/{own}/{projection}")
        rows += linear(f"{foreign}.{name}.out_proj", f"{path}/{own}/output")
    return rows


def _position_table(config: TransformerConfig) -> np.ndarray:
    return sinusoidal_positions(config.max_length, config.d_model, config.positions)


LAYOUT = Layout(
    "marian",
    (
        # A table that encoder, decoder and output share has its own name and three copies.
        Row("model.shared.weight", "token_embedding/embedding"),
        Row("model.encoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("lm_head.weight", "token_embedding/embedding"),
        # With two tables, the output is tied to the decoder's table.
        Row("model.encoder.embed_tokens.weight", "source_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "target_embedding/embedding"),
        Row("lm_head.weight", "target_embedding/embedding"),
        *_layers("encoder", {"self_attention": "self_attn"}),
        *_layers("decoder", {"self_attention": "self_attn", "cross_attention": "encoder_attn"}),
        Row("final_logits_bias", "output_projection/bias", Operation(shape=(1, -1))),
    ),
    (
        Buffer("model.encoder.embed_positions.weight", _position_table),
        Buffer("model.decoder.embed_positions.weight", _position_table),
    ),
)


def _generation(config: TransformerConfig) -> dict[str, Any]:
    return {
        # The decoder starts from padding, but must never generate it.
        "bad_words_ids": [[config.pad_id]],
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "forced_eos_token_id": config.eos_id,
        "max_length": config.max_length,
        "pad_token_id": config.pad_id,
    }


FAMILY = Family(
    model_type="marian",
    architecture="MarianMTModel",
    preset="marian",
    layout=LAYOUT,
    generation=_generation,
    fields={
        "vocab_size": "src_vocab_size",
        "decoder_vocab_size": "tgt_vocab_size",
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
    },
    words={
        "activation_function": ACTIVATIONS,
        "scale_embedding": {
            True: {"embedding_scale": "sqrt_d_model"},
            False: {"embedding_scale": "none"},
        },
        "share_encoder_decoder_embeddings": {
            True: {"token_embeddings": "shared"},
            False: {"token_embeddings": "separate"},
        },
    },
    fixed={
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
        "tie_word_embeddings": (True,),
        "static_position_embeddings": (True,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "add_final_layer_norm": (False,),
        "encoder_layerdrop": (0.0,),
        "decoder_layerdrop": (0.0,),
    },
    defaults={"share_encoder_decoder_embeddings": True},
    computed={"decoder_vocab_size": lambda values: values.get("vocab_size")},
)
