"""Values of a `Buffer`: a position table, a range of numbers, a mask, or a list of numbers."""

import dataclasses
import math
from typing import Literal, get_args, no_type_check

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.checks import check_position_table
from jax_transformer.model.functional import sinusoidal_positions

Kind = Literal["range", "triangle", "list"]
Number = bool | int | float
MOST_NUMBERS, MOST_LISTED = 2**24, 2**12
DTYPES = tuple("bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split())


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class PositionTable:
    """The sinusoids of a config in another program's shape: a `Buffer.value`.

    Attributes:
        shape: The axes of the buffer: "length", then "d_model", and any axes of length 1, for
            example (1, "length", "d_model") for a table that is added to a batch [B, L, D].
        length: Rows of the table; None is `max_length + position_offset` of the config.
    """

    shape: tuple[int | str, ...] = (1, "length", "d_model")
    length: int | None = None

    def __post_init__(self) -> None:
        axes = [axis for axis in self.shape if type(axis) is not int or axis != 1]
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
        rows, rounding = self.rows(config), config.position_rounding
        check_position_table(rows, config.d_model)
        table = sinusoidal_positions(rows, config.d_model, config.positions, rounding=rounding)
        return table.reshape(self.lengths(config))

    def lengths(self, config: TransformerConfig) -> tuple[int, ...]:
        """Return the shape of the table for a config, without computing the table."""
        sizes = {"length": self.rows(config), "d_model": config.d_model}
        return tuple(sizes.get(axis, 1) for axis in self.shape)

    def rows(self, config: TransformerConfig) -> int:
        """Return the number of rows of the table for a config."""
        return config.max_length + config.position_offset if self.length is None else self.length


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class FixedBuffer:
    """Numbers that depend on nothing: a `Buffer.value`.

    Attributes:
        kind: A "range" counts through all axes, from the first of `values` in steps of the second.
            A "triangle" has the first on and below the diagonal of the last two axes, and the
            second above it; two equal values fill any shape. A "list" has all its `values`.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    values: tuple[Number, ...]

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.dtype not in DTYPES:
            raise InputError(
                f"kind={shorten(self.kind)}, dtype={shorten(self.dtype)}: a buffer is a "
                f"{' or a '.join(get_args(Kind))} of {', '.join(DTYPES)}"
            )
        are_lengths = all(type(length) is int and length >= 0 for length in self.shape)
        if not are_lengths or math.prod(self.shape) > MOST_NUMBERS:
            raise InputError(
                f"shape={shorten(list(self.shape))} must hold lengths of at most {MOST_NUMBERS:,} "
                "numbers together"
            )
        count = math.prod(self.shape) if self.kind == "list" else 2
        if len(self.values) != count or not all(isinstance(n, Number) for n in self.values):
            raise InputError(f"values={shorten(self.values)} must be {count} numbers")
        if self.kind == "list":
            try:
                self()
            except (OverflowError, ValueError) as error:
                raise InputError(f"values={shorten(self.values)} are no {self.dtype}") from error

    def __call__(self, config: TransformerConfig | None = None) -> np.ndarray:
        """Return the array; the config changes nothing."""
        if self.kind == "list":
            return np.array(self.values, self.dtype).reshape(self.shape)
        first, second = self.values
        with np.errstate(all="ignore"):
            if self.kind == "range":
                counted = first + second * np.arange(math.prod(self.shape))
                return counted.reshape(self.shape).astype(self.dtype)
            below = np.tri(*self.shape[-2:]) if len(self.shape) > 1 else np.ones(self.shape)
            return np.broadcast_to(np.where(below, first, second), self.shape).astype(self.dtype)

    def lengths(self, config: TransformerConfig) -> tuple[int, ...]:
        """Return the shape, without computing the array."""
        return self.shape


def fixed_buffer(array: np.ndarray) -> FixedBuffer | None:
    """Return what computes an array bit for bit; None of a long one that follows no rule."""
    if array.dtype.name not in DTYPES or array.size > MOST_NUMBERS:
        return None
    flat, values = array.reshape(-1), {}
    if flat.size:
        first, last = flat[0].item(), (array[(0,) * (array.ndim - 1)][-1:] if array.ndim else flat)
        values["triangle"] = first, last.item()
        values["range"] = first, flat[min(1, flat.size - 1)].item() - first
    if flat.size <= MOST_LISTED:
        values["list"] = tuple(flat.tolist())
    for kind, numbers in values.items():
        value = FixedBuffer(kind, array.shape, array.dtype.name, numbers)
        if np.array_equal(value(), array):
            return value
    return None
