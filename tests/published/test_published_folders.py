"""Published checkpoints, small, are read, searched and written back as transformers does."""

import pytest

from tests.published.comparison import COLUMNS, compare
from tests.published.rows import ROWS
from tests.tiers import tiered

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


def assert_as_expected(row, path, columns=COLUMNS):
    cells = compare(row, path, columns)
    for column, cell in cells.items():
        wanted = expected(row, column)
        assert cell == wanted or (wanted not in ("equal", "-") and wanted in cell), cells


def test_the_names_are_different_and_many():
    assert len(NAMED) == len(ROWS) >= 50


@pytest.mark.parametrize("name", QUICK)
def test_a_published_folder_is_read(name, tmp_path):
    assert_as_expected(NAMED[name], tmp_path / "model", ("load", "ids"))


@pytest.mark.parametrize("name", tiered(NAMED, [], FIRST_OF_A_KIND))
def test_every_column_of_a_published_folder(name, tmp_path):
    assert_as_expected(NAMED[name], tmp_path / "model")
