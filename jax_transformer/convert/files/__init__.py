"""Weight files: nothing in one is trusted, and one is written whole or not at all."""

from jax_transformer.convert.files.checks import WeightFileError
from jax_transformer.convert.files.formats import read, read_metadata, write

__all__ = ["WeightFileError", "read", "read_metadata", "write"]
