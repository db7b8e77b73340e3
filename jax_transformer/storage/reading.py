"""The one way to read a file that a user names: a regular file of a bounded size.

A file is opened once, without waiting, and everything is checked and read on that descriptor: a
FIFO does not block, a device is not read, and a growing file is not followed. Links are followed.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from jax_transformer.errors import InputError, one_line, shorten

# Most bytes of a file, by its kind. Each is a multiple of the largest real file that is known.
MAX_SIZE = 2**20  # settings and descriptions: an index of 10,000 shards, 250 language codes
MAX_YAML = 2**17  # settings of a run or a trainer, of 10 kB; the parser reads 100 kB a second
MAX_RECORDS = 2**26  # what this library itself wrote: a log of 500,000 reports, a list of files
MAX_TOKENIZER = 2**26  # tokenizer.json of a large vocabulary has 40 MB, that of NLLB 17 MB
MAX_CARRIED = 2**24  # one file of a Hugging Face folder that is carried over: a model card

# The flags that a system lacks are for files that it lacks, too.
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")
)
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON writes it, or a half of a pair


@contextlib.contextmanager
def errors_naming(
    path: Path, fault: str, *kinds: type[Exception], error: type[InputError] = InputError
) -> Iterator[None]:
    """Turn errors of these kinds, whose messages name no file, into an input error."""
    try:
        yield
    except InputError:
        raise
    except kinds as cause:
        reason = f": {cause.strerror}" if isinstance(cause, OSError) else ""
        raise error(f"{path} {fault} ({type(cause).__name__}{reason})") from cause


def open_regular(
    path: str | os.PathLike[str],
    fault: str,
    largest: int | None = None,
    *,
    error: type[InputError] = InputError,
) -> io.BufferedReader:
    """Open a regular file for reading bytes; its fault may be "cannot be read"."""
    path = Path(path)
    with errors_naming(path, fault, OSError, ValueError, error=error):
        descriptor = os.open(path, _FLAGS)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > (largest or status.st_size):
                raise _no_regular_file(path, largest, error)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise


def read_bytes(path: str | os.PathLike[str], fault: str, largest: int = MAX_SIZE) -> bytes:
    """Return the content of a regular file of at most `largest` bytes, even if it grows."""
    with open_regular(path, fault, largest) as file, errors_naming(Path(path), fault, OSError):
        expected = os.fstat(file.fileno()).st_size + 1
        content = file.read(expected)
        if len(content) == expected:  # it grows, or it is a file of /proc, whose size is 0
            content += file.read(max(0, largest + 1 - expected))
    if len(content) > largest:
        raise _no_regular_file(Path(path), largest)
    return content


def read_text(path: str | os.PathLike[str], fault: str, largest: int = MAX_SIZE) -> str:
    """Return the UTF-8 text of a regular file, without a byte-order mark at its start."""
    content = read_bytes(path, fault, largest)
    with errors_naming(Path(path), f"{fault}: it is not UTF-8", UnicodeDecodeError):
        return content.decode("utf-8-sig")


def read_json(path: str | os.PathLike[str], largest: int = MAX_SIZE) -> dict[str, Any]:
    """Return the JSON object in a regular file of at most `largest` bytes; see `parse_json`."""
    return parse_json(read_text(path, "is no readable JSON", largest), path)


def parse_json(content: str | bytes, name: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a JSON object as RFC 8259 defines it: without NaN and numbers beyond a float."""
    path = Path(name)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            name, count = Counter(name for name, _ in pairs).most_common(1)[0]
            raise InputError(f"{path}: the name {shorten(name)} occurs {count} times")
        return fields

    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        values = json.loads(
            text, object_pairs_hook=unique, parse_constant=_refuse_number, parse_float=_finite
        )
        if _LONE_SURROGATE.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except InputError:
        raise
    except RecursionError as error:
        raise InputError(f"{path} is no readable JSON (it is nested too deep)") from error
    except ValueError as error:
        raise InputError(f"{path} is no readable JSON ({one_line(str(error), 200)})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold a JSON object")
    return values


def json_digest(content: Any) -> str:
    """Return the sha256 of JSON content, whatever the order of its names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path, largest: int | None = None) -> str:
    """Return the sha256 of a regular file."""
    with open_regular(path, "cannot be read", largest) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def library_digest() -> str:
    """Return the sha256 of this library's source files."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def with_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in the place of its lists, which are not hashable."""
    if isinstance(value, dict):
        return {name: with_tuples(item) for name, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def _no_regular_file(
    path: Path, largest: int | None, error: type[InputError] = InputError
) -> InputError:
    size = "" if largest is None else f" of at most {largest:,} bytes"
    return error(f"{path} is no regular file{size}")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _refuse_number(digits: str) -> NoReturn:
    raise ValueError(f"{digits:.40} is no number of JSON")
