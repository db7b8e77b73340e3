"""Mistakes of ports, planted in copies of one torch program: each is found at its block."""

import importlib
from functools import cache

import jax
import numpy as np
import pytest
import torch

from jax_transformer import parity
from tests.parity_tool import plain_copy
from tests.parity_tool.mistakes import IN_A_BLOCK, OF_A_FUNCTION, PLACES, Mistake
from tests.parity_tool.torch_program import Program
from tests.tiers import tiered_rows

# Callbacks under vmap compile anew in each run of the Equinox copy.
FEWER = [text for text in IN_A_BLOCK if "writers" in text]


def ids():
    random = np.random.default_rng(0)
    src, tgt = random.integers(1, 31, (3, 7)), random.integers(1, 31, (3, 5))
    src[1, 4:] = src[2, 6:] = 0
    return src, tgt


@cache
def program(rotary=False, seed=0, dtype=torch.float64):
    """Return the torch program with random numbers in every leaf, and its record."""
    torch.manual_seed(seed)
    module = Program(rotary).to(dtype)
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


@pytest.mark.exhaustive  # test_compare.py has quick cases
@pytest.mark.parametrize("copy", ["linen", "nnx", "equinox"])
def test_a_right_copy_agrees_block_by_block(copy):
    comparison = compared(copy, "")
    assert comparison.first_differing is None
    values = [pair for pair in comparison.blocks if pair.paired == "value"]
    assert len(values) >= 58  # of 62 blocks: the Linen copy has no module of a network
    assert max(pair.roundings for pair in values) < 16


@pytest.mark.parametrize(
    ("copy", "text"),
    tiered_rows(
        [(copy, text) for copy in ("linen", "nnx") for text in IN_A_BLOCK]
        + [("equinox", text) for text in FEWER],
        lambda *row: False,
        lambda copy, text: copy == "linen" and text in FEWER,
    ),
)
def test_a_mistake_is_found_at_its_block_and_explained(copy, text):
    comparison = compared(copy, text)
    kind, _, place = text.partition(" at ")
    assert comparison.first_differing.b == place
    if said := PLACES[kind][0]:
        assert any(said in words for words in comparison.explanations), comparison
    else:  # between the embedding and the first layer
        place = "the difference arises in b after words_in#2 and before readers.0, by"
        assert comparison.explanations[0].startswith(place)


def beside_a_function(text, seed, dtype=torch.float64, named=lambda values: values):
    """Return the comparison of a plain function that has this mistake with the torch program."""
    mistake = Mistake(text, rotary=text.startswith("halves"))
    module, expected = program(mistake.rotary, seed, dtype)
    with jax.enable_x64(dtype == torch.float64):
        values = named(plain_copy.values(mistake, module.state_dict(), *ids()))
        return parity.compare(parity.record(None, lambda _: values), expected)


@pytest.mark.parametrize(
    ("text", "seed", "dtype"),
    tiered_rows(
        [(text, 1, torch.float64) for text in OF_A_FUNCTION]
        + [(text, 2, torch.float32) for text in [*OF_A_FUNCTION][1:]],  # such an epsilon rounds
        lambda *row: False,
        lambda text, seed, dtype: seed == 1,
    ),
)
def test_a_mistake_of_a_plain_function_is_found_and_nothing_else_is_said(text, seed, dtype):
    comparison = beside_a_function(text, seed, dtype)
    assert comparison.first_differing.b == text.partition(" at ")[2], comparison
    said = [x for x in comparison.explanations if not x.startswith("the difference arises in b")]
    assert bool(said) == bool(OF_A_FUNCTION[text])
    assert all(OF_A_FUNCTION[text] in words for words in said), said


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_function_agrees_whatever_it_names(dtype):
    assert beside_a_function("", 3, dtype).agrees
    assert beside_a_function("", 3, dtype, lambda values: {"y": values["logits"]}).agrees


@pytest.mark.exhaustive
def test_less_named_is_less_found_but_nothing_wrong():
    def layers(values):  # what the encoder's layers return, and the logits
        return {name: values[name] for name in ("15", "27", "logits")}

    # What the first layer is given is not named: all before its end is possible.
    for text, place in (("relu at readers.1.network", "readers.1"), ("swapped", "")):
        comparison = beside_a_function(text, 4, named=layers)
        assert comparison.first_differing.b == place, comparison
        assert place or "after its inputs and before the end of readers.0" in str(comparison)
        assert not [words for words in comparison.explanations if " has " in words]


@pytest.mark.exhaustive
def test_a_table_in_float32_hides_no_mistake(monkeypatch):
    exact = plain_copy.mistakes.positions
    monkeypatch.setattr(
        plain_copy.mistakes, "positions", lambda *given: exact(*given).astype(np.float32)
    )
    alone, beside = (beside_a_function(text, 5) for text in ("", "relu at writers.0.network"))
    assert alone.first_differing.b == ""
    assert 1e-10 < float(alone.explanations[0].split()[-1]) < 1e-7
    assert beside.first_differing.b == "writers.0.network"
    assert "the model differs earlier, but far less" in beside.notes[0]
