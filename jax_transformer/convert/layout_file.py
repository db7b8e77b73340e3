"""A layout, and the config that belongs to it, as a TOML file that a person can read and edit.

`--layout FILE.toml` and `get_layout` take such a file wherever they take the name of a layout. Its
[[rows]] have the attributes of `Row` ("parameters" are its paths), its [[buffers]] those of
`PositionTable` or `FixedBuffer`, its [config] the fields of a config, after a "preset" or not, its
[masks] those of `Masks` that are false.

Nothing in a file is trusted: sizes are bounded, and every fault is one line that names the place.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import FixedBuffer, PositionTable
from jax_transformer.convert.table import (
    USUAL_MASKS,
    WORD,
    Buffer,
    Join,
    Layout,
    Masks,
    Operation,
    Row,
    check_possible,
)
from jax_transformer.errors import InputError, one_line, shorten
from jax_transformer.storage.reading import read_text
from jax_transformer.storage.weights.checks import WeightFileError, check_target
from jax_transformer.storage.writing import replace_file

NO_WEIGHTS = "No weights tell the rates of dropout, the initialization, pad_id, bos_id and eos_id."
MAX_ROWS = 10_000
MAX_DOTS = 64  # of a line
MAX_LENGTH = 2**17  # rows of a position table: some hundred megabytes

Name = Annotated[str, Meta(min_length=1, max_length=255)]


class LayoutFile(NamedTuple):
    """A layout, and the config of the models that have it.

    Attributes:
        layout: The names and shapes.
        config: The shape of the models; None where the file has none.
    """

    layout: Layout
    config: TransformerConfig | None = None


class _Table(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A table of TOML; attributes at their defaults are not written."""


class _Row(_Table):
    foreign: Name
    parameters: Name | Annotated[tuple[Name, ...], Meta(max_length=MAX_ROWS)]
    operation: Literal["transpose"] | None = None
    shape: tuple[int | str, ...] = ()
    stack: Join = "rows"
    zeros: bool = False
    when: tuple[Name, bool | int | float | str] | None = None

    def __post_init__(self) -> None:
        self.row()  # what it refuses is refused with the place in the file

    def row(self) -> Row:
        operation = Operation(self.operation is not None, self.shape)
        row = Row(self.foreign, self.parameters, operation, self.zeros, self.when, self.stack)
        for template, separator in ((row.foreign, "."), *((path, "/") for path in row.paths)):
            # Two words side by side take long to match.
            if any(len(WORD.findall(part)) > 1 for part in template.split(separator)):
                raise InputError(
                    f"{shorten(template)} must hold at most one {{word}} between two {separator!r}"
                )
        return row


class _Buffer(_Table):
    foreign: Name
    kind: Literal["position_table", "range", "triangle", "list"]
    shape: Annotated[tuple[int | str, ...], Meta(max_length=8)]
    length: Annotated[int, Meta(le=MAX_LENGTH)] | None = None
    dtype: str = ""
    values: tuple[bool | int | float, ...] = ()

    def __post_init__(self) -> None:
        self.buffer()

    def buffer(self) -> Buffer:
        if self.kind == "position_table":
            return Buffer(self.foreign, PositionTable(self.shape, self.length))
        return Buffer(self.foreign, FixedBuffer(self.kind, self.shape, self.dtype, self.values))


class _File(_Table):
    name: Name
    rows: Annotated[list[_Row], Meta(min_length=1, max_length=MAX_ROWS)]
    scope: Annotated[str, Meta(max_length=255)] = ""
    unused: tuple[Name, ...] = ()
    config: dict[str, Any] | None = None
    buffers: list[_Buffer] = []
    masks: Masks | None = None


def is_layout_file(layout: object) -> bool:
    """Whether a layout is given as the path of a file, and not by its name."""
    return isinstance(layout, os.PathLike) or (isinstance(layout, str) and layout.endswith(".toml"))


def read_layout(path: str | os.PathLike) -> LayoutFile:
    """Read the layout in a .toml file at `path`, and its config where the file has one.

    Raises:
        InputError: The file cannot be read, or is wrong somewhere; names the file and the row.
    """
    try:
        return _parse(read_text(path, "is no readable layout"))
    except InputError as error:
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise WeightFileError(message) from error


def write_layout(
    path: str | os.PathLike,
    layout: Layout,
    config: TransformerConfig | None = None,
    *,
    overwrite: bool = False,
    comment: str = "",
) -> None:
    """Write a layout to a file that `read_layout` reads.

    Args:
        path: A file whose name ends in .toml. A link at this path is replaced, never followed.
        layout: What is written.
        config: A config that is written beside it; None writes none.
        overwrite: Whether an existing file is replaced.
        comment: Lines that stand at its beginning.

    Raises:
        InputError: The file exists, its folder does not, or TOML cannot hold a part of the layout,
            for example a buffer that a function computes.
    """
    import tomli_w

    path = Path(path)
    if path.suffix != ".toml":
        raise WeightFileError(f"{path}: the name must end in .toml")
    check_target(path, overwrite)
    try:
        text = tomli_w.dumps(msgspec.to_builtins(_file_of(layout, config)))
        if _parse(text) != LayoutFile(layout, config):
            raise InputError("it would not come back as it is written")
        comment = comment if config is None else f"{comment}\n{NO_WEIGHTS}"
        remarks = "".join(f"# {one_line(line, 400)}\n" for line in comment.split("\n") if line)
        content = (remarks + text).encode()
    except (TypeError, ValueError) as error:
        raise WeightFileError(f"{path} cannot hold this layout: {error}") from error
    replace_file(path, content)


def _file_of(layout: Layout, config: TransformerConfig | None) -> _File:
    rows = []
    for row in layout.rows:
        operation = "transpose" if row.operation.transposed else None
        shape = row.operation.shape
        parameters = row.paths if len(row.paths) > 1 else row.paths[0]
        rows.append(_Row(row.foreign, parameters, operation, shape, row.stack, row.zeros, row.when))
    buffers = []
    for buffer in layout.buffers:
        name, value = buffer.foreign, buffer.value
        if type(value) is FixedBuffer:
            kind, dtype, values = value.kind, value.dtype, value.values
            buffers.append(_Buffer(name, kind, value.shape, dtype=dtype, values=values))
        elif type(value) is PositionTable:
            buffers.append(_Buffer(name, "position_table", value.shape, value.length))
        else:
            raise InputError(f"the buffer {name!r} is computed by a function")
    fields = None
    if config is not None:  # TOML cannot hold None, which is the default wherever it is possible
        values = config.to_dict().items()
        fields = {name: value for name, value in values if value is not None}
    masks = layout.masks if layout.masks != USUAL_MASKS else None
    return _File(layout.name, rows, layout.scope, layout.unused, fields, buffers, masks)


def _parse(text: str) -> LayoutFile:
    for number, line in enumerate(text.split("\n"), 1):
        # A dotted key takes time and memory that grow with the square of its parts.
        if line.count(".") > MAX_DOTS:
            raise InputError(f"line {number} has more than {MAX_DOTS} dots; break it")
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except msgspec.ValidationError as error:
        raise InputError(one_line(str(error))) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not TOML: {shorten(str(error))}") from error
    rows = tuple(table.row() for table in file.rows)
    buffers = tuple(table.buffer() for table in file.buffers)
    masks = file.masks or USUAL_MASKS
    layout = Layout(file.name, rows, buffers, file.scope, file.unused, masks)
    for row in rows:
        check_possible(layout, row)
    return LayoutFile(layout, None if file.config is None else config_of(file.config, "config"))


def config_of(fields: Mapping[str, Any], origin: object) -> TransformerConfig:
    """Return the config of a file's fields, after a "preset" or not; `origin` is in messages."""
    fields = dict(fields)
    preset = fields.pop("preset", None)
    try:
        if preset is None:
            return TransformerConfig.from_dict(fields)
        return TransformerConfig.preset(preset, **fields)
    except InputError as error:
        raise InputError(f"{origin}: {one_line(str(error))}") from error
