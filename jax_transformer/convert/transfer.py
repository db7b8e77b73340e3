"""Tensors through a layout, both ways: every fault is found before anything is converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.arrays import FLOATS, as_numpy, own_copy
from jax_transformer.convert.report import ConversionError, Report, nearest
from jax_transformer.convert.table import (
    Buffer,
    Layout,
    Pair,
    Shape,
    Tree,
    expand,
    flatten,
    nest,
    parameter_shapes,
)
from jax_transformer.errors import InputError

WRAPPERS = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, a usual attribute
HINTS = 50  # names that are compared with others in search of the nearest
# Sinusoids of some thousand positions, computed in float32, are off by up to this much.
COMPUTED_TOLERANCE = 1e-3
HALF_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def to_params(
    tensors: Mapping[str, Any],
    config: TransformerConfig,
    layout: Layout,
    *,
    dtype: str | None = None,
    strip_prefixes: Sequence[str] = (),
    allow_nonfinite: bool = False,
    buffers: bool = True,
    leaf: Callable[[np.ndarray], Any] = own_copy,
) -> tuple[dict[str, Any], Report]:
    """Read foreign tensors into parameters, all or none.

    Args:
        tensors: Arrays of numpy, jax or torch by foreign name: parameters, gradients or Adam
            moments.
        config: The shape of the model.
        layout: The foreign names and shapes.
        dtype: Floating-point type to convert to, the rounding error goes to the report; None
            keeps the type of each tensor and refuses whole numbers.
        strip_prefixes: Taken off every name that begins with them, one after the other.
        allow_nonfinite: Whether NaN and infinity pass.
        buffers: Whether the layout's computed buffers are there: gradients have none.
        leaf: Makes a leaf from an array whose memory it must not keep; the default is numpy.

    Returns:
        The parameters as a nested dict of fresh arrays, and the report.

    Raises:
        ConversionError: The tensors do not fit; lists every fault.
    """
    check = _Check(Report(layout.name), dtype, allow_nonfinite)
    report = check.report
    named = _strip(tensors, strip_prefixes, report)
    pairs = expand(layout, config)
    computed = layout.buffers if buffers else ()
    _compare_names(named, pairs, computed, report)

    arrays: dict[str, np.ndarray] = {}
    owners: dict[tuple[str, ...], Pair] = {}  # the tensor from which parameters are read
    for pair in (pair for pair in pairs if pair.foreign in named):
        array = check(pair.foreign, named[pair.foreign], pair.shape)
        if array is None:
            continue
        arrays[pair.foreign] = array
        owner = owners.setdefault(pair.paths, pair)
        if owner is pair:
            report.add(pair.kind, pair.foreign, f"{', '.join(pair.paths)} {_text(array)}")
        else:
            _compare_copies(pair, owner, arrays, report)
    _find_untied([pair.foreign for pair in owners.values()], arrays, report)
    for buffer in computed:
        if buffer.foreign in named:
            _compare_computed(buffer, named[buffer.foreign], config, report)
    if report.faults:
        raise ConversionError(report)

    leaves = {}
    for pair in owners.values():
        for path, view in zip(pair.paths, pair.read(arrays[pair.foreign]), strict=True):
            leaves[path] = leaf(check.convert(view))
    return nest(leaves), report


def to_tensors(
    params: Tree,
    config: TransformerConfig,
    layout: Layout,
    *,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    buffers: bool = True,
) -> tuple[dict[str, np.ndarray], Report]:
    """Write parameters as foreign tensors, all or none: the inverse of `to_params`.

    Args:
        params: Nested dict of arrays: parameters, gradients or Adam moments.
        config: The shape of the model.
        layout: The foreign names and shapes.
        dtype: As for `to_params`.
        allow_nonfinite: Whether NaN and infinity pass.
        buffers: Whether the layout's computed buffers are written too.

    Returns:
        Fresh C-contiguous numpy arrays by foreign name, and the report. Tied copies are one
        array under several names; no other two share memory.

    Raises:
        ConversionError: The parameters are not those of the config; lists every fault.
    """
    check = _Check(Report(layout.name), dtype, allow_nonfinite)
    report = check.report
    pairs = expand(layout, config)
    shapes, given = parameter_shapes(config, layout.scope), flatten(params)
    _add_names(report, "missing", [path for path in shapes if path not in given], given)
    _add_names(report, "unexpected", [path for path in given if path not in shapes], shapes)
    arrays = {p: check(p, given[p], shape) for p, shape in shapes.items() if p in given}
    for pair in pairs:
        parts = [arrays[path] for path in pair.paths if arrays.get(path) is not None]
        kinds = {str(part.dtype) for part in parts}
        if dtype is None and len(kinds) > 1:
            report.add("wrong dtype", pair.foreign, f"would stack {' and '.join(sorted(kinds))}")
    if report.faults:
        raise ConversionError(report)

    tensors: dict[str, np.ndarray] = {}
    owners: dict[tuple[str, ...], Pair] = {}
    for pair in pairs:
        owner = owners.setdefault(pair.paths, pair)
        if owner is not pair and owner.operation == pair.operation:
            tensors[pair.foreign] = tensors[owner.foreign]
            report.add("tied", pair.foreign, f"to {owner.foreign}")
        else:
            tensor = pair.write([check.convert(arrays[path]) for path in pair.paths])
            tensors[pair.foreign] = tensor
            report.add(pair.kind, pair.foreign, f"{', '.join(pair.paths)} {_text(tensor)}")
    widest = max((tensor.dtype for tensor in tensors.values()), key=lambda kind: kind.itemsize)
    for buffer in layout.buffers if buffers else ():
        value = buffer.value(config)
        value = np.array(value, widest if value.dtype == np.float64 else None, order="C")
        tensors[buffer.foreign] = value
        report.add("computed", buffer.foreign, _text(value))
    return tensors, report


class _Check:
    """What every tensor goes through, in both directions.

    Attributes:
        report: Where faults and rounding errors go.
        dtype: Type to convert to, or None.
        allow_nonfinite: Whether NaN and infinity pass.
    """

    def __init__(self, report: Report, dtype: str | None, allow_nonfinite: bool) -> None:
        self.report = report
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.allow_nonfinite = allow_nonfinite
        if dtype is not None and self.dtype.name not in FLOATS:
            raise InputError(f"dtype={dtype!r} must be one of {', '.join(FLOATS)}")

    def __call__(self, name: str, value: object, shape: Shape) -> np.ndarray | None:
        """Return the value as a numpy array, or None where it is at fault."""
        try:
            array = as_numpy(value)
        except InputError as error:
            self.report.add("wrong dtype", name, str(error))
            return None
        if array.shape != shape:
            self.report.add("wrong shape", name, f"{list(array.shape)}, expected {list(shape)}")
            return None
        if not self._right_type(array.dtype):
            wanted = "expected a floating-point type" + ("" if self.dtype else "; or give dtype=")
            self.report.add("wrong dtype", name, f"{array.dtype}, {wanted}")
            return None
        if (index := self._first_nonfinite(array)) is not None:
            self.report.add("not finite", name, f"{array[index]} at {list(index)}")
            return None
        if self.dtype is not None and array.dtype != self.dtype:
            return self._rounded(name, array)
        return array

    def convert(self, array: np.ndarray) -> np.ndarray:
        """Return the array in the type to convert to."""
        if self.dtype is None or array.dtype == self.dtype:
            return array
        with np.errstate(over="ignore"):
            return array.astype(self.dtype)

    def _first_nonfinite(self, array: np.ndarray) -> tuple[int, ...] | None:
        if self.allow_nonfinite or (finite := np.isfinite(array)).all():
            return None
        return tuple(int(i) for i in np.unravel_index(np.argmin(finite), array.shape))

    def _right_type(self, kind: np.dtype) -> bool:
        return kind.name in FLOATS or (self.dtype is not None and kind.kind in "iub")

    def _rounded(self, name: str, array: np.ndarray) -> np.ndarray | None:
        rounded = self.convert(array)
        if (index := self._first_nonfinite(rounded)) is not None:
            self.report.add("not finite", name, f"{array[index]} at {list(index)} in {self.dtype}")
            return None
        both = np.promote_types(array.dtype, self.dtype)
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            error = np.nanmax(np.abs(rounded.astype(both) - array.astype(both)), initial=0)
        detail = f"{array.dtype} to {self.dtype}, largest rounding error {error:.3g}"
        self.report.add("converted", name, detail)
        return array


def _strip(tensors: Mapping[str, Any], prefixes: Sequence[str], report: Report) -> dict[str, Any]:
    """Return the tensors without the prefixes of their names."""
    if isinstance(prefixes, str):
        raise InputError(f"strip_prefixes={prefixes!r} must be a sequence of prefixes")
    named: dict[str, Any] = {}
    for full, tensor in tensors.items():
        name = full
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        if name != full:
            report.add("stripped", full, f"read as {name}")
        if name in named:
            report.add("unexpected", full, f"is {name} a second time")
        named[name] = tensor
    return named


def _compare_names(
    named: Mapping[str, Any],
    pairs: Sequence[Pair],
    computed: Sequence[Buffer],
    report: Report,
) -> None:
    copies: dict[tuple[str, ...], list[str]] = {}
    for pair in pairs:
        copies.setdefault(pair.paths, []).append(pair.foreign)
    missing = [names[0] for names in copies.values() if not any(name in named for name in names)]
    missing += [buffer.foreign for buffer in computed if buffer.foreign not in named]
    expected = {pair.foreign for pair in pairs} | {buffer.foreign for buffer in computed}
    unexpected = [name for name in named if name not in expected]
    for wrapper in WRAPPERS:
        if unexpected and all(name.startswith(wrapper) for name in named):
            report.add("unexpected", wrapper, f"before every name: strip_prefixes=({wrapper!r},)")
    _add_names(report, "missing", missing, unexpected)
    _add_names(report, "unexpected", unexpected, missing or expected)


def _add_names(report: Report, kind: str, names: Sequence[str], others: Iterable[str]) -> None:
    candidates = list(others)[: 10 * HINTS]
    for index, name in enumerate(names):
        report.add(kind, name, nearest(name, candidates) if index < HINTS else "")


def _compare_copies(
    pair: Pair, owner: Pair, arrays: Mapping[str, np.ndarray], report: Report
) -> None:
    """Tell whether a tied copy has the bits of the tensor that it is tied to."""
    copy, original = arrays[pair.foreign], arrays[owner.foreign]
    if copy.ctypes.data == original.ctypes.data and copy.strides == original.strides:
        report.add("tied", pair.foreign, f"to {owner.foreign}")
        return
    same = copy.dtype == original.dtype and all(
        np.array_equal(_bits(one), _bits(other))
        for one, other in zip(pair.read(copy), owner.read(original), strict=True)
    )
    if same:
        report.add("tied", pair.foreign, f"to {owner.foreign}, an equal copy of its own")
    else:
        report.add("not tied", pair.foreign, f"differs from {owner.foreign}, its tied copy")


def _find_untied(names: Sequence[str], arrays: Mapping[str, np.ndarray], report: Report) -> None:
    """Tell which parameters of their own share memory, that is, were tied, where they come from."""
    seen: dict[tuple[int, Shape], str] = {}
    for name in names:
        place = (arrays[name].ctypes.data, arrays[name].shape)
        other = seen.setdefault(place, name)
        if other != name:
            report.add("untied", name, f"from {other}: they become parameters of their own")


def _compare_computed(
    buffer: Buffer, value: object, config: TransformerConfig, report: Report
) -> None:
    own = buffer.value(config)
    try:
        found = as_numpy(value)
    except InputError as error:
        report.add("wrong dtype", buffer.foreign, str(error))
        return
    if found.shape != own.shape:
        detail = f"{list(found.shape)}, expected {list(own.shape)}"
        report.add("wrong shape", buffer.foreign, detail)
        return
    if found.dtype.name not in FLOATS and found.dtype.kind not in "iub":
        report.add("wrong dtype", buffer.foreign, f"{found.dtype}, expected real numbers")
        return
    exact, own = found.astype(np.float64), own.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus infinity, as in a mask
        error = np.abs(np.where(exact == own, 0, exact - own))
    index = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    if error[index] <= COMPUTED_TOLERANCE + HALF_ROUNDING.get(found.dtype.name, 0):
        report.add("computed", buffer.foreign, f"agrees within {error[index]:.2g}")
    else:
        place = [int(i) for i in index]
        detail = f"is {exact[index]:.6g} at {place}, computed {own[index]:.6g}"
        report.add("not as computed", buffer.foreign, detail)


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _text(array: np.ndarray) -> str:
    return f"{list(array.shape)} {array.dtype}"
