"""Which values of a run depend on which, and through which all of them go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from jax_transformer.errors import InputError
from jax_transformer.porting.operations import MOVES, PRODUCTS
from jax_transformer.porting.recording import Call, Run


class Unread(InputError):
    """What a program does that no config has, and the operations that do it."""

    def __init__(self, message: str, calls: Iterable[Call] = ()) -> None:
        self.message, self.calls = message, tuple(calls)
        super().__init__(message)


class Graph:
    """The values of a run as nodes; an operation leads from each of its inputs to its outputs."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.readers: dict[int, list[Call]] = defaultdict(list)
        for call in run.calls:
            for key in dict.fromkeys(call.inputs):
                self.readers[key].append(call)

    def after(self, keys: Iterable[int]) -> set[int]:
        """Return the values that depend on some of `keys`, and `keys`."""
        found, open_keys = set(keys), [*keys]
        while open_keys:
            for call in self.readers[open_keys.pop()]:
                new = {key for key in call.outputs if key is not None} - found
                found |= new
                open_keys += new
        return found

    def before(self, keys: Iterable[int], stop: Iterable[int] = ()) -> set[int]:
        """Return the values that some of `keys` depend on, and `keys`; not what `stop` needs."""
        found, open_keys, stop = set(keys), [*keys], set(stop)
        while open_keys:
            key = open_keys.pop()
            if key not in stop and key in self.run.producer:
                new = {*self.run.producer[key].inputs} - found
                found |= new
                open_keys += new
        return found

    def between(self, starts: Iterable[int], ends: Iterable[int]) -> set[int]:
        """Return the values on the paths from some of `starts` to some of `ends`, both included."""
        starts, ends = [*starts], [*ends]
        return self.after(starts) & self.before(ends, starts)

    def cuts(self, start: int, ends: Iterable[int]) -> list[int]:
        """Return the values through which every path from `start` to `ends` goes, in order."""
        ends = {*ends}
        inside = self.between([start], ends)
        found: list[int] = []
        reach = start
        for key in sorted(inside):
            if reach <= key:
                found.append(key)
            if key in ends and len(ends) > 1:  # a path ends here that no later value is on
                reach = max(inside) + 1
            for call in self.readers[key]:
                reach = max([reach, *(k for k in call.outputs if k in inside)])
        return found

    def calls(self, starts: Iterable[int], ends: Iterable[int]) -> list[Call]:
        """Return the operations on the paths from `starts` to `ends`."""
        starts = {*starts}
        inside = self.between(starts, ends)
        return [
            call
            for call in self.run.calls
            if not inside.isdisjoint(call.inputs)
            and any(key in inside and key not in starts for key in call.outputs)
        ]

    def changing(self, starts: Iterable[int], ends: Iterable[int]) -> list[Call]:
        """Return the operations on these paths that do more than move numbers."""
        return [call for call in self.calls(starts, ends) if call.name not in MOVES]

    def products(self, starts: Iterable[int], ends: Iterable[int]) -> list[Call]:
        """Return the matrix products on these paths."""
        return [call for call in self.calls(starts, ends) if call.name in PRODUCTS]
