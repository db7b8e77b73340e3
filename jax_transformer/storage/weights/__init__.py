"""Weight files. Reading trusts nothing in a file; writing leaves a complete file or none."""

from jax_transformer.storage.weights.checks import WeightFileError
from jax_transformer.storage.weights.formats import read, read_metadata, write
from jax_transformer.storage.weights.torch_file import read_checkpoint
from jax_transformer.storage.weights.trained import read_trained

__all__ = [
    "WeightFileError",
    "read",
    "read_checkpoint",
    "read_metadata",
    "read_trained",
    "write",
]
