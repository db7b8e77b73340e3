"""Pairs and documents in .csv, .jsonl and .tsv files, by the names of their columns."""

import csv
import gzip
import io
import json
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer import InputError
from jax_transformer.text.parallel_text import Reading, Text, TextFiles
from jax_transformer.text.text_files import LONGEST_LINE, BadLine
from tests.text.texts import corpus, task

NAMES = ("de", "en")
EXPECTED = Text(("zwei, drei", 'a "b"', "x y"), ("two", "c\\", "z"))
CSV = b'\xef\xbb\xbfid,en,de\n1,two,"zwei, drei"\r\n2,c\\,"a ""b"""\n3,z,"x\ny"\n'
RECORDS = (
    {"de": "zwei, drei", "en": "two"},
    {"en": "c\\", "de": 'a "b"'},
    {"de": "x\ty", "en": "z"},
)
TABLES = {
    "header.csv": (CSV, NAMES),
    "headerless.csv": (CSV.partition(b"\n")[2], ("3", "2")),
    "keys.jsonl": ("".join(json.dumps(record) + "\n" for record in RECORDS).encode(), NAMES),
    "nested.JSONL": (
        "\n".join(json.dumps({"translation": record}) for record in RECORDS).encode(),
        ("translation.de", "translation.en"),
    ),
    "header.tsv": (b'de\tid\ten\nzwei, drei\t1\ttwo\na "b"\t2\tc\\\nx y\t3\tz\n', NAMES),
    "packed.csv.gz": (gzip.compress(CSV), NAMES),
}


@pytest.mark.parametrize("name", TABLES)
def test_two_columns_are_a_text(tmp_path, name):
    content, columns = TABLES[name]
    (tmp_path / name).write_bytes(content)
    assert TextFiles((tmp_path / name,), reading=Reading(columns)).read() == EXPECTED
    text = TextFiles((tmp_path / name,), reading=Reading(columns)).with_facts()
    assert text.pairs == 3
    assert [block.first for block in text.blocks(2)] == [0, 2]


LETTERS = st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"])
PAIR = st.tuples(st.text(LETTERS, max_size=9), st.text(LETTERS, max_size=9))


@given(pairs=st.lists(PAIR, min_size=1), kind=st.sampled_from([".csv", ".jsonl"]))
@settings(deadline=None, max_examples=100)
def test_what_python_writes_is_read(tmp_path_factory, pairs, kind):
    path, written = tmp_path_factory.mktemp("tables") / f"pairs{kind}", io.StringIO()
    if kind == ".csv":
        csv.writer(written).writerows([("source", "target"), *pairs])
    else:
        for source, target in pairs:
            written.write(json.dumps({"source": source, "target": target}) + "\n")
    path.write_bytes(written.getvalue().encode())
    (block,) = TextFiles((path,), reading=Reading(("source", "target"))).blocks(len(pairs))
    assert block.pairs() == [
        tuple(re.sub("[\t\r\n]+", " ", side) for side in pair) for pair in pairs
    ]


BAD = {
    "short.csv": (b"de,en\na,b\nc\n", 3, r"has no text in de and en \(it is \['c'\]\)"),
    "quotes.csv": (b'de,en\na,b\n"c"d,e\n', 3, "has no text in de and en"),
    "open.csv": (b'de,en\na,b\n"c,d\n', 3, "unexpected end of data"),
    "bytes.csv": (b"de,en\na,b\n\xff,d\n", 3, "byte 0xff is not UTF-8"),
    "zero.csv": (b"de,en\na,b\nc\0,d\n", 3, "NUL character"),
    "key.jsonl": (b'{"de": "a", "en": "b"}\n{"de": "c"}\n', 2, "it is {'de': 'c'}"),
    "number.jsonl": (b'{"de": "a", "en": "b"}\n{"de": "c", "en": 1}\n', 2, "has no text in"),
    "null.jsonl": (b'{"de": "a", "en": "b"}\n{"de": null, "en": "d"}\n', 2, "has no text in"),
    "list.jsonl": (b'{"de": "a", "en": "b"}\n["c", "d"]\n', 2, "has no text in"),
    "broken.jsonl": (b'{"de": "a", "en": "b"}\n{"de": "c"\n', 2, "Expecting"),
    "half.jsonl": (b'{"de": "a", "en": "b"}\n{"de": "\\ud800", "en": "d"}\n', 2, "surrogates"),
    "zero.jsonl": (b'{"de": "a", "en": "b"}\n{"de": "c\\u0000", "en": "d"}\n', 2, "NUL"),
    "deep.jsonl": (b'{"de": "a", "en": "b"}\n' + b"[" * 100_000 + b"\n", 2, "recursion"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_named_or_skipped(tmp_path, name):
    content, number, fault = BAD[name]
    path = tmp_path / name
    good = b'{"de": "e", "en": "f"}\n' if path.suffix == ".jsonl" else b"e,f\n"
    path.write_bytes(content + good * (name != "open.csv"))
    with pytest.raises(BadLine, match=fault) as refusal:
        TextFiles((path,), reading=Reading(NAMES)).read()
    assert refusal.value.place.startswith(f"{path}:{number}")
    assert str(refusal.value).endswith(", or set bad_lines to 'skip'")
    sent = pickle.loads(pickle.dumps(refusal.value))  # to another process
    assert (sent.place, str(sent)) == (refusal.value.place, str(refusal.value))
    text = TextFiles((path,), reading=Reading(NAMES, "skip")).read()
    assert text.sources == ("a", "e")[: 2 - (name == "open.csv")]
    assert text.bad_lines == (refusal.value.place,)


def test_an_overlong_record_is_none_and_blank_ones_are_blank(tmp_path):
    path = tmp_path / "long.jsonl"
    long = json.dumps({"de": "a" * (LONGEST_LINE // 2), "en": "b" * (LONGEST_LINE // 2)})
    path.write_text(f"{long}\n\n" + '{"de": "a", "en": "b"}\n')
    (block,) = TextFiles((path,), reading=Reading(NAMES)).blocks(9)
    with pytest.raises(BadLine, match="longer than 1,048,576 bytes"):
        block.pairs()
    (block,) = TextFiles((path,), reading=Reading(NAMES, "skip")).blocks(9)
    assert isinstance(block.pairs()[0], BadLine)
    assert block.pairs()[1:] == [("", ""), ("a", "b")]


@pytest.mark.parametrize(
    ("name", "header", "columns", "message"),
    [
        ("a.csv", b"de,en", ("de", "fr"), r"its header has no 'fr', but \['de', 'en'\]"),
        ("a.csv", b"de,en", None, "name two of its columns by columns; it begins 'de,en'"),
        ("a.csv", b'"de"x,en', NAMES, "its header cannot be read"),
        ("a.csv", b"\xff,en", NAMES, "its header has no 'de'"),
        ("a.jsonl", b"{}", ("1", "2"), "columns=1 2 must be keys of its records"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_those_that_are(
    tmp_path, name, header, columns, message
):
    (path := tmp_path / name).write_bytes(header + b"\na,b\n")
    with pytest.raises(InputError, match=message):
        TextFiles((path,), reading=Reading(columns)).read()
    with pytest.raises(
        InputError, match=rf"a \{path.suffix} file holds pairs; name it as a source"
    ):
        TextFiles((path,), (path,), reading=Reading(NAMES))


def test_records_of_plain_text_are_documents(tmp_path):
    path, documents = tmp_path / "text.jsonl", ("eins\nzwei\tdrei", "vier")
    path.write_text("".join(json.dumps({"text": each, "url": ""}) + "\n" for each in documents))
    for unit in ("lines", "blank_lines", "joined"):
        files = TextFiles((path,), reading=Reading(("text",), documents=unit))
        assert files.read().sources == documents


def test_other_columns_of_a_prepared_file_are_another_text(tmp_path):
    (path := tmp_path / "pairs.csv").write_text("eins,zwei\ndrei,vier\nsechs,neun\n")
    found = []
    for columns in (("eins", "zwei"), ("1", "2")):  # with a header, and without one
        text = TextFiles((path,), reading=Reading(columns))
        pairs = task(tmp_path / "store", text).text.pairs
        found.append((pairs, len(corpus(tmp_path / "store", text))))
    assert found == [(2, 2), (3, 3)]
