"""Executes a recorded run again, or parts of it, in float64 and with other numbers.

Only operations of an allowed list are executed, and the size of each result is computed before it.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, one_line, shorten
from jax_transformer.porting.operations import ALLOWED, MOVES, OVERWRITE, RANDOM, SELECTING
from jax_transformer.porting.recording import MOST_NUMBERS, Call, Run, needed_calls
from jax_transformer.storage.weights.arrays import as_torch


def check_run(run: Run) -> None:
    """Refuse an operation that is not allowed, or whose result has another size than recorded.

    The sizes are computed without numbers.
    """
    import torch

    made: dict[int, Any] = {leaf.key: torch.empty(leaf.shape, device="meta") for leaf in run.leaves}
    made |= {key: _tensor(array).to("meta") for key, array in run.constants.items()}
    for call in run.calls:
        if call.name in RANDOM:
            raise InputError(
                f"{call} draws random numbers: put the model into evaluation mode by model.eval(), "
                "and take out the dropout that this does not stop"
            )
        if call.name not in ALLOWED:
            raise InputError(f"{call}: {shorten(call.operation)} is no operation that is read")
        if not set(call.reads) <= made.keys():
            raise InputError(f"{call} reads a value that nothing computed")
        sizes = [math.prod(shape) for shape in call.shapes if shape is not None]
        if max(sizes, default=0) > MOST_NUMBERS:
            raise InputError(f"{call} has a result of more than {MOST_NUMBERS:,} numbers")
        if not sizes:  # a number of Python
            continue
        for key, shape, output in zip(call.outputs, call.shapes, _sizes(call, made), strict=True):
            if key is not None:
                if tuple(output.shape) != shape:
                    raise InputError(f"{call} has a result {list(output.shape)}, not {list(shape)}")
                made[key] = output
    if run.output not in made:
        raise InputError("the recorded output is a value that nothing computed")


def _sizes(call: Call, made: Mapping[int, Any]) -> list[Any]:
    """Return the outputs of an operation without numbers."""
    import torch

    try:
        return _execute(call, made, "meta")
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        if call.name not in SELECTING:
            raise InputError(f"{call} cannot be executed: {one_line(str(error))}") from error
        kind = torch.int64 if call.name == "nonzero" else made[call.reads[0]].dtype
        return [torch.empty(shape, dtype=kind, device="meta") for shape in call.shapes]


class Replay:
    """Executes parts of a run in float64, with other numbers in the place of some values."""

    def __init__(self, run: Run, tensors: Mapping[str, Any]) -> None:
        """Take the weights, arrays or tensors, by their names in the checkpoint.

        Raises:
            InputError: A weight that the program read is missing, or has another shape.
        """
        self.run = run
        self.known = {key: _tensor(array) for key, array in run.constants.items()}
        for leaf in run.leaves:
            name = next((name for name in leaf.names if name in tensors), None)
            if name is None or tuple(tensors[name].shape) != leaf.shape:
                found = "is missing" if name is None else f"is {list(tensors[name].shape)}"
                raise InputError(
                    f"{leaf.names[0]} {list(leaf.shape)} of the recording {found} in the "
                    "checkpoint: give the weights with which the recording was made"
                )
            self.known[leaf.key] = _tensor(tensors[name])
        self._plans: dict[Any, tuple[list[tuple[Call, list[int]]], set[int | None]]] = {}

    def values(
        self, keys: Iterable[int], replaced: Mapping[int, np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Return values by their keys, where those of `replaced` have other numbers.

        Only what depends on them is executed. What does not is computed once and stays.
        """
        import torch

        changed = {key: torch.as_tensor(value) for key, value in (replaced or {}).items()}
        keys = tuple(keys)
        plan, affected = self._plan(keys, frozenset(changed))
        both = ChainMap(changed, self.known)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of numbers that operations make
        try:
            with torch.no_grad():
                unaffected = {*keys, *(key for call, _ in plan for key in call.reads)} - affected
                for call in needed_calls(self.run.calls, unaffected, self.known):
                    self.known.update(_results(call, self.known))
                for call, last_read in plan:
                    for key, output in _results(call, both):
                        changed.setdefault(key, output)  # what is replaced stays so
                    for key in last_read:
                        changed.pop(key, None)  # its memory is free
        finally:
            torch.set_default_dtype(before)
        return [_wide(both[key]).numpy() for key in keys]

    def value(self, key: int, replaced: Mapping[int, np.ndarray] | None = None) -> np.ndarray:
        """Return one value; see `values`."""
        return self.values([key], replaced)[0]

    def _plan(
        self, keys: tuple[int, ...], replaced: frozenset[int]
    ) -> tuple[list[tuple[Call, list[int]]], set[int | None]]:
        """Return the calls that compute `keys` anew, and all values that depend on `replaced`.

        With each call stand the values that no later one reads.
        """
        if (keys, replaced) not in self._plans:
            affected, changed = set[int | None](replaced), []
            for call in self.run.calls:
                if not affected.isdisjoint(call.reads):
                    affected.update(call.outputs)
                    changed.append(call)
            plan, still_read = [], {*keys}
            for call in reversed(needed_calls(changed, keys, replaced)):
                plan.append((call, [key for key in call.reads if key not in still_read]))
                still_read.update(call.reads)
            self._plans[keys, replaced] = plan[::-1], affected
        return self._plans[keys, replaced]


def _tensor(array: Any) -> Any:
    """Return an array as a tensor, and a tensor as it is."""
    return as_torch(array) if isinstance(array, np.ndarray) else array


def _wide(value: Any) -> Any:
    """Return a tensor of numbers with a fraction in float64, and anything else as it is."""
    import torch

    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def _results(call: Call, values: Mapping[int, Any]) -> list[tuple[int, Any]]:
    pairs = zip(call.outputs, _execute(call, values), strict=True)
    return [(key, output) for key, output in pairs if key is not None]


def _execute(call: Call, values: Mapping[int, Any], device: str = "cpu") -> list[Any]:
    """Return what an operation gives in float64; nothing of `values` is changed.

    A conversion to a narrower type is none: what the program would compute without rounding is
    what is read.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    moves = call.name in MOVES  # what only moves keeps its type: weights are not held twice
    arguments = _decoded(call.arguments, values, moves)
    if call.name == OVERWRITE:
        return [_overwritten(*arguments)]
    if call.name in ("view", "_unsafe_view", "_reshape_alias"):  # memory may lie otherwise here
        return [arguments[0].reshape(call.shapes[0])]
    keywords = {
        name: _decoded(value, values, moves)
        for name, value in call.keywords.items()
        if value is not None
    }
    if call.name in ("_softmax", "_log_softmax"):
        arguments[2] = False  # a conversion of half precision
    _, name, overload = call.operation.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    schema = function._schema.arguments
    for place, info in enumerate([argument.alias_info for argument in schema[: len(arguments)]]):
        if info is not None and info.is_write:
            arguments[place] = arguments[place].clone()
    if device != "cpu" and any(argument.name == "device" for argument in schema):
        keywords["device"] = device
    outputs = tree_leaves(function(*arguments, **keywords))
    return outputs if moves else [_wide(x) for x in outputs]


def _decoded(argument: Any, values: Mapping[int, Any], narrow: bool) -> Any:
    """Return a recorded argument as torch takes it; numbers in float64, unless `narrow`."""
    import torch

    if isinstance(argument, list):
        return [_decoded(item, values, narrow) for item in argument]
    if not isinstance(argument, dict):
        return argument
    if "value" in argument:
        found = values[argument["value"]]
        return found if narrow else _wide(found)
    if "float" in argument:
        return float(argument["float"])
    dtype = getattr(torch, argument["dtype"])
    return torch.float64 if dtype.is_floating_point else dtype


def _overwritten(old: Any, new: Any, *geometry: Sequence[Any]) -> Any:
    """Return `old` after `new` was written; both lie in one storage at an offset, with strides."""
    import torch

    ends = [
        offset + sum(stride * (n - 1) for n, stride in zip(shape, strides, strict=True)) + 1
        for offset, shape, strides in geometry
    ]
    if min(offset for offset, _, _ in geometry) < 0 or max(ends) > MOST_NUMBERS:
        raise ValueError("an alias outside of its storage")
    storage = torch.empty(max(ends), dtype=old.dtype, device=old.device)
    views = [torch.as_strided(storage, n, strides, offset) for offset, n, strides in geometry]
    for view, values in zip(views, (old, new), strict=True):
        view.copy_(values)
    return views[0].clone()
