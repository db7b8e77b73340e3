"""Settings in a YAML file: a dataclass as a mapping of its fields, nested ones as nested mappings.

Only plain data are read (see `read_yaml`), and they are checked against the fields' types.
"""

import contextlib
import dataclasses
import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from jax_transformer.errors import InputError
from jax_transformer.storage.faults import one_line, shorten
from jax_transformer.storage.yaml_file import read_yaml

Settings = TypeVar("Settings")


def read_settings(path: Path, default: Settings) -> Settings:
    """Return `default` with the fields replaced that the file names.

    Args:
        path: YAML file.
        default: A dataclass instance; fields that the file does not name keep its values.

    Raises:
        InputError: The file cannot be read, is no mapping, names a field that does not exist, or
            gives one a value of another type.
    """
    return replace_fields(default, read_mapping(path), str(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        InputError: As `read_yaml`, or the file is no mapping.
    """
    return _checked_mapping(read_yaml(path, "is no YAML file of settings"), str(path))


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Return a mapping of settings as the text of a YAML file."""
    return yaml.safe_dump(_plain(settings), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def replace_fields(default: Settings, read: Any, place: str) -> Settings:
    """Return a dataclass with the fields replaced that a mapping names.

    Args:
        default: A dataclass instance.
        read: The mapping; one for each nested dataclass.
        place: Where the mapping stands, for messages.

    Raises:
        InputError: As `read_settings`.
    """
    hints = get_type_hints(type(default))
    changes = {}
    for name, value in _checked_mapping(read, place).items():
        if name not in hints:
            name = one_line(name, 80)
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it knows {', '.join(hints)}"
            raise InputError(f"{place}: knows no setting {name}{hint}")
        here = f"{place}: {name}"
        if dataclasses.is_dataclass(hints[name]):
            changes[name] = replace_fields(getattr(default, name), value, here)
        else:
            changes[name] = _checked(value, hints[name], here)
    return dataclasses.replace(default, **changes)


def _checked_mapping(read: Any, place: str) -> dict[str, Any]:
    if not isinstance(read, Mapping):
        raise InputError(f"{place}: must map names of settings to values, but is {shorten(read)}")
    for name in read:
        if not isinstance(name, str):
            raise InputError(f"{place}: the name {shorten(name)} of a setting must be text")
    return dict(read)


def _checked(value: Any, hint: Any, place: str) -> Any:
    """Return the value as the type that a field is annotated with."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for choice in choices:
        if get_origin(choice) is tuple:
            items = [value] if choice == tuple[Path, ...] and isinstance(value, str) else value
            if isinstance(items, list | tuple):
                with contextlib.suppress(InputError):
                    return tuple(_checked(item, get_args(choice)[0], place) for item in items)
            continue
        if get_origin(choice) is Literal:
            if value in get_args(choice):
                return value
        elif choice is Path and isinstance(value, str):
            return Path(value)
        elif choice is float and type(value) in (int, float):
            return float(value)
        elif type(value) is choice:
            return value
    words = " or ".join(_word(choice) for choice in choices)
    # YAML 1.1 reads 1e-3 as text: a number needs a point before its exponent.
    remedy = "; write 1.0e-3, not 1e-3" if isinstance(value, str) and float in choices else ""
    raise InputError(f"{place}={shorten(value)} must be {words}{remedy}")


def _word(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return "one of " + ", ".join(map(repr, get_args(choice)))
    if get_origin(choice) is tuple:
        names = {str: "texts", Path: "paths", float: "numbers"}
        return f"a list of {names[get_args(choice)[0]]}"
    return "null" if choice is type(None) else choice.__name__
