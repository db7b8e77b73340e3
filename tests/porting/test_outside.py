"""What no config has: the numbers that fit, the places where words are tried, the sentences."""

import math

import numpy as np
import pytest
import torch

from jax_transformer.porting.outside import WORDS, Outside, best_number, words_at
from jax_transformer.porting.record import Batch, Record
from jax_transformer.porting.simulate import Point

PAIRS = torch.linspace(-3, 3, 40, dtype=torch.float64)


@pytest.mark.parametrize("number", [0.01, 0.3, 1.0, 7.0, 90.0])
def test_the_number_of_a_factor_is_found(number):
    found = best_number("scaled logits", lambda n: float((n * PAIRS - number * PAIRS).norm()))
    assert math.isclose(found, number, rel_tol=1e-9)


@pytest.mark.parametrize("number", [0.7, 5.0, 30.0])
def test_the_number_of_a_cap_is_found(number):
    def capped(number):
        return number * torch.tanh(PAIRS / number)

    found = best_number("logit_softcap", lambda n: float((capped(n) - capped(number)).norm()))
    assert math.isclose(found, number, rel_tol=1e-7)


def test_an_id_is_one_of_the_usual_ones():
    assert best_number("shifted targets", lambda n: abs(n - 2.2)) == 2


def words(*places, lengths=(1, 5, 5)):
    """Return the words that are tried where the last of some places differs."""
    batches = tuple(
        Batch(np.ones((3, length), int), np.ones((3, length), int), np.ones((3, length, 7)), {})
        for length in lengths
    )
    return words_at([Point(place, 0.0, 0.0) for place in places], Record(batches, 0))


def of(*stages, single):
    return [name for name, w in WORDS.items() if w.stage in stages and w.single == single]


def test_words_are_tried_where_they_first_show():
    layer = "encoder.layers.0 of batch"
    assert words(f"{layer} 0") == of("encoder", single=True)
    ends = (f"{layer} 0", "decoder.layers.0 of batch 0")
    assert words(*ends) == of("decoder", single=True)
    assert words(*ends, "logits of batch 0") == of("logits", single=True)
    assert words("logits of batch 0") == of("encoder", "decoder", "logits", single=True)
    assert words(*ends, f"{layer} 1") == of("encoder", single=False)
    assert words(*ends, f"{layer} 1", f"{layer} 2") == []
    assert words(f"{layer} 0", "encoder.layers.1 of batch 0") == []
    both = words(f"{layer} 0", lengths=(5,))
    assert {*both} == {*of("encoder", single=True), *of("encoder", single=False)}


def test_a_sentence_says_what_the_program_does_and_the_remedy():
    assert Outside("scaled logits", 7.0).sentence(24) == (
        "your program multiplies the logits by 7; no field of the config has it: multiply the "
        "weight and the bias of the output projection by it"
    )
    assert "positions by sqrt(d_model);" in Outside("scaled sum", 24**0.5).sentence(24)
    learned = Outside("scaled sublayers", learned=(("encoder.layers.0.feed_forward", "a.0.alpha"),))
    assert "by a learned number, a.0.alpha in the first layer;" in learned.sentence(24)
