"""What a model is: its shape, the described implementations by name, and declared fields."""

from jax_transformer.config.transformer_config import LARGEST, TransformerConfig

__all__ = ["LARGEST", "TransformerConfig"]
