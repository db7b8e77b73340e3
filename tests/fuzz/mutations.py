"""Changes of files that a user, a disk or a hostile author makes, as strategies of hypothesis."""

import contextlib
import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Draw = Callable[..., Any]  # of a strategy: one of its values

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
STEPS = (  # of a normalizer or a decoder
    *(
        {"type": "Replace", "pattern": pattern, "content": content}
        for pattern, content in (
            ({"String": "a"}, "aa"),
            ({"Regex": "[a-z]"}, "ab"),
            ({"Regex": ""}, "zz"),
            ({"String": "o"}, "y" * 10**4),
        )
    ),
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
)
SPLITS = ("(a+)+$", "", "(?=a)", "(a|aa)+b", "[^", "\\p{L}", "(?<!x)y*")
PARTS = ("normalizer", "decoder", "pre_tokenizer", "added_tokens", "model")
FLAGS = ("normalized", "special", "single_word", "lstrip", "rstrip")
MODEL_FIELDS = (
    *({name: True} for name in ("byte_fallback", "fuse_unk", "ignore_merges")),
    *({"dropout": 0.5}, {"dropout": 1.0}, {"unk_token": "nothing"}, {"unk_token": None}),
    *({name: "##"} for name in ("continuing_subword_prefix", "end_of_word_suffix")),
)


@st.composite
def changed_tokenizer(draw: Draw, data: bytes) -> bytes:
    """Give a tokenizer.json a part that its format has."""
    described = json.loads(data)
    part = draw(st.sampled_from(PARTS))
    if part == "model":
        described[part] = described.get(part, {}) | draw(st.sampled_from(MODEL_FIELDS))
    elif part == "added_tokens":
        token = {name: draw(st.booleans()) for name in FLAGS}
        token["id"] = draw(st.sampled_from((0, 3, 50, 10**6)))
        token["content"] = draw(st.sampled_from(("a", "é", " ", "", "<pad>", "x" * 10**5)))
        described[part] = [token]
    else:
        steps = [draw(st.sampled_from(STEPS))] * draw(st.sampled_from((1, 5, 22, 40, 1000)))
        described[part] = {"type": "Sequence", f"{part.replace('_', '')}s": steps}
        if part == "pre_tokenizer" and draw(st.booleans()):
            pattern = {"Regex": draw(st.sampled_from(SPLITS))}
            how = draw(st.sampled_from(("Isolated", "Removed", "MergedWithNext")))
            split = {"type": "Split", "pattern": pattern, "behavior": how, "invert": False}
            described[part] = split
    return json.dumps(described).encode()


def _place(draw: Draw, last: int) -> int:
    """Return a place up to the last: small numbers, which hypothesis prefers, lie all over it."""
    return (draw(st.integers(1, 2**32)) * 2654435761 % 2**32) * (last + 1) >> 32


@st.composite
def changed_bytes(draw: Draw, data: bytes) -> bytes:
    """Flip bits, cut, insert, append, remove or overwrite."""
    how = draw(st.sampled_from(("flip", "flip", "flip", "cut", "insert", "append", "overwrite")))
    changed, end = bytearray(data), len(data)
    if how == "cut":
        return data[: _place(draw, end)]
    if how == "append":
        return data + draw(st.sampled_from((b"\0", b"\n", b"x", b"\0" * 4096, data)))
    if how == "flip" and data:
        for _ in range(draw(st.sampled_from((1, 1, 1, 3, 20)))):
            # A quarter of the flips is near the start, where headers are.
            last = end if draw(st.integers(0, 3)) else min(end, 256)
            changed[_place(draw, last - 1)] ^= 1 << draw(st.integers(0, 7))
        return bytes(changed)
    place, size = _place(draw, end), draw(st.sampled_from((1, 8, 64)))
    if how == "insert":
        changed[place:place] = draw(st.binary(min_size=1, max_size=100))
    else:  # with nothing, it removes
        changed[place : place + size] = draw(st.sampled_from((b"\xff", b"\0", b""))) * size
    return bytes(changed)


@st.composite
def changed_json(draw: Draw, data: bytes) -> bytes:
    """Change, remove or repeat one value, name or type."""
    values = json.loads(data)
    places = _places(values)
    if not places:
        return b"[]"
    container, key = places[_place(draw, len(places) - 1)]
    how = draw(st.sampled_from(("value", "value", "value", "remove", "twice", "unknown")))
    value = copy.deepcopy(draw(st.sampled_from(VALUES)))
    if how == "remove":
        del container[key]
    elif how == "value":
        container[key] = value
    elif isinstance(container, list):
        container.insert(key, container[key])
    elif how == "twice":
        container[f"{RAW}twice:{key}"] = value
    else:
        container[draw(st.sampled_from(UNKNOWN))] = value
    parts = json.dumps(values, indent=1).split(f'"{RAW}')
    for place, part in enumerate(parts[1:], start=1):
        twice = part.startswith("twice:")
        parts[place] = '"' + part[len("twice:") :] if twice else part.replace('"', "", 1)
    return "".join(parts).encode(errors="surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict | list):
        return []
    items = list(value.items() if isinstance(value, dict) else enumerate(value))[:200]
    return [place for key, item in items for place in ((value, key), *_places(item))]


@st.composite
def changed_header(draw: Draw, data: bytes) -> bytes:
    """Change a value in the header of a .safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    header = draw(changed_json(data[8 : 8 + size]))
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def change_file(draw: Draw, path: Path) -> None:
    """Change a file, or what is at its place."""
    if draw(st.integers(0, 5)) == 5:
        PLACE_CHANGES[draw(st.sampled_from(list(PLACE_CHANGES)))](path)
        return
    data = path.read_bytes()
    strategies = [changed_bytes, changed_bytes]
    strategies += {".json": [changed_json], ".safetensors": [changed_header]}.get(path.suffix, [])
    strategies += [changed_tokenizer] * (path.name == "tokenizer.json")
    with contextlib.suppress(ValueError, RecursionError, struct.error):  # broken by a change before
        path.write_bytes(draw(draw(st.sampled_from(strategies))(data)))


def _in_its_place(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


PLACE_CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "a folder": _in_its_place(Path.mkdir),
    "a FIFO": _in_its_place(os.mkfifo),
    "a link to /dev/zero": _in_its_place(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": _in_its_place(lambda path: path.symlink_to("nothing")),
    "a link to itself": _in_its_place(lambda path: path.symlink_to(path.name)),
    "64 GiB of zeros": lambda path: (path.write_bytes(b""), os.truncate(path, SPARSE)),
    "64 GiB of zeros after it": lambda path: os.truncate(path, SPARSE),
}
