"""Shapes of public programs: each is found, or refused by the sentence that says what it does.

`pytest tests/porting/test_public_models.py -m "" -s -n 0` prints a row for each.
"""

import time

import numpy as np
import pytest
import torch

from jax_transformer import convert
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.suggest import suggest
from jax_transformer.storage import weights as weight_files
from tests.convert.foreign import randomized
from tests.porting.public_models import SHAPES, WORDS
from tests.porting.renamed import run_snippet


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_found_or_refused_by_its_sentence(name, tmp_path):
    shape = SHAPES[name]
    module = randomized(shape.build()).eval()
    torch.save(module.state_dict(), tmp_path / "mine.pt")
    weights = weight_files.read_trained(tmp_path / "mine.pt", drop=shape.drop)
    record = run_snippet(module, getattr(module, "pad", 0), *WORDS)
    start, passes = time.process_time(), 0  # conftest.py gives torch one thread
    try:
        suggestion = suggest(weights, record)
        text, passes = str(suggestion), suggestion.finding.passes
        found = suggestion.fits
    except InputError as error:
        text, found = str(error), False
    seconds = time.process_time() - start
    lines = [line for line in text.splitlines() if shape.refused in line]
    result = "found" if found else (lines or text.splitlines())[-1]
    print(f"{name:<24}{len(weights):>4} tensors{passes:>7,} passes{seconds:>6.1f} s  {result}")
    assert found == (not shape.refused), text
    assert shape.refused in text
    if found:
        check_carried(weights, suggestion, record)


def check_carried(weights, suggestion, record):
    """The model in JAX gives the logits, and every tensor of a strict load comes back."""
    config, layout = suggestion.config, suggestion.layout
    params = convert.from_torch(weights, config, layout)
    comparison = compare_record(params, config, layout, record, explain=False)
    assert comparison.blocks[-1].error < 1e-7, comparison
    back = convert.to_torch(params, config, layout)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[key].numpy(), weights[key]) for key in weights)
