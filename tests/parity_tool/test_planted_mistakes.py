"""Mistakes of ports, planted in copies of one torch program: each is found at its block."""

import importlib
from functools import cache

import jax
import numpy as np
import pytest
import torch

from jax_transformer import parity
from tests.parity_tool.mistakes import IN_A_BLOCK, WORDS, Mistake
from tests.parity_tool.torch_program import Program

pytestmark = pytest.mark.exhaustive  # test_compare.py has quick cases
# Callbacks under vmap compile anew in each run of the Equinox copy.
FEWER = [text for text in IN_A_BLOCK if "decoder" in text]


def ids():
    random = np.random.default_rng(0)
    src, tgt = random.integers(1, 31, (3, 7)), random.integers(1, 31, (3, 5))
    src[1, 4:] = src[2, 6:] = 0
    return src, tgt


@cache
def program():
    """Return the torch program with random numbers in every leaf, and its record."""
    torch.manual_seed(0)
    module = Program().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    src, tgt = map(torch.from_numpy, ids())
    return module, parity.record(module, lambda module: module(src, tgt))


def compared(copy, text):
    """Return the comparison of a copy with this mistake with the torch program."""
    if copy == "equinox":
        pytest.importorskip("equinox")
    module, expected = program()
    copies = importlib.import_module(f"tests.parity_tool.{copy}_copy")
    with jax.enable_x64(True):
        model, call = copies.build(Mistake(text), module.state_dict())
        return parity.compare(parity.record(model, lambda model: call(model, *ids())), expected)


@pytest.mark.parametrize("copy", ["linen", "nnx", "equinox"])
def test_a_right_copy_agrees_block_by_block(copy):
    comparison = compared(copy, "")
    assert comparison.first_differing is None
    values = [pair for pair in comparison.blocks if pair.paired == "value"]
    assert len(values) >= 58  # of 62 blocks: the Linen copy has no module of a network
    assert max(pair.roundings for pair in values) < 16


@pytest.mark.parametrize(
    ("copy", "text"),
    [(copy, text) for copy in ("linen", "nnx") for text in IN_A_BLOCK]
    + [("equinox", text) for text in FEWER],
)
def test_a_mistake_is_found_at_its_block_and_explained(copy, text):
    comparison = compared(copy, text)
    kind, _, place = text.partition(" at ")
    assert comparison.first_differing.b == place
    if kind in WORDS:
        assert any(WORDS[kind] in words for words in comparison.explanations), comparison
    else:  # between the embedding and the first layer
        place = "the difference arises in b after words#2 and before encoder.0"
        assert comparison.explanations[0] == place
