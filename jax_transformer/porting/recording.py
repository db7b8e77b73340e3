"""A recording: the operations that a user's program executed in some runs, and its other tensors.

A file of it is written in the user's process, by the program that `program` returns. The weights
are not in it: they come from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.errors import InputError, one_line, shorten
from jax_transformer.porting.operations import OVERWRITE, SHAPES_ALONE
from jax_transformer.storage import weights as files
from jax_transformer.storage.weights.trained import plain_names

MOST_NUMBERS = 2**28  # of one value
MOST_RUNS = 16

SETTINGS = """\
# Paste this where your program has built `model` and loaded its weights; it needs torch alone.
# It runs the model and writes recorded.pt: the operations and the ids, not the weights.
import torch

TABLES = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
SOURCES = TARGETS = min([part.num_embeddings for part in TABLES] or [10])  # ids are below these
PAD = next((part.padding_idx for part in TABLES if part.padding_idx is not None), 0)
ROWS, DTYPE = 3, None  # of a batch; None is the model's own, torch.float64 converts it first
# Source and target tokens of each run; a run that the model refuses is left out. What reaches
# farther than the longest run, as windows and buckets of distances may, is not seen.
LENGTHS = [(17, 13), (5, 9), (41, 37), (150, 141)]


def call(model, src, tgt):  # ids [rows, length] -> logits [rows, length, V] or [rows * length, V]
    # seen = (src != PAD)[:, None, None]  # masks, if your model takes them: True may be read
    # past = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).tril()
    # hidden = torch.nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
    return model(src, tgt)


"""
RECORD_ALL = """

def record_all(path="recorded.pt"):
    device, tensors, count = next(model.parameters()).device, {"pad": torch.tensor([PAD])}, 0
    model.to(DTYPE or next(model.parameters()).dtype).eval()
    for lengths in LENGTHS:
        ids = []
        for size, length, ends in zip((SOURCES, TARGETS), lengths, ((2, 1), (1, 2))):
            rows = torch.randint(size - 1, (ROWS, length))
            rows += rows >= PAD  # no token is padding
            for row, end in enumerate(ends, 1):
                rows[row : row + 1, length - max(1, end * length // 4) :] = PAD
            ids.append(rows.to(device))
        try:
            run = record(model, call, *ids)
        except Exception as error:
            print(f"no run of {lengths[0]} source and {lengths[1]} target tokens: {error!r}")
            continue
        tensors |= {f"{count}.{name}": tensor for name, tensor in run.items()}
        count += 1
    if not count:
        raise RuntimeError("the model refused every run: change call or LENGTHS")
    torch.save(tensors, path)
    print(f"{path}: {count} runs")


record_all()
"""


class Call(NamedTuple):
    """One operation that was executed."""

    name: str  # without library and overload, for example "addmm"
    operation: str  # its whole name
    arguments: list[Any]  # as in JSON: {"value": 7} is the value of key 7
    keywords: dict[str, Any]  # the same by name
    outputs: tuple[int | None, ...]  # keys of what it returned; None for what is no tensor
    shapes: tuple[tuple[int, ...] | None, ...]  # of the outputs
    path: str  # of the module in which it was executed
    line: str  # file and number of the user's line
    reads: tuple[int, ...]  # keys of all arguments
    inputs: tuple[int, ...]  # those of them whose numbers the outputs depend on

    @property
    def operands(self) -> tuple[int, int]:
        """Keys of the two matrices of a product."""
        first = 1 if self.name in ("addmm", "baddbmm", "addbmm", "addmv") else 0
        left, right = self.arguments[first : first + 2]
        return left["value"], right["value"]

    def __str__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"{self.name} ({self.line}){where}"


class Leaf(NamedTuple):
    """A weight or a buffer that a run read, with all its names."""

    key: int
    names: tuple[str, ...]
    shape: tuple[int, ...]


class Part(NamedTuple):
    """One call of a module, and the keys of its outputs and inputs."""

    path: str
    kind: str  # its class
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """One recorded run of the program. A value has a key; keys grow as values are computed."""

    source: int  # key of the source ids [B, S]
    target: int  # of the target ids [B, T]
    output: int  # of what the program returned
    logits: np.ndarray  # what it returned, in its own dtype
    calls: tuple[Call, ...]  # in the order in which they were executed
    leaves: tuple[Leaf, ...]  # weights and buffers that it read
    constants: Mapping[int, np.ndarray]  # other tensors that it read; the ids are among them
    parts: tuple[Part, ...]  # in the order in which they ended

    @property
    def src(self) -> np.ndarray:
        """The source ids [B, S]."""
        return self.constants[self.source]

    @property
    def tgt(self) -> np.ndarray:
        """The target ids [B, T]."""
        return self.constants[self.target]

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of source and target."""
        return self.src.shape[1], self.tgt.shape[1]

    @functools.cached_property
    def producer(self) -> dict[int, Call]:
        """The call that computed each value."""
        return {key: call for call in self.calls for key in call.outputs if key is not None}

    @functools.cached_property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """The shape of each value."""
        shapes = {leaf.key: leaf.shape for leaf in self.leaves}
        shapes |= {key: array.shape for key, array in self.constants.items()}
        for call in self.calls:
            shapes |= dict(zip(call.outputs, call.shapes, strict=True))
        return shapes


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a program executed.

    Attributes:
        runs: Each with other ids and lengths.
        pad_id: Id of padding.
    """

    runs: tuple[Run, ...]
    pad_id: int


def program() -> str:
    """Return the Python program that records a `model` in the user's process."""
    return SETTINGS + Path(__file__).with_name("recorder.py").read_text() + RECORD_ALL


def read_recording(path: str | os.PathLike) -> Recording:
    """Read the file at `path` that the program of `program` wrote.

    Raises:
        InputError: The file is no recording, or holds an operation that is not allowed.
    """
    from jax_transformer.porting.replay import check_run

    tensors = files.read(path)
    remedy = "write one by the program that `jax-transformer suggest` prints"
    pad = tensors.pop("pad", None)
    numbered: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        number, _, rest = name.partition(".")
        if not number.isdecimal() or int(number) >= MOST_RUNS or not rest:
            raise InputError(f"{path} is no recording, it has {shorten(name)}: {remedy}")
        numbered.setdefault(int(number), {})[rest] = tensor
    if pad is None or pad.size != 1 or not numbered:
        raise InputError(f"{path} is no recording, it has no runs: {remedy}")
    try:
        runs = tuple(_run(numbered[number]) for number in sorted(numbered))
        for run in runs:
            check_run(run)
    except InputError:
        raise
    except Exception as error:  # whatever a wrong number or name in the file makes of torch
        raise InputError(f"{path} is no recording, {one_line(repr(error))}: {remedy}") from error
    return Recording(runs, int(pad.reshape(-1)[0]))


def _run(tensors: Mapping[str, np.ndarray]) -> Run:
    text = json.loads(tensors["program"].tobytes())
    plain = plain_names([name for leaf in text["leaves"] for name in leaf["names"]])
    # What the output does not depend on, for example a loss, is left out.
    calls = needed_calls([_call(row) for row in text["calls"]], [text["output"]])
    values = {key for call in calls for key in (*call.outputs, *call.reads)}
    return Run(
        source=text["source"],
        target=text["target"],
        output=text["output"],
        logits=tensors["logits"],
        calls=calls,
        leaves=tuple(
            Leaf(int(x["key"]), tuple(plain.get(n, n) for n in x["names"]), tuple(x["shape"]))
            for x in text["leaves"]
        ),
        constants={int(key): array for key, array in tensors.items() if key.isdecimal()},
        parts=tuple(
            Part(path, kind, tuple(outputs), tuple(key for key in inputs if key in values))
            for path, kind, outputs, inputs in text["parts"]
            if values.issuperset(outputs)
        ),
    )


def needed_calls(
    calls: Sequence[Call], keys: Iterable[int], known: Container[int] = ()
) -> tuple[Call, ...]:
    """Return those of some calls that compute `keys`, in order, where `known` are there already."""
    needed, found = {key for key in keys if key not in known}, []
    for call in reversed(calls) if needed else ():
        if not needed.isdisjoint(call.outputs):
            needed.update(key for key in call.reads if key not in known)
            found.append(call)
    return tuple(reversed(found))


def _call(row: list[Any]) -> Call:
    operation, arguments, keywords, outputs, shapes, path, line = row
    name = operation.split(".")[1] if operation.startswith("aten.") else operation
    reads = tuple(_values([arguments, *keywords.values()]))
    replaced = name in SHAPES_ALONE or name == "copy_"
    if name == OVERWRITE:
        replaced = _covers(*arguments[2:])
    return Call(
        name=name,
        operation=operation,
        arguments=arguments,
        keywords=keywords,
        outputs=tuple(outputs),
        shapes=tuple(None if shape is None else tuple(map(int, shape)) for shape in shapes),
        path=str(path),
        line=str(line),
        reads=reads,
        inputs=reads[1:] if replaced else reads,
    )


def _values(value: Any) -> Iterator[int]:
    if isinstance(value, dict) and "value" in value:
        yield int(value["value"])
    elif isinstance(value, list):
        for item in value:
            yield from _values(item)


def _covers(old: list[Any], new: list[Any]) -> bool:
    """Return whether a write reached each number of an alias; both as offset, shape, strides."""
    places = []
    for offset, shape, strides in (old, new):
        if math.prod(shape) > MOST_NUMBERS:
            raise ValueError(f"an alias of shape {shape}")
        axes = [s * np.arange(n) for n, s in zip(shape, strides, strict=True)]
        places.append(offset + sum(np.ix_(*axes)))
    return bool(np.isin(places[0], places[1]).all())
