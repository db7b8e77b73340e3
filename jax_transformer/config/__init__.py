"""What a model is: its shape, the described implementations by name, and declared fields."""

from jax_transformer.config.transformer_config import (
    LARGEST,
    SPECIAL_IDS,
    NormPlacement,
    Stack,
    TransformerConfig,
)

__all__ = ["LARGEST", "SPECIAL_IDS", "NormPlacement", "Stack", "TransformerConfig"]
