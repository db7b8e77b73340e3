"""Tensors through a layout, both ways: every fault is found before anything is converted.

A config may come from a file that nobody checked. Before it was compared with the tensors, nothing
of the size that it claims is built.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.names import add_names, compare_names
from jax_transformer.convert.report import ConversionError, Report
from jax_transformer.convert.table import (
    BoundRow,
    Buffer,
    Layout,
    Tree,
    expand,
    flatten,
    is_in_part,
    nest,
)
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.tree import (
    LAYER,
    STACKS,
    Shape,
    is_of_adapter,
    parameter_shapes,
    parameter_shardings,
)
from jax_transformer.storage.weights.arrays import FLOATS, as_jax, as_numpy, own_copy, pieces

# Sinusoids of some thousand positions, computed in float32, have errors up to this size.
COMPUTED_TOLERANCE = 1e-3
NUMBER = re.compile(r"[0-9]+")
HALF_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Fields that change neither the parameters nor what they compute at the positions that both hold.
FREE_FIELDS = tuple(
    "max_length dropout attention_dropout activation_dropout dropout_placement embedding_dropout "
    "initialization".split()
)
# A computed table may have so many numbers (some 100 MB while it is computed), or so many times as
# many as the parameters.
FREE_NUMBERS = 2**22
FREE_SHARE = 4


class ConfigMismatch(InputError):
    """A config that differs from the config that was saved with the weights."""


def check_config(
    config: TransformerConfig,
    saved: Mapping[str, Any],
    origin: str = "the config saved with the weights",
) -> None:
    """Refuse a config that contradicts the one saved with the tensors; shapes do not show heads."""
    now, explicit = config.to_dict(), config.explicit()
    differing = [
        f"{name}={now.get(name, 'no such field')!r} (saved: {value!r})"
        for name, value in saved.items()
        if name not in FREE_FIELDS and (name not in now or value not in (now[name], explicit[name]))
    ]
    if differing:
        raise ConfigMismatch(f"the config does not match {origin}: {'; '.join(differing)}")


def jax_leaf(
    mesh: Mesh | None = None, config: TransformerConfig | None = None
) -> Callable[[str, np.ndarray], jax.Array]:
    """Return how an array becomes a leaf of jax, which lies where `parameter_shardings` places it.

    Args:
        mesh: None is the default device.
    """

    def leaf(path: str, array: np.ndarray) -> jax.Array:
        if mesh is None:
            return as_jax(array)
        placed = parameter_shardings(mesh, nest({path: array}), config)
        return as_jax(array, flatten(placed)[path])

    return leaf


def to_params(
    tensors: Mapping[str, Any],
    config: TransformerConfig,
    layout: Layout,
    *,
    dtype: str | None = None,
    strip_prefixes: Sequence[str] = (),
    allow_nonfinite: bool = False,
    buffers: bool = True,
    leaf: Callable[[str, np.ndarray], Any] = lambda path, array: own_copy(array),
    consume: bool = False,
) -> tuple[dict[str, Any], Report]:
    """Read foreign tensors into parameters, all or none.

    Args:
        tensors: Arrays of numpy, jax or torch by foreign name: parameters, gradients or Adam
            moments.
        config: The shape of the model.
        layout: The names and shapes of the tensors.
        dtype: Floating-point type to convert to; the report has the rounding error. None keeps
            the type of each tensor and refuses integers.
        strip_prefixes: Prefixes that are removed, one after the other, from every name that
            begins with them.
        allow_nonfinite: Whether NaN and infinity are read.
        buffers: Whether `tensors` has the layout's computed buffers; gradients have none.
        leaf: Returns a leaf for its path and an array; it must copy the array. The default copies
            to numpy.
        consume: Whether `tensors`, a dict without a fault, is emptied, so that the model is not
            held in memory twice.

    Returns:
        The parameters as a nested dict of new arrays, and the report.

    Raises:
        ConversionError: The tensors do not fit; its report lists every fault.
        InputError: `tensors` does not map names to tensors, or more numbers would be zeros than
            the tensors hold.
    """
    check_state_dict(tensors)
    report = Report(layout.name)
    check = _Check(report, dtype, allow_nonfinite)
    named = _strip(tensors, strip_prefixes, report)
    for name in [name for name in layout.unused if name in named]:
        report.add("not read", name, "has no meaning in the model")
        del named[name]
    config = _within(config, layout, named, "tensors", report)
    rows = expand(layout, config)
    computed = _buffers(layout, config) if buffers else ()
    compare_names(named, rows, computed, layout, config, report)

    arrays, owners = _checked_arrays(rows, named, check)
    for buffer in computed:
        if buffer.foreign in named:
            _compare_computed(buffer, named[buffer.foreign], config, report)
    if report.faults:
        raise ConversionError(report)

    absent = [row for row in rows if row.zeros and row.foreign not in named]
    zeros = sum(math.prod(shape) for row in absent for shape in row.shapes)
    if zeros > (size := sum(array.size for array in arrays.values())):
        raise InputError(
            f"{absent[0].foreign!r} is absent: {zeros:,} numbers would be zeros, but the tensors "
            f"hold only {size:,}"
        )
    named.clear()
    if consume:
        tensors.clear()
    arrays = {row.foreign: arrays[row.foreign] for row in owners}
    for row in absent:
        report.add("zeros", row.foreign, "is absent")
    parameters = _parameters((*absent, *owners), arrays)
    return nest({path: leaf(path, check.convert(array)) for path, array in parameters}), report


def _parameters(
    rows: Iterable[BoundRow], arrays: dict[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each parameter; takes its foreign array out of `arrays`, an absent one is zeros."""
    kind = arrays[next(iter(arrays))].dtype
    columns: dict[str, dict[int, np.ndarray]] = {}
    for row in rows:
        if row.foreign in arrays:
            views = row.read(arrays.pop(row.foreign))
        else:
            views = [np.zeros(shape, kind) for shape in row.shapes]
        for path, view in zip(row.paths, views, strict=True):
            if row.head is None:
                yield path, view
            else:
                columns.setdefault(path, {})[row.head] = view
    for path, heads in columns.items():
        yield path, np.concatenate([heads[head] for head in sorted(heads)], axis=-1)


def _compare_parts(
    row: BoundRow, parts: Sequence[np.ndarray], dtype: str | None, report: Report
) -> None:
    """Report parameters that one foreign tensor cannot hold: of several types, or no copies."""
    kinds = {str(part.dtype) for part in parts}
    if dtype is None and len(kinds) > 1:
        report.add("wrong dtype", row.foreign, f"would stack {' and '.join(sorted(kinds))}")
    for path, part in zip(row.paths, parts, strict=False) if row.stack == "copies" else ():
        if not np.array_equal(part, parts[0], equal_nan=True):
            report.add("not tied", path, f"differs from {row.paths[0]}: {row.foreign} is one")


def _buffers(layout: Layout, config: TransformerConfig) -> tuple[Buffer, ...]:
    return tuple(buffer for buffer in layout.buffers if is_in_part(buffer.foreign, config))


def to_tensors(
    params: Tree,
    config: TransformerConfig,
    layout: Layout,
    *,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    buffers: bool | Mapping[str, Any] = True,
    copy: bool = True,
) -> tuple[dict[str, np.ndarray], Report]:
    """Write parameters as foreign tensors, all or none: the inverse of `to_params`.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        layout: The names and shapes to write.
        dtype: Floating-point type to convert to; None keeps that of each tensor.
        allow_nonfinite: Whether NaN and infinity are written.
        buffers: Whether the layout's buffers are written, as they are computed; or arrays by
            foreign name, whose bits they get.
        copy: Whether the tensors share no memory with `params`. Without a copy they may be
            read-only views of any strides.

    Returns:
        Numpy arrays by foreign name, new and C-contiguous with `copy`, and the report. Tied copies
        are one array under several names; with `copy`, no other two arrays share memory.

    Raises:
        ConversionError: The parameters are not those of the config, or the buffers not those of
            the layout; its report lists every fault.
        InputError: The parameters have an adapter, a computed buffer would be far larger than they
            are, or `buffers` is no mapping.
    """
    report = Report(layout.name)
    check = _Check(report, dtype, allow_nonfinite)
    leaves = flatten(params)
    if any(map(is_of_adapter, leaves)):
        raise InputError(
            "the parameters have an adapter: add it to the kernels by adapters.lora.merge, or "
            "write it alone by adapters.write_adapter"
        )
    config = _within(config, layout, leaves, "parameters", report)
    rows = expand(layout, config)
    shapes = parameter_shapes(config, layout.scope)
    add_names(report, "missing", [path for path in shapes if path not in leaves], leaves)
    add_names(report, "unexpected", [path for path in leaves if path not in shapes], shapes)
    arrays = {p: check(p, leaves[p], shape) for p, shape in shapes.items() if p in leaves}
    for row in rows:
        parts = [arrays[path] for path in row.paths if arrays.get(path) is not None]
        _compare_parts(row, parts, dtype, report)
    computed = () if buffers is False else _buffers(layout, config)
    stored: dict[str, np.ndarray] = {}
    if not isinstance(buffers, bool):
        stored, computed = _stored_buffers(buffers, computed, config, report), ()
    if report.faults:
        raise ConversionError(report)
    _check_sizes(computed, config, sum(array.size for array in arrays.values()))

    tensors: dict[str, np.ndarray] = {}
    owners: dict[tuple[Any, ...], BoundRow] = {}
    for row in rows:
        owner = owners.setdefault((row.paths, row.head), row)
        if owner is not row and owner.is_written_as(row):
            tensors[row.foreign] = tensors[owner.foreign]
            report.add("tied", row.foreign, f"to {owner.foreign}")
        else:
            tensor = row.write([row.columns(check.convert(arrays[path])) for path in row.paths])
            tensor = np.array(tensor, order="C") if copy else tensor
            tensors[row.foreign] = tensor
            report.add(row.kind, row.foreign, f"{', '.join(row.paths)} {_text(tensor)}")
    widest = max((tensor.dtype for tensor in tensors.values()), key=lambda kind: kind.itemsize)
    for buffer in computed:
        value = buffer.value(config)
        value = np.array(value, widest if value.dtype == np.float64 else None, order="C")
        tensors[buffer.foreign] = value
        report.add("computed", buffer.foreign, _text(value))
    return tensors | stored, report


def _stored_buffers(
    tensors: Mapping[str, Any],
    buffers: Iterable[Buffer],
    config: TransformerConfig,
    report: Report,
) -> dict[str, np.ndarray]:
    """Return copies of the tensors that are buffers; absent and wrong ones are reported."""
    check_state_dict(tensors)
    names = [buffer.foreign for buffer in buffers]
    add_names(report, "missing", [name for name in names if name not in tensors], tensors)
    for buffer in buffers:
        if buffer.foreign in tensors:
            _compare_computed(buffer, tensors[buffer.foreign], config, report)
    if report.faults:
        return {}
    return {name: np.array(as_numpy(tensors[name]), order="C") for name in names}


def _check_sizes(computed: Iterable[Buffer], config: TransformerConfig, size: int) -> None:
    """Refuse a buffer that would be far larger than the `size` numbers of the parameters."""
    for buffer in computed:
        shape = buffer.known_shape(config)
        if shape is not None and math.prod(shape) > max(FREE_NUMBERS, FREE_SHARE * size):
            raise InputError(
                f"{buffer.foreign!r} of max_length={config.max_length} would have the shape "
                f"{list(shape)}, but the parameters have {size:,} numbers; set a shorter max_length"
            )


def _within(
    config: TransformerConfig, layout: Layout, names: Iterable[str], what: str, report: Report
) -> TransformerConfig:
    """Return the config with no more layers than the names hold numbers; more are a fault."""
    most = len({number for name in names for number in NUMBER.findall(name)})
    scope_layer = LAYER.search(layout.scope)
    counts = {}
    for stack in STACKS:
        field = f"num_{stack}_layers"
        claimed = getattr(config, field)
        if scope_layer or (layout.scope and layout.scope != stack):
            # A stack that the layout does not convert needs only the layer of the scope.
            counts[stack] = min(claimed, 1 + int(scope_layer[1]) if scope_layer else 1)
            continue
        if claimed > most > 0:  # of 0 layers, the missing names say more
            detail = f"the {what} hold at most {most} layers of the {stack}"
            report.add("missing", f"{field}={claimed}", detail)
        counts[stack] = min(claimed, max(1, most))
    return dataclasses.replace(
        config, num_encoder_layers=counts["encoder"], num_decoder_layers=counts["decoder"]
    )


class _Check:
    def __init__(self, report: Report, dtype: str | None, allow_nonfinite: bool) -> None:
        self.report = report
        self.allow_nonfinite = allow_nonfinite
        # A text that is no name of a type is not given to NumPy, which raises errors of many kinds.
        name = dtype if dtype is None or isinstance(dtype, str) else np.dtype(dtype).name
        if name is not None and name not in FLOATS:
            raise InputError(f"dtype={shorten(dtype)} must be one of {', '.join(FLOATS)}")
        self.dtype = None if name is None else np.dtype(name)

    def __call__(self, name: str, value: object, shape: Shape) -> np.ndarray | None:
        """Return the value as a numpy array, or None where it has a fault."""
        try:
            array = as_numpy(value)
        except InputError as error:
            self.report.add("wrong dtype", name, str(error))
            return None
        if array.shape != shape:
            self.report.add("wrong shape", name, f"{list(array.shape)}, expected {list(shape)}")
            return None
        integers = self.dtype is not None and array.dtype.kind in "iub"
        if array.dtype.name not in FLOATS and not integers:
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
        if self.dtype is None or array.dtype == self.dtype:
            return array
        with np.errstate(over="ignore"):
            return array.astype(self.dtype)

    def _first_nonfinite(self, array: np.ndarray) -> tuple[int, ...] | None:
        for begin, rows in () if self.allow_nonfinite else pieces(array):
            finite = np.isfinite(rows)
            if not finite.all():
                first, *others = np.unravel_index(np.argmin(finite), finite.shape) or (0,)
                return (begin + int(first), *map(int, others))[: array.ndim]
        return None

    def _rounded(self, name: str, array: np.ndarray) -> np.ndarray | None:
        both = np.promote_types(array.dtype, self.dtype)
        error = 0.0
        for begin, rows in pieces(array):
            rounded = self.convert(rows)
            if (index := self._first_nonfinite(rounded)) is not None:
                place = (begin + index[0], *index[1:]) if index else ()
                detail = f"{array[place]} at {list(place)} in {self.dtype}"
                self.report.add("not finite", name, detail)
                return None
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                difference = np.abs(rounded.astype(both) - rows.astype(both))
            error = np.nanmax(difference, initial=error)
        detail = f"{array.dtype} to {self.dtype}, largest rounding error {error:.3g}"
        self.report.add("converted", name, detail)
        return array


def check_state_dict(tensors: Mapping[str, Any]) -> None:
    """Refuse what is often passed in place of a state_dict, and name the remedy."""
    if isinstance(tensors, str | os.PathLike):
        raise InputError(
            f"{os.fspath(tensors)!r} is a path, not a state_dict: read the file with "
            "jax_transformer.storage.weights.read(path) and pass what it returns"
        )
    if hasattr(tensors, "state_dict"):
        raise InputError(
            f"a {type(tensors).__name__} is a module, not a state_dict: pass module.state_dict()"
        )
    if not isinstance(tensors, Mapping):
        raise InputError(f"a {type(tensors).__name__} is no mapping of names to tensors")


def _strip(tensors: Mapping[str, Any], prefixes: Sequence[str], report: Report) -> dict[str, Any]:
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


def _checked_arrays(
    rows: Iterable[BoundRow], named: Mapping[str, Any], check: _Check
) -> tuple[dict[str, np.ndarray], list[BoundRow]]:
    """Return the arrays without a fault, and the row from which each parameter is read."""
    report, arrays, places = check.report, {}, {}
    owners: dict[tuple[Any, ...], BoundRow] = {}
    for row in (row for row in rows if row.foreign in named):
        array = check(row.foreign, named[row.foreign], row.shape)
        if array is None:
            continue
        arrays[row.foreign] = array
        owner = owners.setdefault((row.paths, row.head), row)
        if owner is not row:
            _compare_copies(row, owner, arrays, report)
            continue
        report.add(row.kind, row.foreign, f"{', '.join(row.paths)} {_text(array)}")
        other = places.setdefault((array.ctypes.data, array.shape), row.foreign)
        if other != row.foreign and LAYER.search(row.paths[0]):
            remedy = "layers of the model share no weights: give each its own, by clone()"
            report.add("shared", row.foreign, f"is {other}; {remedy}")
        elif other != row.foreign:
            report.add("untied", row.foreign, f"from {other}: they become separate parameters")
    return arrays, list(owners.values())


def _compare_copies(
    row: BoundRow, owner: BoundRow, arrays: Mapping[str, np.ndarray], report: Report
) -> None:
    copy, original = arrays[row.foreign], arrays[owner.foreign]
    same_memory = copy.ctypes.data == original.ctypes.data and copy.strides == original.strides
    if same_memory and row.is_written_as(owner):
        report.add("tied", row.foreign, f"to {owner.foreign}")
    elif copy.dtype == original.dtype and all(
        np.array_equal(*(np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in both))
        for both in zip(row.read(copy), owner.read(original), strict=True)
    ):
        report.add("tied", row.foreign, f"to {owner.foreign}, an equal copy of its own")
    else:
        report.add("not tied", row.foreign, f"differs from {owner.foreign}, its tied copy")


def _compare_computed(
    buffer: Buffer, value: object, config: TransformerConfig, report: Report
) -> None:
    try:
        stored = as_numpy(value)
    except InputError as error:
        report.add("wrong dtype", buffer.foreign, str(error))
        return
    # What a config claims must not take memory: the shape shows the fault as well. Where it is not
    # known without computing, one row too many shows it.
    expected = buffer.known_shape(config)
    if expected is None:
        rows = min(config.max_length, 1 + max(stored.shape, default=0))
        config = dataclasses.replace(config, max_length=rows)
        expected = buffer.value(config).shape
    if stored.shape != expected:
        detail = f"{list(stored.shape)}, expected {list(expected)}"
        report.add("wrong shape", buffer.foreign, detail)
        return
    if stored.dtype.name not in FLOATS and stored.dtype.kind not in "iub":
        report.add("wrong dtype", buffer.foreign, f"{stored.dtype}, expected real numbers")
        return
    if not stored.size:
        report.add("computed", buffer.foreign, "is empty")
        return
    exact, computed = stored.astype(np.float64), buffer.value(config).astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus infinity, for example in a mask
        error = np.abs(np.where(exact == computed, 0, exact - computed))
    index = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    halves = (stored.dtype.name, config.position_rounding)
    if error[index] <= COMPUTED_TOLERANCE + max(HALF_ROUNDING.get(half, 0) for half in halves):
        report.add("computed", buffer.foreign, f"agrees within {error[index]:.2g}")
        return
    detail = f"is {exact[index]:.6g} at {[*map(int, index)]}, computed {computed[index]:.6g}"
    report.add("not as computed", buffer.foreign, detail)


def _text(array: np.ndarray) -> str:
    return f"{list(array.shape)} {array.dtype}"
