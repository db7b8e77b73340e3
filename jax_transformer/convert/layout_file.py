"""A layout, and the config that belongs to it, as a TOML file that a person can read and edit.

`--layout FILE.toml` and `get_layout` take such a file wherever they take the name of a layout:

    name = "my_model"

    [config]                                  # may be left out; a "preset" may come first
    preset = "pre_norm"
    num_heads = 8

    [[rows]]                                  # the attributes of `Row`
    foreign = "enc.{i}.attn.in_proj_weight"
    parameters = ["encoder/layers_{i}/self_attention/query/kernel", "..."]
    operation = "transpose"                   # or left out
    stack = "heads"

    [[buffers]]                               # the attributes of `PositionTable`
    foreign = "pos.pe"
    kind = "position_table"
    shape = [1, "length", "d_model"]
    length = 5000

Nothing in a file is trusted: sizes are bounded, and every fault is one line that names the place.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.position_table import PositionTable
from jax_transformer.convert.table import WORD, Buffer, Layout, Operation, Row, check_possible
from jax_transformer.errors import InputError, one_line, shorten
from jax_transformer.storage.faults import faults_named
from jax_transformer.storage.reading import read_text
from jax_transformer.storage.weights.checks import WeightFileError
from jax_transformer.storage.writing import staged_file

MAX_NAME = 255  # characters of a name or a path
MAX_ROWS = 10_000
MAX_DOTS = 64  # of a line
MAX_LENGTH = 2**17  # rows of a position table: some hundred megabytes
KIND = "position_table"


class LayoutFile(NamedTuple):
    """What a file holds.

    Attributes:
        layout: The names and shapes.
        config: The config of the models that have this layout; None where the file has none.
    """

    layout: Layout
    config: TransformerConfig | None = None


def is_layout_file(layout: object) -> bool:
    """Whether a layout is given as the path of a file, and not by its name."""
    return isinstance(layout, os.PathLike) or (isinstance(layout, str) and layout.endswith(".toml"))


def read_layout(path: str | os.PathLike) -> LayoutFile:
    """Read a layout, and its config where the file has one.

    Args:
        path: A TOML file, as `write_layout` writes it or a person does.

    Raises:
        InputError: The file cannot be read, or something in it is unknown or wrong; names the
            file and the row.
    """
    path = Path(path)
    text = read_text(path, "is no readable layout")
    for number, line in enumerate(text.split("\n"), 1):
        # A dotted key takes time and memory that grow with the square of its parts.
        if line.count(".") > MAX_DOTS:
            raise WeightFileError(f"{path}: line {number} has more than {MAX_DOTS} dots; break it")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{path} is no TOML: {shorten(str(error))}") from error
    try:
        return _from_values(values)
    except InputError as error:
        raise WeightFileError(f"{path}: {error}") from error


def write_layout(
    path: str | os.PathLike,
    layout: Layout,
    config: TransformerConfig | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a layout to a temporary file, read it back, and then rename it.

    Args:
        path: A file whose name ends in .toml. A link at this path is replaced, never followed.
        layout: The names and shapes.
        config: The config of the models that have this layout; None writes none.
        overwrite: Whether an existing file may be replaced.

    Raises:
        InputError: The file exists, its folder does not, or TOML has no form for a part of the
            layout: a buffer that is no `PositionTable`.
    """
    import tomli_w

    path = Path(path)
    if path.suffix != ".toml":
        raise WeightFileError(f"{path}: the name must end in .toml")
    if not path.parent.is_dir():
        raise WeightFileError(f"{path}: the folder {path.parent} does not exist; create it first")
    if os.path.lexists(path) and (path.is_dir() or not overwrite):
        raise WeightFileError(f"{path} already exists; choose another name or allow overwriting")
    values = _to_values(layout, config)
    with (
        faults_named(path, "cannot be written", OSError, ValueError),
        staged_file(path) as temporary,
    ):
        temporary.write_bytes(tomli_w.dumps(values).encode())
        try:
            same = read_layout(temporary) == LayoutFile(layout, config)
        except InputError as error:
            reason = str(error).removeprefix(f"{temporary}: ")
            raise WeightFileError(f"{path} cannot hold this layout: {reason}") from error
        if not same:
            raise WeightFileError(f"{path}: the layout did not come back as it was written")


def _to_values(layout: Layout, config: TransformerConfig | None) -> dict[str, Any]:
    """Return what TOML writes; attributes at their defaults are left out."""
    values: dict[str, Any] = {"name": layout.name}
    if layout.scope:
        values["scope"] = layout.scope
    if layout.unused:
        values["unused"] = list(layout.unused)
    if config is not None:  # None has no word in TOML, and is the default wherever it is possible
        fields = config.to_dict().items()
        values["config"] = {name: value for name, value in fields if value is not None}
    values["rows"] = [_row_to_values(row) for row in layout.rows]
    if layout.buffers:
        values["buffers"] = [_buffer_to_values(layout, buffer) for buffer in layout.buffers]
    return values


def _row_to_values(row: Row) -> dict[str, Any]:
    single = isinstance(row.parameters, str)
    values: dict[str, Any] = {
        "foreign": row.foreign,
        "parameters": row.parameters if single else list(row.parameters),
    }
    if row.operation.transposed:
        values["operation"] = "transpose"
    if row.operation.shape:
        values["shape"] = list(row.operation.shape)
    if row.stack != "rows":
        values["stack"] = row.stack
    if row.zeros:
        values["zeros"] = True
    if row.when is not None:
        values["when"] = list(row.when)
    return values


def _buffer_to_values(layout: Layout, buffer: Buffer) -> dict[str, Any]:
    if not isinstance(buffer.value, PositionTable):
        raise InputError(
            f"layout {layout.name!r}: the buffer {buffer.foreign!r} is computed by a function, "
            "which a file cannot hold; only a PositionTable can be written"
        )
    length = {} if buffer.value.length is None else {"length": buffer.value.length}
    shape = list(buffer.value.shape)
    return {"foreign": buffer.foreign, "kind": KIND, "shape": shape, **length}


def _from_values(values: Mapping[str, Any]) -> LayoutFile:
    _check_keys(values, "the file", ("name", "rows"), ("scope", "unused", "config", "buffers"))
    name = _text(values["name"], "name")
    scope = values.get("scope", "")
    if scope != "":
        _text(scope, "scope")
    unused = tuple(
        _text(item, "unused") for item in _items(values.get("unused", []), "unused", "names")
    )
    tables = _items(values["rows"], "rows", "tables")
    if not 1 <= len(tables) <= MAX_ROWS:
        raise InputError(f"rows must be 1 to {MAX_ROWS:,} tables, not {len(tables):,}")
    rows = tuple(_placed("row", index, _row, table) for index, table in enumerate(tables))
    buffers = tuple(
        _placed("buffer", index, _buffer, table)
        for index, table in enumerate(_items(values.get("buffers", []), "buffers", "tables"))
    )
    layout = Layout(name, rows, buffers, scope, unused)
    for row in rows:
        check_possible(layout, row)
    return LayoutFile(layout, _config(values["config"]) if "config" in values else None)


def _placed(kind: str, index: int, read: Any, values: object) -> Any:
    """Return what `read` makes of a table; its refusal names the table."""
    named = isinstance(values, dict) and isinstance(values.get("foreign"), str)
    place = f"{kind} {index + 1}" + (f" ({shorten(values['foreign'])})" if named else "")
    if not isinstance(values, dict):
        raise InputError(f"{place}: {shorten(values)} must be a table of keys and values")
    try:
        return read(values)
    except InputError as error:
        raise InputError(f"{place}: {one_line(str(error))}") from error


def _row(values: Mapping[str, Any]) -> Row:
    known = ("operation", "shape", "stack", "zeros", "when")
    _check_keys(values, "a row", ("foreign", "parameters"), known)
    foreign = _template(values["foreign"], "foreign", ".")
    if isinstance(values["parameters"], str):
        parameters: str | tuple[str, ...] = _template(values["parameters"], "parameters", "/")
    else:
        listed = _items(values["parameters"], "parameters", "paths")
        parameters = tuple(_template(path, "parameters", "/") for path in listed)
    operation = values.get("operation")
    if operation not in (None, "transpose"):
        raise InputError(f"operation={shorten(operation)} must be 'transpose', or left out")
    shape = tuple(_items(values.get("shape", []), "shape", "lengths"))
    zeros = values.get("zeros", False)
    if type(zeros) is not bool:
        raise InputError(f"zeros={shorten(zeros)} must be true or false")
    stack = values.get("stack", "rows")
    if not isinstance(stack, str):
        raise InputError(f"stack={shorten(stack)} must be a word")
    when = _when(values["when"]) if "when" in values else None
    return Row(foreign, parameters, Operation(operation is not None, shape), zeros, when, stack)


def _when(value: object) -> tuple[str, Any]:
    pair = _items(value, "when", "values")
    if len(pair) != 2 or not isinstance(pair[0], str) or isinstance(pair[1], list | dict):
        raise InputError(
            f"when={shorten(value)} must be a field of the config and its value, as "
            '["output_projection", "tied"]'
        )
    return pair[0], pair[1]


def _buffer(values: Mapping[str, Any]) -> Buffer:
    _check_keys(values, "a buffer", ("foreign", "kind", "shape"), ("length",))
    foreign = _text(values["foreign"], "foreign")
    if values["kind"] != KIND:
        raise InputError(f"kind={shorten(values['kind'])} must be {KIND!r}")
    length = values.get("length")
    if type(length) is int and length > MAX_LENGTH:
        raise InputError(f"length={shorten(length)} must be at most {MAX_LENGTH:,}")
    return Buffer(
        foreign, PositionTable(tuple(_items(values["shape"], "shape", "axes", most=8)), length)
    )


def _config(fields: object) -> TransformerConfig:
    if not isinstance(fields, dict):
        raise InputError(f"config={shorten(fields)} must be a table of fields")
    fields = dict(fields)
    preset = fields.pop("preset", None)
    try:
        if preset is None:
            return TransformerConfig.from_dict(fields)
        return TransformerConfig.preset(_text(preset, "preset"), **fields)
    except InputError as error:
        raise InputError(f"config: {one_line(str(error))}") from error


def _check_keys(
    values: Mapping[str, Any], what: str, needed: Iterable[str], others: Iterable[str]
) -> None:
    for key in needed:
        if key not in values:
            raise InputError(f"{what} must have {key!r}")
    known = [*needed, *others]
    for key in values:
        if key not in known:
            raise InputError(f"{shorten(key)} is no key of {what}: {', '.join(known)}")


def _items(value: object, key: str, kind: str, most: int = MAX_ROWS) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise InputError(f"{key}={shorten(value)} must be a list of at most {most:,} {kind}")
    return value


def _text(value: object, key: str) -> str:
    sound = isinstance(value, str) and 1 <= len(value) <= MAX_NAME and value.isprintable()
    if not sound:
        raise InputError(f"{key}={shorten(value)} must be 1 to {MAX_NAME} printable characters")
    return value


def _template(value: object, key: str, separator: str) -> str:
    """Return a name with {words}; refuse what takes long to match: two words side by side."""
    text = _text(value, key)
    for part in text.split(separator):
        if len(WORD.findall(part)) > 1:
            raise InputError(
                f"{key}={shorten(text)} must hold at most one {{word}} between two {separator!r}"
            )
    return text
