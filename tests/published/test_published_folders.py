"""Published checkpoints, small, are read, searched and written back as transformers does."""

import re
from pathlib import Path

import pytest

from tests.published.comparison import COLUMNS, compare
from tests.published.rows import ROWS
from tests.tiers import tiered

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "published_folders.md"
QUICK = ("facebook/bart-base", "facebook/nllb-200-1.3B", "google/long-t5-tglobal-base")
NAMED = {row.name: row for row in ROWS}
FIRST_OF_A_KIND = {
    (row.config["model_type"], getattr(row.tokenizer, "func", row.tokenizer)): row.name
    for row in reversed(ROWS)
}.values()


def expected(row, column):
    """Return the cell that a row must have, or a part of it."""
    absent = any(needed in row.expected for needed in COLUMNS[column])
    return row.expected.get(column, "-" if absent else "equal")


def check(row, cells):
    for column, cell in cells.items():
        wanted = expected(row, column)
        assert cell == wanted or (wanted not in ("equal", "-") and wanted in cell), cells


def assert_as_expected(row, path, columns=COLUMNS):
    check(row, compare(row, path, columns))


def test_the_names_are_different_and_many():
    assert len(NAMED) == len(ROWS) >= 50


def test_the_page_has_each_row_with_its_cells():
    text = PAGE.read_text("utf-8")
    table = text.partition("\n| checkpoint | copies |")[2].partition("\n\n")[0].splitlines()[2:]
    lines = [line.strip("| ").split(" | ") for line in table]
    assert [name for name, *_ in lines] == [*NAMED]
    for name, copies, *cells in lines:
        row, cells = NAMED[name], dict(zip(COLUMNS, cells, strict=True))
        assert copies == (row.seen or "-")
        check(row, cells)
    refused = sum("load" in row.expected for row in ROWS)
    named = sum("ids" in row.expected for row in ROWS)
    counts = [len(ROWS), len(ROWS) - refused - named, named, refused]
    assert [int(number) for number in re.findall(r"\d+", text)[:4]] == counts


@pytest.mark.parametrize("name", QUICK)
def test_a_published_folder_is_read(name, tmp_path):
    assert_as_expected(NAMED[name], tmp_path / "model", ("load", "ids"))


@pytest.mark.parametrize("name", tiered(NAMED, [], FIRST_OF_A_KIND))
def test_every_column_of_a_published_folder(name, tmp_path):
    assert_as_expected(NAMED[name], tmp_path / "model")
