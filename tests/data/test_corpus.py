import gzip
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.data.corpus import ParallelCorpus, read_lines, read_parallel
from jax_transformer.errors import InputError


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write_file


@pytest.mark.parametrize("last_end", [b"", b"\n"])
def test_plain_and_gzip_files_read_alike_whatever_their_names(write, last_end):
    content = "Ein Haus.\n\nzwei Bäume".encode() + last_end
    expected = ["Ein Haus.", "", "zwei Bäume"]
    assert read_lines(write("plain.gz", content)) == expected
    assert read_lines(write("packed.txt", gzip.compress(content))) == expected
    two_members = gzip.compress(content[:7]) + gzip.compress(content[7:])
    assert read_lines(write("members.txt", two_members)) == expected


@pytest.mark.parametrize(
    "character", ["\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\r"]
)
def test_only_newline_ends_a_line(write, character):
    content = f"a{character}b\n{character}c\nd".encode()
    lines = read_lines(write("text", content))
    assert lines == [f"a{character}b", f"{character}c", "d"]


def test_crlf_ends_are_stripped_of_one_carriage_return(write):
    assert read_lines(write("text", b"a\r\nb\r\r\n\r\nc\r")) == ["a", "b\r", "", "c"]


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_line_count_is_that_of_newlines(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("lines") / "text"
    path.write_bytes(text.encode())
    unfinished = bool(text) and not text.endswith("\n")
    assert len(read_lines(path)) == text.count("\n") + unfinished


def test_only_the_byte_order_mark_at_the_start_is_dropped(write):
    assert read_lines(write("text", "\ufeffa\n\ufeffb".encode())) == ["a", "\ufeffb"]
    assert read_lines(write("text", b"\xef\xbb\xbf")) == [""]
    assert read_lines(write("text", b"")) == []


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"a\nb\xff\n", "2:2"),
        (b"\xef\xbb\xbfab\xffc\n", "1:6"),
        ("äö".encode() + b"\xc3\n", "1:5"),
        (b"a\nb\nc\0d", "3:2"),
        ("ä\0\n".encode(), "1:3"),
        ("a\n".encode("utf-16"), "1:1"),
    ],
)
def test_bytes_that_are_no_text_are_refused_by_place(write, content, place):
    path = write("text", content)
    with pytest.raises(InputError) as refusal:
        read_lines(path)
    assert str(refusal.value).startswith(f"{path}:{place}: ")


@pytest.mark.parametrize("kind", ["missing", "directory", "truncated", "flipped", "header only"])
def test_an_unreadable_file_is_refused_by_name(tmp_path, write, kind):
    packed = bytearray(gzip.compress(b"a line of text\n" * 100))
    if kind == "missing":
        path = tmp_path / "nowhere"
    elif kind == "directory":
        path = tmp_path
    elif kind == "truncated":
        path = write("text.gz", packed[:-9])
    elif kind == "flipped":
        packed[-6] ^= 1  # in the checksum
        path = write("text.gz", packed)
    else:
        path = write("text.gz", packed[:2])
    with pytest.raises(InputError) as refusal:
        read_lines(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def test_pairs_are_never_shifted_by_an_empty_side(write):
    generator = random.Random(0)
    pairs = 1000
    sources = [f"source {number}" for number in range(pairs)]
    targets = [f"target {number}" for number in range(pairs)]
    emptied = generator.sample(range(pairs), 100)
    for place in emptied:
        blank = generator.choice(["", " ", "\t\u2003", "\u2028"])
        side = generator.choice(["source", "target", "both"])
        if side != "target":
            sources[place] = blank
        if side != "source":
            targets[place] = blank

    corpus = read_parallel(
        write("source", "\n".join(sources).encode()), write("target", "\n".join(targets).encode())
    )

    kept = sorted(set(range(pairs)) - set(emptied))
    found = zip(corpus.sources, corpus.targets, strict=True)
    false = set(found) - {(f"source {number}", f"target {number}") for number in kept}
    print(
        f"\n{len(emptied)} of {pairs:,} pairs emptied on a side or both: {len(false)} false pairs"
    )
    assert not false
    assert corpus.sources == tuple(f"source {number}" for number in kept)
    assert corpus.targets == tuple(f"target {number}" for number in kept)
    assert corpus.dropped_empty == 100
    assert corpus.report() == "1,000 pairs read, 100 dropped for an empty side"


def test_files_of_different_line_counts_are_refused_with_both_counts(write):
    source, target = write("source", b"a\n" * 1200), write("target", b"b\n" * 1199)
    with pytest.raises(InputError) as refusal:
        read_parallel(source, target)
    for named in (str(source), str(target), "1,200", "1,199"):
        assert named in str(refusal.value)


@pytest.mark.parametrize(("source", "target"), [(b"", b""), (b"a\n\n", b" \nb\n"), (b"\n", b"\n")])
def test_files_without_a_pair_are_refused(write, source, target):
    with pytest.raises(InputError, match="no pair"):
        read_parallel(write("source", source), write("target", target))


def test_a_corpus_made_by_code_reports_no_drops():
    assert ParallelCorpus(("a",), ("b",)).report() == "1 pairs read, 0 dropped for an empty side"
