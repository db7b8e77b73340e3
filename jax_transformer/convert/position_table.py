"""The computed position table of a model, as a buffer of another program holds it."""

from __future__ import annotations

import dataclasses
from typing import no_type_check

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model.checks import check_position_table
from jax_transformer.model.functional import sinusoidal_positions


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class PositionTable:
    """The sinusoids of a config in another program's shape: a `Buffer.value`.

    Attributes:
        shape: The axes of the buffer: "length", then "d_model", and any axes of length 1, as
            (1, "length", "d_model") for a table that is added to a batch [B, L, D].
        length: Rows of the table; None is `max_length + position_offset` of the config.
    """

    shape: tuple[int | str, ...] = (1, "length", "d_model")
    length: int | None = None

    def __post_init__(self) -> None:
        axes = [axis for axis in self.shape if not (type(axis) is int and axis == 1)]
        if axes != ["length", "d_model"]:
            raise InputError(
                f"shape={list(self.shape)!r} of a position table must hold 'length', then "
                "'d_model', and otherwise axes of length 1"
            )
        if self.length is not None and not (type(self.length) is int and self.length >= 1):
            raise InputError(f"length={self.length!r} must be a whole number of rows, or None")

    def __call__(self, config: TransformerConfig) -> np.ndarray:
        """Return the float64 table for a config, in `shape`."""
        if not config.positions.startswith("sinusoidal"):
            raise InputError(
                f"positions={config.positions!r} has no computed table, but the layout has a "
                "buffer for one; name a sinusoidal kind, or leave the buffer out"
            )
        check_position_table(self.rows(config), config.d_model)
        table = sinusoidal_positions(self.rows(config), config.d_model, config.positions)
        return table.reshape(self.lengths(config))

    def lengths(self, config: TransformerConfig) -> tuple[int, ...]:
        """Return the shape of the table for a config, without computing the table."""
        known = {"length": self.rows(config), "d_model": config.d_model}
        return tuple(known.get(axis, 1) for axis in self.shape)

    def rows(self, config: TransformerConfig) -> int:
        """Return the number of rows of the table for a config."""
        return config.max_length + config.position_offset if self.length is None else self.length
