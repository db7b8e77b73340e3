import gzip
import random
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text.text_files import (
    LONGEST_LINE,
    count_lines,
    is_blank,
    open_stream,
    open_text,
)
from jax_transformer.text.text_files import read_lines as read_bytes_of_lines
from tests.programs import run_python
from tests.text.texts import FORMS, PACK, memory_below, read_lines


@pytest.mark.parametrize("last_end", [b"", b"\n"])
@pytest.mark.parametrize("kind", PACK)
def test_compressed_files_are_told_by_their_first_bytes(write, kind, last_end):
    content = "Ein Haus.\n\nzwei Bäume".encode() + last_end
    expected = ["Ein Haus.", "", "zwei Bäume"]
    assert read_lines(write("plain.gz", content)) == expected
    pack = PACK[kind]()
    path = write("packed.txt", pack(content))
    assert read_lines(path) == expected
    assert count_lines(path) == 3
    parts = pack(content[:7]) + pack(b"") + pack(content[7:])
    assert read_lines(write("parts.txt", parts)) == expected
    padded = pack(content[:7]) + bytes(8) + pack(content[7:]) + bytes(8)
    assert read_lines(write("padded.txt", padded)) == expected


@pytest.mark.parametrize("kind", PACK)
def test_large_compressed_files_are_read_whole(write, kind):
    generator = random.Random(0)
    lines = ["x" * 1_000_000, *(generator.randbytes(30).hex() for _ in range(5_000))]
    path = write("packed", PACK[kind]()("\n".join(lines).encode()))
    assert read_lines(path) == lines


@pytest.mark.parametrize("kind", PACK)
def test_a_damaged_compressed_file_is_refused_by_name(write, kind):
    packed = PACK[kind]()(random.Random(0).randbytes(60_000).hex().encode())
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 1
    for damaged in (packed[:-1], packed[: len(packed) // 2], packed[:6], flipped, packed + b"a"):
        path = write("text", damaged)
        for read in (read_lines, count_lines, lambda path: read_lines(path, bad=[])):
            with pytest.raises(InputError) as refusal:
                read(path)
            assert str(refusal.value).startswith(f"{path}: damaged {kind} file (")


def test_frames_of_zstd_without_text_are_passed_over(write):
    pack = PACK["zstd"]()
    frame = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"12345"
    path = write("text", frame + pack(b"a\n") + frame + pack(b"b"))
    assert read_lines(path) == ["a", "b"]


def test_zstd_without_a_package_names_the_package_to_install(write, monkeypatch):
    path = write("text.zst", b"\x28\xb5\x2f\xfd more")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InputError, match="pip install zstandard") as refusal:
        read_lines(path)
    assert str(refusal.value).startswith(f"{path}: ")


@pytest.mark.parametrize("kind", FORMS)
def test_an_overlong_line_is_none(write, kind):
    longest, pack = b"b" * LONGEST_LINE, FORMS[kind]()
    for last, expected in ((longest, longest), (3 * longest, None)):
        lines = [b"a", longest, b"c" + longest, b"", last]
        with open_text(write("text", pack(b"\n".join(lines)))) as file:
            assert list(read_bytes_of_lines(file, "text")) == [b"a", longest, None, b"", expected]


def test_a_long_line_takes_no_memory(write):
    path = write("text", gzip.compress(b"x" * 50_000_000 + b"\na", compresslevel=1))
    with open_text(path) as file, memory_below(16 * LONGEST_LINE):
        assert list(read_bytes_of_lines(file, "text")) == [None, b"a"]


def test_only_newline_ends_a_line_and_one_mark_at_the_start_is_dropped(write):
    for character in "\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85\r":
        lines = [f"a{character}b", f"{character}c", "d"]
        assert read_lines(write("text", "\n".join(lines).encode())) == lines
    assert read_lines(write("text", b"a\r\nb\r\r\n\r\nc\r")) == ["a", "b\r", "", "c"]
    assert read_lines(write("text", "\ufeffa\n\ufeffb".encode())) == ["a", "\ufeffb"]
    assert read_lines(write("text", b"\xef\xbb\xbf")) == [""]
    assert read_lines(write("text", b"")) == []


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_line_count_is_that_of_newlines(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("lines") / "text"
    path.write_bytes(text.encode())
    unfinished = bool(text) and not text.endswith("\n")
    assert len(read_lines(path)) == text.count("\n") + unfinished


def test_bytes_that_are_no_text_are_refused_by_place(write):
    for content, place in (
        (b"a\nb\xff\n", "2:2"),
        (b"\xef\xbb\xbfab\xffc\n", "1:6"),
        ("äö".encode() + b"\xc3\n", "1:5"),
        (b"a\nb\nc\0d", "3:2"),
        ("ä\0\n".encode(), "1:3"),
        ("a\n".encode("utf-16"), "1:1"),
    ):
        path = write("text", content)
        with pytest.raises(InputError) as refusal:
            read_lines(path)
        assert str(refusal.value).startswith(f"{path}:{place}: ")


@pytest.mark.parametrize("kind", FORMS)
def test_the_place_of_a_bad_line_stays_and_its_number_is_told(write, kind):
    lines = [b"\xff", b"a", b"b\0", b"", b"c" * 41, b"d\xc3", "\u00e4".encode(), b"\xed\xa0\x80"]
    bad = []
    found = read_lines(write("text", FORMS[kind]()(b"\r\n".join(lines))), longest=40, bad=bad)
    assert found == ["", "a", "", "", "", "", "\u00e4", ""]
    assert bad == [1, 3, 5, 6, 8]


@pytest.mark.parametrize("name", ["a.tmx", "a.TMX", "a.tmx.gz"])
def test_a_translation_memory_is_refused_with_a_remedy(write, name):
    path = write(name, b"<tmx></tmx>\n")
    for open_file in (open_text, open_stream):
        with pytest.raises(InputError, match=r"is a translation memory \(TMX\).* \.tsv file"):
            open_file(path)
    open_text(write("a.tmx.en", b"of a translation memory, as lines\n")).close()


# Zero-width space, word joiner, joiner, soft hyphen, variation selectors, byte-order mark, Hangul
# filler, grapheme joiner, direction marks, a tag: of the categories Cf, Mn and Lo.
UNSEEN = "\u200b\u2060\u200d\u00ad\ufe0f\U000e0100\ufeff\u3164\u034f\u200e\u061c\U000e0041"


@pytest.mark.parametrize("around", ["", " ", "\t\u00a0", "\x01\x85"], ids=ascii)
def test_a_line_of_what_nobody_sees_is_blank(around):
    for unseen in [*UNSEEN, UNSEEN]:
        assert unicodedata.category(unseen[0]) in ("Cf", "Mn", "Lo")
        assert is_blank(around + unseen + around + unseen)
        for seen in ("a", ".", "字", "\u0301", "\ufffd", "\ue000", "\U0001f600"):
            assert not is_blank(around + unseen + seen)


def test_every_character_that_python_calls_whitespace_or_control_is_blank():
    characters = map(chr, range(sys.maxunicode + 1))
    blank = [c for c in characters if c.isspace() or unicodedata.category(c) == "Cc"]
    assert len(blank) > 80
    assert is_blank("".join(blank))
    assert is_blank("")


@pytest.mark.parametrize(
    "line",
    [
        "می\u200cروم",  # a non-joiner inside a Persian word
        "\U0001f468\u200d\U0001f33e",  # a farmer: a man and an ear of rice
        "\u2764\ufe0f",  # a heart as a picture
        "\u0601",  # an Arabic sign of the category Cf, which is seen
        "\u2800",  # a Braille cell without dots
        "\ud800",  # half a pair of surrogates, which the tokenizer refuses
    ],
)
def test_what_is_seen_is_not_blank(line):
    assert not is_blank(line)


MEMORY = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en"/><body>
<tu><tuv xml:lang="EN-US"><seg>A <bpt i="1">&lt;b&gt;</bpt>new <hi>house</hi><ept i="1"/>
 is	here.</seg></tuv><tuv xml:lang="de"><seg>Ein Haus &amp; mehr.</seg></tuv></tu>
<tu><tuv xml:lang="en-us"><seg>alone</seg></tuv></tu>
<tu><tuv lang="en-us"><seg>b</seg></tuv><tuv xml:lang="DE"><seg>B</seg></tuv></tu>
</body></tmx>
"""


def test_the_program_of_the_page_writes_the_pairs_of_a_translation_memory(write):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (program,) = re.findall(r"```python\n(import sys\n.*?)```", page, re.DOTALL)
    done = run_python("-c", program, write("memory.tmx", MEMORY.encode()), "en-US", "de")
    assert done.stdout == "A new house is here.\tEin Haus & mehr.\nb\tB\n"
