"""Blocks of a parallel text are its lines, whatever the files; its facts tell what has changed."""

import dataclasses
import gzip
import hashlib
import os
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text import parallel_text
from jax_transformer.text.parallel_text import Reading, Text, TextFiles
from jax_transformer.text.text_files import LONGEST_LINE, BadLine, count_lines
from tests.text.texts import FORMS, SKIP, memory_below, read_lines

LINES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\t"), max_size=8)
PAIRS = st.lists(st.tuples(LINES, LINES), max_size=12)
KINDS = st.sampled_from([*FORMS])


def packed(kind, lines, last_end):
    # A last line without text and without "\n" would be none.
    text = "\n".join(lines) + ("\n" if lines and (last_end or not lines[-1]) else "")
    return FORMS[kind]()(text.encode())


@given(
    files=st.lists(st.tuples(PAIRS, KINDS, KINDS, st.booleans()), min_size=1, max_size=3),
    tsv=st.booleans(),
    pairs=st.integers(1, 15),
)
@settings(deadline=None, max_examples=80)
def test_blocks_hold_every_line_once_in_order(tmp_path_factory, files, tsv, pairs):
    folder = tmp_path_factory.mktemp("text")
    sources, targets, expected = [], [], []
    for number, (content, source_kind, target_kind, last_end) in enumerate(files):
        sides = [[pair[side] for pair in content] for side in (0, 1)]
        if tsv:
            sources.append(folder / f"{number}.tsv.gz")
            lines = ["\t".join(pair) for pair in content]
            sources[-1].write_bytes(packed(source_kind, lines, last_end))
            # A "\r" and a mark at the ends of a line, not of a side, are removed.
            lines = [line.split("\t") for line in read_lines(sources[-1])]
            expected.append([tuple(line) for line in lines])
        else:
            sources.append(folder / f"source{number}")
            targets.append(folder / f"target{number}")
            sources[-1].write_bytes(packed(source_kind, sides[0], last_end))
            targets[-1].write_bytes(packed(target_kind, sides[1], not last_end))
            expected.append(
                list(zip(read_lines(sources[-1]), read_lines(targets[-1]), strict=True))
            )
        assert len(expected[-1]) == len(content)
    text = TextFiles(tuple(sources), tuple(targets))

    blocks = list(text.blocks(pairs))

    assert [*chain(*(block.pairs() for block in blocks))] == [*chain(*expected)]
    starts = [(first, len(lines)) for lines in expected for first in range(0, len(lines), pairs)]
    sizes = [min(pairs, lines - first) for first, lines in starts]
    assert [block.first_line - 1 for block in blocks] == [first for first, _ in starts]
    assert [len(block.sources) for block in blocks] == sizes
    assert [block.first for block in blocks] == [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize("pairs", [1, 5, 100])
@pytest.mark.parametrize(("source", "target"), [(9, 10), (10, 0), (1200, 10)])
def test_files_of_different_line_counts_are_refused_with_both_counts(write, pairs, source, target):
    aligned = write("aligned", b"a\n" * 7)
    paths = write("source", b"a\n" * source), write("target", b"b\n" * target)
    text = TextFiles((aligned, paths[0]), (aligned, paths[1]))
    blocks = []
    with pytest.raises(InputError) as refusal:
        blocks.extend(text.blocks(pairs))
    expected = (
        f"{paths[0]} and {paths[1]} must be line-aligned but have {source:,} and {target:,} lines"
    )
    assert str(refusal.value) == expected
    assert all(len(block.sources) == len(block.targets) for block in blocks)
    assert sum(len(block.sources) for block in blocks) <= 7 + min(source, target)
    with pytest.raises(InputError) as refusal:
        text.with_facts()
    assert str(refusal.value) == expected


def test_a_place_is_that_in_its_file(write):
    first = write("first", b"\xef\xbb\xbfa\nb\n")
    source = write("source", b"a\n\xef\xbb\xbfb\nc\n")
    target = write("target", b"a\nb\nc\xff\n")
    *blocks, last = TextFiles((first, source), (first, target)).blocks(2)
    pairs = [pair for block in blocks for pair in block.pairs()]
    assert pairs == [("a", "a"), ("b", "b"), ("a", "a"), ("\ufeffb", "b")]
    with pytest.raises(InputError) as refusal:
        last.pairs()
    assert str(refusal.value).startswith(f"{target}:3:2: byte 0xff is not UTF-8")


@pytest.mark.parametrize("line", [b"", b"a", b"a\tb\tc", b"a\t\t"])
def test_a_line_without_exactly_one_tab_is_refused_by_place(write, line):
    path = write("pairs.tsv", b"a\tb\r\nc\td\n" + line + b"\n")
    first, second = TextFiles((path,)).blocks(2)
    assert first.pairs() == [("a", "b"), ("c", "d")]
    with pytest.raises(InputError) as refusal:
        second.pairs()
    tabs = line.count(b"\t")
    assert str(refusal.value).startswith(f"{path}:3: has {tabs} tabs; ")


def test_pairs_with_an_overlong_line_are_marked(write):
    long = b"x" * LONGEST_LINE
    sources = write("source", b"a\n" + long + b"x\n" + long + b"\n\xff\ne")
    targets = write("target", b"A\nB\nC\n" + long + b"x\nE\n")
    (block,) = TextFiles((sources,), (targets,)).blocks(10)
    assert block.sources == [b"a", None, long, b"\xff", b"e"]
    assert block.targets == [b"A", b"B", b"C", None, b"E"]
    expected = [("a", "A"), None, (long.decode(), "C"), None, ("e", "E")]
    assert block.pairs() == expected

    pairs = write("pairs.tsv", b"a\tA\n" + long + b"\tB\n")
    (block,) = TextFiles((pairs,)).blocks(10)
    assert block.pairs() == [("a", "A"), None]


def test_blocks_take_the_memory_of_one(write):
    path = write("text", b"".join(b"%099d\n" % number for number in range(50_000)))
    with memory_below(4_000_000):  # two sides of 5,000,000 bytes each
        read = sum(len(block.sources) for block in TextFiles((path,), (path,)).blocks(1000))
    assert read == 50_000


def test_files_that_make_no_pairs_are_refused():
    for sources, targets, message in (
        ([], ["a"], "0 source files that are no tables, and 1 target files"),
        (["a", "b"], ["c"], "2 source files that are no tables, and 1 target files"),
        (["a.tsv", "b"], [], "1 source files that are no tables, and 0 target files; name"),
        (["a.tsv", "b"], ["c", "d"], "1 source files that are no tables, and 2 target files"),
        (["a.tmx"], [], r"a.tmx: is a translation memory \(TMX\)"),
        (["a"], ["b.tmx"], r"b.tmx: is a translation memory \(TMX\)"),
        (["a.tsv.zst"], ["b"], "0 source files that .* 1 target files; .* holds pairs"),
        (["a"], ["b.tsv"], "b.tsv: a .tsv file holds pairs"),
    ):
        with pytest.raises(InputError, match=message):
            TextFiles(tuple(map(Path, sources)), tuple(map(Path, targets)))


@pytest.mark.parametrize("kind", FORMS)
def test_facts_are_those_of_the_file(write, kind):
    content = packed(kind, ["a", "", "b" * 3_000_000], last_end=False)
    path = write("text", content)
    source, target = TextFiles((path,), (path,)).with_facts().facts
    assert source == target
    status = path.stat()
    assert source.path == str(path.absolute())
    assert (source.bytes, source.mtime_ns) == (len(content), status.st_mtime_ns)
    assert source.lines == count_lines(path) == 3
    assert source.sha256 == hashlib.sha256(content).hexdigest()


def test_only_files_that_may_have_changed_are_read_again(write, monkeypatch):
    sources, targets = write("source", b"a\nb\n"), write("target", b"c\nd\n")
    text = TextFiles((sources,), (targets,))
    known = text.with_facts().facts
    read = []
    monkeypatch.setattr(
        parallel_text,
        "_read_facts",
        lambda path, reading, original=parallel_text._read_facts: (
            read.append(path) or original(path, reading)
        ),
    )
    assert text.with_facts(known).facts == known
    assert read == []

    time = targets.stat().st_mtime_ns
    targets.write_bytes(b"c\nD\n")  # of the same size
    os.utime(targets, ns=(time, time + 1))
    changed = text.with_facts(known).facts
    assert (read, changed[0]) == ([targets], known[0])
    assert changed[1].sha256 != known[1].sha256

    targets.write_bytes(b"c\n\nD")  # of the same size, with one more line
    os.utime(targets, ns=(time, time + 2))
    with pytest.raises(InputError, match="2 and 3 lines"):
        text.with_facts(known)

    targets.write_bytes(b"c\ndd\n")
    os.utime(targets, ns=(time, time))  # another size at the same time
    assert text.with_facts(known).facts[1].bytes == 5

    known_elsewhere = [dataclasses.replace(known[0], path="/elsewhere"), known[1]]
    read.clear()
    text.with_facts(known_elsewhere)
    assert read == [sources, targets]


def test_a_file_that_changes_while_it_is_read_is_refused(write, monkeypatch):
    path = write("text", b"a line\n" * 100_000)

    def read_and_grow(file, name, read=parallel_text.read_lines):
        yield from read(file, name)
        path.write_bytes(path.read_bytes() + b"one more\n")

    monkeypatch.setattr(parallel_text, "read_lines", read_and_grow)
    with pytest.raises(InputError, match="changed while it was read"):
        TextFiles((path,), (path,)).with_facts()


def test_files_that_cannot_be_read_twice_are_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError) as refusal:
            TextFiles((path,), (path,)).with_facts()
        assert str(refusal.value).startswith(f"{path}")


def test_files_without_a_pair_are_refused(write):
    for source, target in (
        *((b"", b""), (b"a\n\n", b" \nb\n"), (b"\n", "\u2028\n".encode())),
        *((b"a\n", "\u200b\n".encode()), ("\u00ad\u2060 \ufe0f\n".encode(), b"a\n")),
    ):
        with pytest.raises(InputError, match="no pair"):
            TextFiles((write("source", source),), (write("target", target),)).read()


def test_pairs_of_a_tsv_file_and_of_two_files_are_one_text(write):
    sources = write("source1", b"a\n"), write("source2", b" \nc\n")
    targets = write("target1", b"A\n"), write("target2", b"B\nC\n")
    assert TextFiles(sources, targets).read() == Text(("a", "c"), ("A", "C"), dropped_empty=1)
    assert TextFiles((write("one.tsv", b" \tB\nc\tC\n"),)).read() == Text(("c",), ("C",), 1)

    pairs = write("pairs.tsv", b"a\tA\nb\tB\n"), write("more.tsv.gz", gzip.compress(b"d\tD\n"))
    source, target = write("source", b"c\n"), write("target", b"C\n")
    text = TextFiles((pairs[0], source, pairs[1]), (target,)).with_facts()
    blocks = list(text.blocks(2))
    assert [block.first for block in blocks] == [0, 2, 3]
    found = [pair for block in blocks for pair in block.pairs()]
    assert found == [("a", "A"), ("b", "B"), ("c", "C"), ("d", "D")]
    assert (text.pairs, len(text.facts)) == (4, 4)
    assert TextFiles((pairs[0], source), (target,)).read().sources == ("a", "b", "c")
    write("target", b"C\nD\n")
    with pytest.raises(InputError, match="must be line-aligned but have 1 and 2 lines"):
        TextFiles((pairs[0], source, pairs[1]), (target,)).with_facts()


@pytest.mark.parametrize(
    ("columns", "expected"),
    [((1, 2), ("a", "A")), ((2, 1), ("A", "a")), ((3, 1), ("0.5", "a")), ((1, 4), ("a", ""))],
)
def test_columns_of_a_tsv_file_are_chosen(write, columns, expected):
    path = write("pairs.tsv", b"a\tA\t0.5\t\r\nb\tB\t0.7\tx\ty\n")
    first, second = TextFiles((path,), reading=Reading(tuple(map(str, columns)))).blocks(1)
    assert first.pairs() == [expected]
    assert second.pairs() == [tuple("b B 0.7 x".split()[column - 1] for column in columns)]
    with pytest.raises(InputError, match=r":1: has 3 tabs; .* name their columns by columns"):
        next(TextFiles((path,)).blocks(1)).pairs()
    with pytest.raises(InputError, match=r":1: has 3 tabs; .* by columns"):
        next(TextFiles((path,), reading=Reading(("1", "5"))).blocks(1)).pairs()


NO_TEXT = (b"\xff", b"a\0", b"\xc3(")


@given(
    lines=st.lists(st.tuples(LINES, LINES, st.sampled_from(["", "source", "target", "both"]))),
    tsv=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_bad_lines_shift_no_pair(tmp_path_factory, lines, tsv):
    folder, sides, expected, bad = tmp_path_factory.mktemp("text"), ([], []), [], []
    for number, (source, target, kind) in enumerate(lines, start=1):
        wrong = NO_TEXT[number % 3]
        sides[0].append(wrong if kind in ("source", "both") else source.encode() + b".")
        sides[1].append(wrong if kind in ("target", "both") else target.encode() + b".")
        if kind:
            bad.append(number)
        else:
            expected.append((source.removeprefix("\ufeff" * (number == 1)) + ".", target + "."))
            if number == 1 and not tsv:
                expected[-1] = expected[-1][0], target.removeprefix("\ufeff") + "."
    if tsv:
        paths = [folder / "pairs.tsv"]
        sides = [[b"\t".join(pair) for pair in zip(*sides, strict=True)]]
    else:
        paths = [folder / "source", folder / "target"]
    for path, side in zip(paths, sides, strict=True):
        path.write_bytes(b"".join(line + b"\n" for line in side))
    files = TextFiles((paths[0],), (*paths[1:],), reading=SKIP)
    pairs = [pair for block in files.blocks(3) for pair in block.pairs()]
    assert [pair for pair in pairs if isinstance(pair, tuple)] == expected
    errors = [error for error in pairs if isinstance(error, BadLine)]
    assert [int(error.place.split(":")[1]) for error in errors] == bad
    if bad:
        with pytest.raises(BadLine, match="or set bad_lines to 'skip'"):
            TextFiles((paths[0],), (*paths[1:],)).read()
    if expected:
        text = files.read()
        assert list(zip(text.sources, text.targets, strict=True)) == expected
        assert (len(text.bad_lines), text.dropped_empty) == (len(bad), 0)


def test_how_files_are_read_is_part_of_their_digest(write):
    path = write("pairs.tsv", b"a\tb\tc\n")
    readings = [Reading(), SKIP, Reading(("1", "2")), Reading(("2", "1"))]
    texts = [TextFiles((path,), reading=reading).with_facts() for reading in readings]
    assert len({text.sha256 for text in texts}) == 4


def test_an_overlong_line_is_refused_by_place(write):
    source, target = write("source", b"a\nb\n"), write("target", b"a\n" + b"b" * (LONGEST_LINE + 1))
    with pytest.raises(InputError) as refusal:
        TextFiles((source,), (target,)).read()
    assert str(refusal.value).startswith(f"{source} or {target}:2: is longer than 1,048,576 bytes")
    skipped = TextFiles((source,), (target,), reading=SKIP).read()
    assert skipped == Text(("a",), ("a",), bad_lines=(f"{source} or {target}:2",))
