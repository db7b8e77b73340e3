"""Shapes of public programs: each is found, or refused by the sentence that says what it does.

`pytest tests/porting/test_public_models.py -m "" -s -n 0` prints a row for each.
"""

import time

import numpy as np
import pytest

from jax_transformer import convert
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.suggest import suggest
from tests.convert.foreign import randomized
from tests.porting.public_models import SHAPES, WORDS
from tests.porting.renamed import run_snippet

# Shapes that are not found or not refused rightly yet.
OPEN = {
    *("shared_layers", "unbiased_variance", "row_masks", "seq2seq_transformer", "scaled_by_width"),
    *("post_then_pre", "pre_then_post", "epsilon_outside", "window_of_one", "heads_apart"),
    *("by_part", "interleaved", "one_place_table", "buffers", "wrapped_checkpoint"),
    *("encoder_alone", "decoder_alone"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in OPEN])
def test_a_shape_is_found_or_refused_by_its_sentence(name):
    shape = SHAPES[name]
    module = randomized(shape.build()).eval()
    weights = {key: value.numpy().copy() for key, value in module.state_dict().items()}
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
