"""A pure-functional Flax encoder-decoder Transformer whose weights travel to torch and back."""

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import Hypotheses, generate
from jax_transformer.errors import InputError
from jax_transformer.model import Transformer, apply, decode, encode, init_params

__all__ = [
    "Hypotheses",
    "InputError",
    "Transformer",
    "TransformerConfig",
    "apply",
    "decode",
    "encode",
    "generate",
    "init_params",
]
