"""The lengths of the parameters' axes by name: what both models, conversion and costs read.

A name is a field or a property of the config, or a row of `LENGTHS`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax_transformer.config.transformer_config import TransformerConfig


class Heads(NamedTuple):
    """An axis that consists of heads, which a mesh splits whole.

    Attributes:
        count: Number of heads.
        width: Width of each.
    """

    count: Callable[[TransformerConfig], int]
    width: Callable[[TransformerConfig], int]


VOCABULARIES = ("src_vocab_size", "tgt_vocab_size")  # fields: the lengths of axes of token ids
# A shared projection has the width of one head, and serves all heads.
LENGTHS: dict[str, Callable[[TransformerConfig], int] | Heads] = {
    "heads": Heads(lambda config: config.num_heads, lambda config: config.value_dim),
    "projected": lambda config: config.head_dim if config.shares_heads else config.d_model,
    "projected_memory": lambda config: axis_length(config.stack("encoder"), "projected"),
    "memory": lambda config: config.stack("encoder").d_model,
    "projected_heads": Heads(
        lambda config: 1 if config.shares_heads else config.num_heads,
        lambda config: config.head_dim,
    ),
    "projected_key_heads": Heads(
        lambda config: 1 if config.shares_heads else config.key_heads,
        lambda config: config.head_dim,
    ),
    "projected_value_heads": Heads(
        lambda config: 1 if config.shares_heads else config.key_heads,
        lambda config: config.value_dim,
    ),
    "positions": lambda config: config.max_length + config.position_offset,
    # A convolution of width 3 reads the elements of a channel side by side.
    "features_by_width": lambda config: 3 * config.source_features,
    "d_model_by_width": lambda config: 3 * config.d_model,
}


def axis_length(config: TransformerConfig, name: str) -> int:
    """Return the length of an axis."""
    row = LENGTHS.get(name)
    if row is None:
        return getattr(config, name)
    return row.count(config) * row.width(config) if isinstance(row, Heads) else row(config)


def axis_units(config: TransformerConfig, name: str) -> int:
    """Return how many units a mesh can split an axis into: its heads, or its elements."""
    row = LENGTHS.get(name)
    return row.count(config) if isinstance(row, Heads) else axis_length(config, name)
