"""Changes of files that a user, a disk or a hostile author makes."""

import contextlib
import copy
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SPARSE = 2**36  # bytes of a file that has no blocks on the disk
RAW = "@raw:"  # a string that begins so is written without quotes: what json.dumps cannot write
DEEP = 5000  # brackets
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 8, 10**7, 2**31, 2**63, 2**64, 10**23, -(2**63), 1.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), -float("inf"), f"{RAW}1e999", f"{RAW}{'9' * 5000}"),
    *(True, False, None, "", "x", "0", "NaN", "\0", "\ud800", "a\nb"),
    *("../../etc/passwd", "é" * 300),
    *([], {}, [[]], [1, 2], {"a": 1}, ["x"], f"{RAW}{'[' * DEEP}{']' * DEEP}", f"{RAW}{{'a': 1}}"),
    "x" * 10**6,
)


UNKNOWN = ("", "unknown", "__class__", "\ud800", "x" * 1000, "<script>alert(1)</script>")
# Parts of a tokenizer.json that the library accepts.
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BY_LETTER = {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "ab"}
STEPS: tuple[dict[str, Any], ...] = (
    DOUBLE,
    BY_LETTER,
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "zz"},
    {"type": "Replace", "pattern": {"String": "o"}, "content": "y" * 10**4},
    {"type": "ByteLevel"},
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOKEN_FLAGS = ("normalized", "special", "single_word", "lstrip", "rstrip")
TOKENS = ("a", "é", " ", "", "<pad>", "x" * 10**5)
SPLITS = ("(a+)+$", "", "(?=a)", "(a|aa)+b", "[^", "\\p{L}", "(?<!x)y*")
TOKENIZER_PARTS: dict[str, Callable[[np.random.Generator], Any]] = {
    "normalizer": lambda draw: {
        "type": "Sequence",
        "normalizers": [choose(draw, STEPS)] * int(choose(draw, (1, 5, 22, 40, 1000))),
    },
    "decoder": lambda draw: {
        "type": "Sequence",
        "decoders": [choose(draw, STEPS)] * int(choose(draw, (1, 5, 22, 40, 1000))),
    },
    "pre_tokenizer": lambda draw: (
        {
            "type": "Split",
            "pattern": {"Regex": choose(draw, SPLITS)},
            "behavior": choose(draw, ("Isolated", "Removed", "MergedWithNext")),
            "invert": bool(draw.random() < 0.5),
        }
        if draw.random() < 0.7
        else {"type": "Sequence", "pretokenizers": [BYTES] * int(choose(draw, (1, 5, 22, 40)))}
    ),
    "added_tokens": lambda draw: [
        {
            **{"id": int(choose(draw, (0, 3, 50, 10**6))), "content": choose(draw, TOKENS)},
            **{flag: bool(draw.random() < 0.5) for flag in TOKEN_FLAGS},
        }
    ],
    "truncation": lambda draw: {
        **{"direction": "Right", "strategy": "LongestFirst"},
        **{"max_length": int(choose(draw, (0, 1, 3))), "stride": int(choose(draw, (0, 2, 10)))},
    },
    "padding": lambda draw: {
        **{"strategy": {"Fixed": int(choose(draw, (1, 100, 10**6)))}, "direction": "Left"},
        **{"pad_to_multiple_of": None, "pad_id": int(choose(draw, (0, 10**9)))},
        **{"pad_type_id": 0, "pad_token": "<pad>"},
    },
}
MODEL_PARTS: dict[str, tuple[Any, ...]] = {
    "dropout": (0.5, 1.0),
    "unk_token": ("nothing", None, ""),
    "byte_fallback": (True,),
    "fuse_unk": (True,),
    "ignore_merges": (True,),
    "continuing_subword_prefix": ("##",),
    "end_of_word_suffix": ("</w>",),
}


def mutate_tokenizer(draw: np.random.Generator, data: bytes) -> tuple[bytes, str]:
    """Return a tokenizer.json with a part that the library accepts, and what was done."""
    described = json.loads(data)
    if draw.random() < 0.3 and "model" in described:
        name = choose(draw, list(MODEL_PARTS))
        described["model"][name] = choose(draw, MODEL_PARTS[name])
    else:
        name = choose(draw, list(TOKENIZER_PARTS))
        described[name] = TOKENIZER_PARTS[name](draw)
    return json.dumps(described).encode(), f"{name} of the library"


def choose(draw: np.random.Generator, options: Any) -> Any:
    """Return one of the options."""
    return options[int(draw.integers(len(options)))]


def mutate_bytes(draw: np.random.Generator, data: bytes) -> tuple[bytes, str]:
    """Return changed bytes, and what was done."""
    how = choose(draw, list(BYTE_CHANGES))
    return BYTE_CHANGES[how](draw, bytearray(data)), how


def _flip(draw: np.random.Generator, data: bytearray) -> bytes:
    for _ in range(int(choose(draw, (1, 1, 1, 3, 20)))):
        if data:
            # Half of the flips are near the start, where headers are.
            end = len(data) if draw.random() < 0.5 else min(len(data), 256)
            data[int(draw.integers(end))] ^= 1 << int(draw.integers(8))
    return bytes(data)


def _cut(draw: np.random.Generator, data: bytearray) -> bytes:
    return bytes(data[: int(draw.integers(len(data) + 1))])


def _insert(draw: np.random.Generator, data: bytearray) -> bytes:
    place = int(draw.integers(len(data) + 1))
    data[place:place] = draw.bytes(int(choose(draw, (1, 4, 100))))
    return bytes(data)


def _append(draw: np.random.Generator, data: bytearray) -> bytes:
    return bytes(data) + choose(draw, (b"\0", b"\n", b"x", b"\0" * 4096, bytes(data)))


def _swap(draw: np.random.Generator, data: bytearray) -> bytes:
    size = int(choose(draw, (1, 4, 64)))
    if len(data) >= 2 * size:
        one, other = (int(draw.integers(len(data) - size)) for _ in range(2))
        data[one : one + size], data[other : other + size] = (
            data[other : other + size],
            data[one : one + size],
        )
    return bytes(data)


def _remove(draw: np.random.Generator, data: bytearray) -> bytes:
    place = int(draw.integers(len(data) + 1))
    del data[place : place + int(choose(draw, (1, 8, 64)))]
    return bytes(data)


def _overwrite(draw: np.random.Generator, data: bytearray) -> bytes:
    place = int(draw.integers(len(data) + 1))
    size = int(choose(draw, (1, 8, 64)))
    data[place : place + size] = choose(draw, (b"\xff", b"\0")) * size
    return bytes(data)


BYTE_CHANGES: dict[str, Callable[[np.random.Generator, bytearray], bytes]] = {
    "bits flipped": _flip,
    "cut": _cut,
    "bytes inserted": _insert,
    "bytes appended": _append,
    "blocks swapped": _swap,
    "bytes removed": _remove,
    "bytes overwritten": _overwrite,
}


def mutate_json(draw: np.random.Generator, text: str) -> tuple[str, str]:
    """Return the text of JSON with one value, name or type changed, and what was done."""
    values = json.loads(text)
    places = list(_places(values))
    if not places:
        return "[]", "all replaced by []"
    container, key = choose(draw, places)
    shown = f"{key!r}"
    how = draw.random()
    if how < 0.6:
        value = choose(draw, VALUES)
        container[key] = value
        done = f"{shown} = {value!r:.40}"
    elif how < 0.7 and isinstance(container, dict):
        value = choose(draw, VALUES)
        container[f"{RAW}twice:{key}"] = copy.deepcopy(value)
        done = f"{shown} twice, {value!r:.40}"
    elif how < 0.85:
        del container[key]
        done = f"{shown} removed"
    elif isinstance(container, dict):
        value = choose(draw, VALUES)
        container[choose(draw, UNKNOWN)] = value
        done = f"unknown name, {value!r:.40}"
    else:
        container.insert(key, container[key])
        done = f"item {shown} twice"
    return _dump(values), done


def _places(value: Any) -> list[tuple[Any, Any]]:
    found = []
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, item in items[:200]:
        found.append((value, key))
        found += _places(item)
    return found


def _dump(values: Any) -> str:
    text = json.dumps(values, indent=1)
    parts = text.split(f'"{RAW}')
    for place, part in enumerate(parts[1:], start=1):
        if part.startswith("twice:"):
            parts[place] = '"' + part.removeprefix("twice:")
        else:
            parts[place] = part.replace('"', "", 1)
    return "".join(parts)


def mutate_header(draw: np.random.Generator, data: bytes) -> tuple[bytes, str]:
    """Return a .safetensors file with a changed value in its header, and what was done."""
    size = struct.unpack("<Q", data[:8])[0]
    header, done = mutate_json(draw, data[8 : 8 + size].decode())
    encoded = header.encode(errors="surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded + data[8 + size :], f"header: {done}"


def mutate_file(draw: np.random.Generator, path: Path, others: list[Path]) -> str:
    """Change a file, or what is at its place; return what was done.

    Args:
        others: Files that may take its place.
    """
    if draw.random() < 0.15:
        how = choose(draw, list(PLACE_CHANGES))
        PLACE_CHANGES[how](path)
        return how
    if others and draw.random() < 0.05:
        other = choose(draw, others)
        shutil.copyfile(other, path)
        return f"replaced by {other.name}"
    data = path.read_bytes()
    structured = {".json": mutate_json_bytes, ".safetensors": mutate_header}.get(path.suffix)
    if path.name == "tokenizer.json" and draw.random() < 0.5:
        structured = mutate_tokenizer
    if structured and draw.random() < 0.6:
        with contextlib.suppress(
            ValueError, RecursionError, struct.error
        ):  # an earlier change has broken it
            data, done = structured(draw, data)
            path.write_bytes(data)
            return done
    data, done = mutate_bytes(draw, data)
    path.write_bytes(data)
    return done


def mutate_json_bytes(draw: np.random.Generator, data: bytes) -> tuple[bytes, str]:
    """Return the bytes of a JSON file with one change, and what was done."""
    text, done = mutate_json(draw, data.decode())
    return text.encode(errors="surrogatepass"), done


def _replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


def _sparse_tail(path: Path) -> None:
    os.truncate(path, SPARSE)


PLACE_CHANGES: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "renamed": lambda path: path.rename(path.with_name(f"{path.name}.old")) and None,
    "a folder in its place": _replace_by(Path.mkdir),
    "a FIFO in its place": _replace_by(os.mkfifo),
    "a link to /dev/zero": _replace_by(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": _replace_by(lambda path: path.symlink_to("nothing")),
    "a link to itself": _replace_by(lambda path: path.symlink_to(path.name)),
    "empty": lambda path: path.write_bytes(b"") and None,
    "64 GiB of zeros": _sparse,
    "64 GiB of zeros after it": _sparse_tail,
}
