"""A file that a user names is regular, bounded and read once; everything else is one short line."""

import contextlib
import os

import pytest

from jax_transformer import InputError
from jax_transformer.errors import one_line, shorten
from jax_transformer.storage.reading import (
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)
from jax_transformer.storage.yaml_file import read_yaml
from tests.fuzz.mutations import PLACE_CHANGES

READERS = {
    "bytes": lambda path: read_bytes(path, "cannot be read", 100),
    "text": lambda path: read_text(path, "cannot be read", 100),
    "json": lambda path: read_json(path, 100),
    "yaml": read_yaml,
}


def one_short_line(refused):
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 500 + len(os.getcwd())
    return message


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [*PLACE_CHANGES, "too long", "NUL"])
def test_what_is_no_regular_file_of_a_bounded_size_is_refused(tmp_path, reader, kind):
    path = tmp_path / ("a\0b" if kind == "NUL" else "file")
    if kind != "NUL":
        path.write_bytes(b"\n" * (2**17 + 1))
    if kind in PLACE_CHANGES:
        PLACE_CHANGES[kind](path)
    with pytest.raises(InputError, match=r"cannot be read|is not? ") as refused:
        READERS[reader](path)
    shown = str(path).replace("\0", r"\x00")
    assert one_short_line(refused).startswith(shown)


def test_a_link_is_followed_and_a_size_of_zero_is_not_believed(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", "cannot be read", 100) == b"x" * 100
    with pytest.raises(InputError, match="no regular file of at most 99 bytes"):
        read_bytes(tmp_path / "link", "cannot be read", 99)
    status = "/proc/self/status"  # it has a thousand bytes and says that it has none
    assert len(read_bytes(status, "cannot be read", 10**6)) > 500
    with pytest.raises(InputError, match="no regular file of at most 500 bytes"):
        read_bytes(status, "cannot be read", 500)


def test_a_file_that_grows_after_it_was_opened_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    fdopen = os.fdopen

    def grown(descriptor, *mode):
        with path.open("ab") as file:
            file.write(b"x" * 91)
        return fdopen(descriptor, *mode)

    monkeypatch.setattr(os, "fdopen", grown)
    with pytest.raises(InputError, match="no regular file of at most 100 bytes"):
        read_bytes(path, "cannot be read", 100)


def test_nothing_is_read_of_another_file_than_the_one_that_was_checked(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with open_regular(path, "cannot be read") as file:
        path.unlink()
        os.mkfifo(path)
        assert file.read() == b"old"
        assert not os.get_inheritable(file.fileno())


def test_a_refusal_leaves_no_open_descriptor(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "fifo", "/dev/zero"):
        with contextlib.suppress(InputError):
            open_regular(path, "cannot be read")
    assert len(os.listdir("/proc/self/fd")) == before


def test_text_is_utf_8_and_a_byte_order_mark_is_no_part_of_it(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(path, "is no text") == "{}"
    assert read_json(path) == {}
    assert parse_json(path.read_bytes(), "name") == {}
    path.write_bytes(b"{\xff}")
    for reader in ("text", "json", "yaml"):
        with pytest.raises(InputError, match="is not UTF-8") as refused:
            READERS[reader](path)
        assert one_short_line(refused).startswith(str(path))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(f'*{before}' for _ in range(9))}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NO_JSON = {
    "[" * 100_000: "nested too deep",
    "[1]": "must hold a JSON object",
    "": "is no readable JSON",
    "{": "is no readable JSON",
    '{"a": ' + "9" * 5_000 + "}": "is no readable JSON",
    '{"a": -1e999}': "-1e999 is no number",
    '{"a": NaN}': "NaN is no number",
    '{"a": 1, "b": {"c": 1, "c": 1}}': "the name 'c' occurs 2 times",
    '{"' + "a" * 10_000 + '": 1, "' + "a" * 10_000 + '": 1}': "occurs 2 times",
    '{"a": "\\ud800"}': "is no readable JSON",
    '{"\\udfff": 1}': "is no readable JSON",
    '{"a": "\0"}': "is no readable JSON",
}
NO_YAML = {
    BOMB: "line 5, column 4 has more than 65,536 values, those of aliases included",
    "a: &a [*a]": r"line 1, column 8 has the alias \*a of what it is a part of",
    "x: {a: 1, a: 1}": "line 1, column 4 has the name 'a' 2 times",
    "1: a\n0x1: b": "2 times",
    "a: !!timestamp 2001-99-99": "the tag 'tag:yaml.org,2002:timestamp'",
    "!!python/object/apply:os.system [touch canary]": "the tag",
    "[" * 5_000: "nested too deep",
    "a: 0x" + "f" * 50_000: "a number of 50,002 characters",
    **dict.fromkeys(("a: 0x_", 'a: "\\ud800"', "a: \0", "a: b: c"), "is not YAML"),
    **dict.fromkeys(("a: 1\n---\nb: 1", "? [a]\n: 1"), "is not YAML"),
    "&" + "a" * 10_000 + " *" + "b" * 10_000: "is not YAML",
}
REFUSED = [(read_json, *row) for row in NO_JSON.items()]
REFUSED += [(read_yaml, *row) for row in NO_YAML.items()]


@pytest.mark.parametrize(
    ("read", "content", "message"),
    REFUSED,
    ids=lambda value: value[:16] if isinstance(value, str) else None,
)
def test_text_that_a_parser_would_guess_at_is_refused(tmp_path, read, content, message):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as refused:
        read(path)
    start = f"{path}: is not YAML (" if read is read_yaml else str(path)
    assert one_short_line(refused).startswith(start)
    if read is read_json:
        with pytest.raises(InputError, match=message):
            parse_json(content.encode(), "name")


def test_json_keeps_whole_pairs_of_surrogates_and_large_numbers():
    text = '{"a": "\\ud83d\\ude00", "n": 1000000000000000019884624838656, "x": 1e308}'
    assert parse_json(text, "name") == {"a": "\U0001f600", "n": int(1e30), "x": 1e308}


def test_yaml_is_plain_data_and_what_looks_like_a_date_is_text(tmp_path):
    path = tmp_path / "file"
    path.write_text(
        "dates: [2001-99-99, 2001-01-02, 2001-12-14t21:59:43.10-05:00]\n"
        "base60: [1:30, 190:20:30, 1:30.5, '1" + ":59" * 9_000 + "']\n"
        "numbers: [1, 0x1f, 017, 0b11, 1_000, 2.5e-3, .5, .inf]\n"
        "others: [true, off, null, ~, =, '<<', text, ö]\n"
        "empty:\n"
        "anchor: &anchor {x: [3]}\n"
        "alias: *anchor\n"
    )
    read = read_yaml(path)
    assert read["dates"] == ["2001-99-99", "2001-01-02", "2001-12-14t21:59:43.10-05:00"]
    assert read["base60"] == ["1:30", "190:20:30", "1:30.5", "1" + ":59" * 9_000]
    assert read["numbers"] == [1, 31, 15, 3, 1000, 0.0025, 0.5, float("inf")]
    assert read["others"] == [True, False, None, None, "=", "<<", "text", "ö"]
    assert (read["empty"], read["anchor"], read["alias"]) == (None, {"x": [3]}, {"x": [3]})


def test_a_value_of_any_kind_is_shown_in_80_characters():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**6, list(range(10**5)), 1 << 10**6, deep, "\n\u2028\ud800"):
        shown = shorten(value)
        assert len(shown) <= 80
        assert shown.isascii()
        assert "\n" not in shown
    while deep:  # Python would free it recursively
        deep = deep[0]
    assert one_line("a\n b" * 1000, 10) == "a ba ba..."
