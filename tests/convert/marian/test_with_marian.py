"""Models that Marian trains here, read, translated and given back, where pymarian is installed."""

import pytest

from jax_transformer.text.number_words import german
from tests.convert.marian.published import PUBLISHED
from tests.convert.marian.with_marian import compare

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(("name", "options"), PUBLISHED.items(), ids=PUBLISHED)
def test_marian_and_this_library_agree(name, options, tmp_path):
    pytest.importorskip("pymarian")
    row = compare(tmp_path / name, options, german(range(0, 100_000, 9_973)))
    assert row.other_texts == row.other_texts_back == 0
    assert row.score_error < 1e-4
