"""Parity of any two models: what both computed, block by block. It knows no model of this library.

`record` runs a model of torch, Linen, NNX or Equinox and keeps what its parts computed; `compare`
finds the first block that differs between two records, and what would explain it.
"""

from jax_transformer.parity.compare import Comparison, Pair, compare
from jax_transformer.parity.record import Block, Record, read_record, record, record_arrays
from jax_transformer.parity.relations import Program, Relations, relations

__all__ = ["Block", "Comparison", "Pair", "Program", "Record", "Relations", "compare"]
__all__ += ["read_record", "record", "record_arrays", "relations"]
