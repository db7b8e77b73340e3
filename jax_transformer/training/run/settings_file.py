"""Settings in a YAML file: a dataclass as a mapping of its fields, nested ones as nested mappings.

Read with yaml.safe_load, which makes nothing but plain data, and checked against the fields' types.
"""

import dataclasses
import difflib
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from jax_transformer.errors import InputError

Settings = TypeVar("Settings")


def read_settings(path: Path, default: Settings) -> Settings:
    """Return `default` with the fields replaced that the file names.

    Args:
        path: YAML file.
        default: A dataclass instance; what the file does not name stays as it is here.

    Raises:
        InputError: The file cannot be read, is no mapping, names a field that does not exist, or
            gives one a value of another type.
    """
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name a YAML file of settings") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: is no YAML ({reason})") from error
    return _replaced(default, read, str(path))


def write_settings(path: Path, settings: Any, without: Collection[str] = ()) -> None:
    """Write a dataclass so that `read_settings` gives it back; arguments as `to_yaml`."""
    path.write_text(to_yaml(settings, without), encoding="utf-8")


def to_yaml(settings: Any, without: Collection[str] = ()) -> str:
    """Return a dataclass as the text of a YAML file.

    Args:
        settings: The dataclass.
        without: Names of its fields that are left out.
    """
    written = {
        name: value for name, value in dataclasses.asdict(settings).items() if name not in without
    }
    return yaml.safe_dump(_plain(written), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _replaced(default: Settings, read: Any, place: str) -> Settings:
    if not isinstance(read, Mapping):
        raise InputError(f"{place}: must map names of settings to values, but is {read!r}")
    hints = get_type_hints(type(default))
    changes = {}
    for name, value in read.items():
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it knows {', '.join(hints)}"
            raise InputError(f"{place}: knows no setting {name}{hint}")
        here = f"{place}: {name}"
        if dataclasses.is_dataclass(hints[name]):
            changes[name] = _replaced(getattr(default, name), value, here)
        else:
            changes[name] = _checked(value, hints[name], here)
    return dataclasses.replace(default, **changes)


def _checked(value: Any, hint: Any, place: str) -> Any:
    """Return the value as the type that a field is annotated with."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for choice in choices:
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
    # YAML 1.1 takes 1e-3 for text: a number needs a point before its exponent.
    remedy = "; write 1.0e-3, not 1e-3" if isinstance(value, str) and float in choices else ""
    raise InputError(f"{place}={value!r} must be {words}{remedy}")


def _word(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return "one of " + ", ".join(map(repr, get_args(choice)))
    return "null" if choice is type(None) else choice.__name__
