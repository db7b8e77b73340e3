"""Shapes of public programs: each is found, or refused by the sentence that says what it does.

`pytest tests/porting/test_public_models.py -m "" -s -n 0` prints a row for each.
"""

import dataclasses
import math
import time

import numpy as np
import pytest

from jax_transformer import convert
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.outside import WORDS
from jax_transformer.porting.suggest import suggest
from tests.convert.foreign import randomized
from tests.porting.public_models import HEADS, SHAPES, VOCABULARIES, WIDTH, Translator, waves
from tests.porting.renamed import run_snippet


def recorded(build):
    """Return a program's weights, and the record that the printed code writes."""
    module = randomized(build()).eval()
    weights = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    return weights, run_snippet(module, getattr(module, "pad", 0), *VOCABULARIES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_found_or_refused_by_its_sentence(name):
    shape = SHAPES[name]
    weights, record = recorded(shape.build)
    weights = {key: tensor for key, tensor in weights.items() if key not in shape.dropped}
    start, passes = time.process_time(), 0  # conftest.py gives torch one thread
    try:
        suggestion = suggest(weights, record)
        text, passes, found = str(suggestion), suggestion.finding.passes, suggestion.fits
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


def test_every_word_has_a_shape():
    refused = [shape.refused for shape in SHAPES.values() if shape.refused]
    sentences = [word.sentence.format("1,000") for word in WORDS.values() if word.sentence]
    assert all(any(text in sentence for text in refused) for sentence in sentences)


@pytest.fixture(scope="module")
def usual():
    """What is suggested for the program that the shapes change."""
    suggestion = suggest(*recorded(Translator))
    assert suggestion.fits
    return suggestion


COMPARED = """
    scaled_sum from_one place_scale base_1000 halved_sublayers deep_residual shifted_inside
    logit_scale layer_memory view_of_heads view_both_ways softmax_of_queries softmax_of_heads
    rotary_pairs
""".split()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_names_what_no_config_has(name, usual):
    weights, record = recorded(SHAPES[name].build)
    fields = {"positions": "none", "embedding_scale": "none"} if "rotary" in name else {}
    config = dataclasses.replace(usual.config, **fields)
    params = convert.from_torch(weights, config, usual.layout)
    (text,) = compare_record(params, config, usual.layout, record).explanations
    assert SHAPES[name].refused in text
    assert "; no field of the config has it: " in text
    assert ": the model agrees within " in text


@pytest.mark.exhaustive
def test_a_comparison_names_the_field_that_has_a_number(usual):
    weights, record = recorded(SHAPES["logit_cap"].build)
    params = convert.from_torch(weights, usual.config, usual.layout)
    (text,) = compare_record(params, usual.config, usual.layout, record).explanations
    assert text.startswith("logit_softcap=5.0, not None: the model agrees within ")


def test_norms_of_queries_and_keys_are_refused_by_their_field():
    weights = randomized(SHAPES["normed_queries"].build()).state_dict()
    with pytest.raises(InputError, match=r"_norm\.\w+: a norm of heads: .*query_key_norm=True"):
        suggest({name: tensor.numpy() for name, tensor in weights.items()})


def test_grouped_queries_and_sandwich_norms_are_placed_by_shapes_and_names():
    weights = randomized(SHAPES["modern"].build()).state_dict()
    suggestion = suggest({name: tensor.numpy() for name, tensor in weights.items()})
    config = suggestion.config
    assert config.norm_placement_of("encoder") == config.norm_placement_of("decoder") == "sandwich"
    assert 2 * config.num_kv_heads == config.num_heads
    layer = "decoder/layers_{i}/cross_attention"
    paths = {row.foreign: row.paths for row in suggestion.layout.rows}
    norms = (f"writers.{{i}}.norms.{when}_cross_attention_norm.weight" for when in ("pre", "post"))
    assert [paths[name] for name in norms] == [
        (f"{layer}_residual/norm/scale",),
        (f"{layer}_residual/output_norm/scale",),
    ]


def tables(factor=1.0, **options):
    """Return the function that adds learned tables of positions to weights."""
    places = {f"places_{side}": factor * waves(9, WIDTH, **options).numpy() for side in ("a", "b")}
    places["places_b"][8] += 1  # read by no batch: no table is a copy of the other
    return lambda weights: weights | places


def multiplied(factor, *parts):
    """Return the function that multiplies the tensors of some modules, without rounding."""
    return lambda weights: {
        name: factor * tensor.astype(np.float64) if name.split(".")[-2] in parts else tensor
        for name, tensor in weights.items()
    }


def halves_of_pairs(weights):
    """Return the weights with the even rows of each head's queries and keys before the odd ones."""

    def moved(tensor):
        heads = tensor.reshape(HEADS, -1, *tensor.shape[1:])
        return np.concatenate([heads[:, ::2], heads[:, 1::2]], 1).reshape(tensor.shape)

    parts = ("ask", "offer")
    return {n: moved(x) if n.split(".")[-2] in parts else x for n, x in weights.items()}


REMEDIES = {
    "rotary_pairs": halves_of_pairs,
    "scaled_sum": tables(math.sqrt(WIDTH)),
    "from_one": tables(first=1),
    "place_scale": tables(0.3),
    "base_1000": tables(base=1000),
    "halved_sublayers": multiplied(0.5, "join", "narrow"),
    "logit_scale": multiplied(7.0, "head"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REMEDIES)
def test_with_the_remedy_the_program_is_found(name):
    weights, record = recorded(SHAPES[name].build)
    suggestion = suggest(REMEDIES[name](weights), record)
    assert suggestion.fits, suggestion
