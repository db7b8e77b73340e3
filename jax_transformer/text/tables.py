"""Files whose lines are records: .tsv, .csv and .jsonl; two fields of a record are a pair."""

import contextlib
import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError, shorten
from jax_transformer.text.text_files import (
    LONGEST_LINE,
    BadLine,
    check_lines,
    decode_line,
    unpacked_suffix,
)

# A .tsv file has no quotes: each tab ends a column.
DIALECTS = {".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}, ".csv": {}, ".jsonl": {}}


def table_suffix(path: str | os.PathLike[str]) -> str | None:
    """Return ".tsv", ".csv" or ".jsonl", by the name of a file; None if its lines are texts."""
    if (suffix := unpacked_suffix(path)) in DIALECTS:
        return suffix
    check_lines(path)
    return None


def has_header(path: Path, columns: tuple[str, ...]) -> bool:
    """Return whether the first record of a table names its columns: they are chosen by name."""
    return table_suffix(path) != ".jsonl" and not all(map(str.isdecimal, columns))


def read_records(
    lines: Iterator[bytes | None], path: Path, columns: tuple[str, ...]
) -> Iterator[bytes | BadLine | None]:
    r"""Yield the chosen fields of each record of a table as a line, with tabs between them.

    In the fields of a pair, tabs and line ends become spaces. A record above `LONGEST_LINE` bytes
    is None. A blank line gives blank fields.

    Args:
        columns: Names of the header or keys, "translation.de" for a key within another one; or
            numbers from 1, for a table without a header.
    """
    bad: list[BadLine] = []
    texts = _texts(lines, str(path), bad)
    is_json = table_suffix(path) == ".jsonl"
    dialect = DIALECTS[table_suffix(path)]
    reader = map(_parsed, texts) if is_json else csv.reader(texts, strict=True, **dialect)
    number, chosen = 0, [column.split(".") for column in columns]
    if has_header(path, columns):
        number, chosen = 1, _places(reader, path, columns)
    elif not is_json:
        chosen = [[int(column) - 1] for column in columns]
    while True:
        number += 1
        try:
            record = next(reader)
            if bad:
                raise bad.pop()
            fields = [_field(record, keys) if record else "" for keys in chosen]
            if len(fields) > 1:
                fields = [re.sub(r"[\t\r\n]+", " ", field) for field in fields]
            line = "\t".join(fields).encode()
            yield line if len(line) <= LONGEST_LINE else None
        except StopIteration:
            return
        except BadLine as error:
            yield error
        except (csv.Error, ValueError, RecursionError) as error:
            bad.clear()
            fault = f"has no text in {' and '.join(columns)} ({error}); mend it"
            yield BadLine(f"{path}:{number}", fault)


def _places(reader: Iterator[list[str]], path: Path, columns: tuple[str, ...]) -> list[list[int]]:
    """Return the places of columns in the header, which is read here."""
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise InputError(f"{path}: its header cannot be read ({error}); mend it") from error
    if missing := [column for column in columns if column not in header]:
        found = f"its header has no {missing[0]!r}, but {shorten(header)}"
        raise InputError(f"{path}: {found}; name others of its columns")
    return [[header.index(column)] for column in columns]


def _texts(lines: Iterator[bytes | None], name: str, bad: list[BadLine]) -> Iterator[str]:
    """Yield lines as text; in the place of a bad one nothing, and the error in `bad`."""
    for number, line in enumerate(lines, start=1):
        try:
            yield decode_line(line, name, number) + "\n"
        except BadLine as error:
            bad.append(error)
            yield ""


def _parsed(text: str) -> Any:
    return json.loads(text) if text.strip() else None


def _field(record: Any, keys: list[Any]) -> str:
    field = record
    with contextlib.suppress(LookupError, TypeError):
        for key in keys:
            field = field[key]
        if isinstance(field, str):
            return field
    raise ValueError(f"it is {shorten(record)}")
