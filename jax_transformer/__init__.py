"""A pure-functional Flax encoder-decoder Transformer whose weights travel to torch and back."""

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import (
    Cache,
    Hypotheses,
    cross_attention_weights,
    decode_step,
    generate,
    init_cache,
    score,
    select_hypotheses,
)
from jax_transformer.errors import InputError
from jax_transformer.model import Transformer, apply, decode, encode, init_params

__all__ = [
    "Cache",
    "Hypotheses",
    "InputError",
    "Transformer",
    "TransformerConfig",
    "apply",
    "cross_attention_weights",
    "decode",
    "decode_step",
    "encode",
    "generate",
    "init_cache",
    "init_params",
    "score",
    "select_hypotheses",
]
