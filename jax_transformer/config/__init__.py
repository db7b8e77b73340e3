"""What a model is: its shape, the described implementations by name, and declared fields.

Imports neither jax nor torch: both frameworks, the converters and the command line read it.
"""

from jax_transformer.config.transformer_config import LARGEST, TransformerConfig

__all__ = ["LARGEST", "TransformerConfig"]
