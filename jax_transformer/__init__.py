"""A pure-functional Flax encoder-decoder Transformer whose weights travel to torch and back."""

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model import Transformer, apply, decode, encode, init_params

__all__ = [
    "InputError",
    "Transformer",
    "TransformerConfig",
    "apply",
    "decode",
    "encode",
    "init_params",
]
