"""Small Marian models, and what no Marian model can be."""

import torch

from tests.convert.families.case import Case


def sinusoids(length, d_model):
    """Return the position table as transformers documents it: sines, then cosines."""
    frequency = 10_000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def arguments(heads, d_ff, pad_id, eos_id, **others):
    """Return arguments of MarianConfig: both sides alike, and targets that begin with padding."""
    return {
        "scale_embedding": True,
        "activation_function": "swish",
        "dropout": 0.1,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": d_ff,
        "decoder_ffn_dim": d_ff,
        "pad_token_id": pad_id,
        "decoder_start_token_id": pad_id,
        "eos_token_id": eos_id,
        "forced_eos_token_id": eos_id,
    } | others


CASE = Case(
    shapes={
        "three_heads": arguments(
            heads=3,
            d_ff=61,
            pad_id=52,
            eos_id=0,
            vocab_size=53,
            d_model=42,
            encoder_layers=2,
            decoder_layers=3,
            max_position_embeddings=37,
        ),
        "one_head_unscaled": arguments(
            heads=1,
            d_ff=7,
            pad_id=5,
            eos_id=11,
            vocab_size=31,
            d_model=10,
            encoder_layers=3,
            decoder_layers=1,
            max_position_embeddings=19,
            scale_embedding=False,
            activation_function="gelu",
        ),
        "two_tables": arguments(
            heads=7,
            d_ff=29,
            pad_id=41,
            eos_id=3,
            vocab_size=43,
            decoder_vocab_size=47,
            d_model=70,
            encoder_layers=1,
            decoder_layers=2,
            max_position_embeddings=23,
            activation_function="relu",
            share_encoder_decoder_embeddings=False,
        ),
    },
    refused={
        "is_encoder_decoder": False,
        "is_decoder": True,
        "tie_word_embeddings": False,
        "static_position_embeddings": False,
        "normalize_before": True,
        "normalize_embedding": True,
        "add_final_layer_norm": True,
        "encoder_layerdrop": 0.1,
        "decoder_layerdrop": 0.1,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 60,
        "activation_function": "quick_gelu",
        "d_model": 43,
        "vocab_size": 54,
        "decoder_vocab_size": 54,
        "pad_token_id": 53,
        "eos_token_id": [0, 1],
        "decoder_start_token_id": None,
        "max_position_embeddings": 0,
        "scale_embedding": "false",
        "share_encoder_decoder_embeddings": 1,
        "dropout": "0.1",
        "attention_dropout": None,
        "encoder_layers": 2.0,
    },
    required=("d_model", "pad_token_id", "scale_embedding", "vocab_size"),
    impossible=(
        {"positions": "sinusoidal"},
        {"norm_placement": "pre"},
        {"final_norm": True},
        {"norm_epsilon": 1e-6},
        {"qkv_bias": False},
        {"output_projection": "linear"},
        {"output_bias": False},
        {"token_embeddings": "none", "output_projection": "linear"},
        {"embedding_dropout": "decoder"},
        {"memory_norm": True},
    ),
    tables={"embed_positions.weight": sinusoids},
)
