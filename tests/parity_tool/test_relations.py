"""Invariance of rows, accuracy and parity, of programs that have them and of some that do not."""

import numpy as np
import pytest

from jax_transformer import InputError
from jax_transformer.parity import Program, relations

ROWS = np.random.default_rng(0).normal(size=(70, 11))
MATRIX = np.random.default_rng(1).normal(size=(11, 5))


def products(x, dtype):
    return np.stack([(row.astype(dtype)[:, None] * MATRIX.astype(dtype)).sum(0) for row in x])


def program(run):
    return Program(lambda x: run(x, np.float32), lambda x: run(x, np.float64))


def test_two_right_programs():
    found = relations({"a": program(products), "b": program(products)}, ROWS)
    assert found.invariance == {"a": 0, "b": 0}
    assert 0 < found.accuracy["a"] == found.accuracy["b"] < 16
    assert found.parity == 0
    assert len(str(found).splitlines()) == 4


def test_a_row_that_its_neighbours_change_and_a_wrong_product_are_seen():
    def normed(x, dtype):
        y = products(x, dtype)
        return y - y.mean(0)

    def rough(x, dtype):
        return products(x, np.float16).astype(dtype) if dtype == np.float32 else products(x, dtype)

    found = relations({"a": program(normed), "b": program(rough)}, ROWS)
    assert found.invariance["a"] > 0.1
    assert found.invariance["b"] == 0
    assert found.accuracy["b"] > 100
    assert found.parity > 1e4


def test_too_few_rows_are_refused():
    with pytest.raises(InputError, match="1 programs and 70 rows"):
        relations({"a": program(products)}, ROWS)
