"""Models whose layers are no modules are found, and go home by a strict load."""

import dataclasses

import numpy as np
import pytest

from jax_transformer import convert
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.hypothesis import build
from jax_transformer.porting.names import find_stacks, join_heads
from jax_transformer.porting.questions import find_questions
from jax_transformer.porting.structure import find_structure
from jax_transformer.porting.suggest import suggest
from tests.convert.foreign import randomized
from tests.porting.arranged_models import ByPart, InTurn, Numbered
from tests.porting.renamed import run_snippet

# The class, its vocabularies, fields of the config that its numbers decide, and a wrong one.
PROGRAMS = {
    "by_part": (
        ByPart,
        (41, 41),
        {"attention_scale": "d_model", "activation": "gelu", "norm_epsilon": 1e-6}
        | {"num_heads": 3, "positions": "learned", "embedding_scale": "none"},
        ("attention_scale", "head_dim"),
    ),
    "numbered": (
        Numbered,
        (33, 39),
        {"num_heads": 5, "embedding_scale": "sqrt_d_model", "norm_epsilon": 1e-5},
        ("activation", "silu"),
    ),
    "in_turn": (
        InTurn,
        (35, 43),
        {"norm": "biased_std_norm", "norm_epsilon": 1e-3, "activation": "silu"}
        | {"norm_placement": "pre", "decoder_norm_placement": "post"}
        | {"final_norm": True, "decoder_final_norm": False, "positions": "learned"},
        ("norm", "std_norm"),
    ),
}


def weights_of(module):
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def check_home(weights, config, layout):
    """Every tensor comes back bit for bit; returns the parameters."""
    params = convert.from_torch(weights, config, layout)
    back = convert.to_torch(params, config, layout)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name].numpy(), weights[name]) for name in weights)
    return params


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_tensor_has_a_place_by_names_and_shapes(name, tmp_path):
    weights = weights_of(randomized(PROGRAMS[name][0]()))
    suggestion = suggest(weights)
    assert suggestion.certainty.keys() == weights.keys()
    convert.write_layout(tmp_path / "mine.toml", suggestion.layout, suggestion.config)
    layout, config = convert.read_layout(tmp_path / "mine.toml")
    assert (layout, config) == (suggestion.layout, suggestion.config)
    check_home(weights, config, layout)
    assert "{head}" in str(suggestion) or name != "numbered"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_config_is_found_by_computing(name):
    build, vocabularies, expected, (field, wrong) = PROGRAMS[name]
    module = randomized(build()).eval()
    weights, record = weights_of(module), run_snippet(module, 0, *vocabularies)
    suggestion = suggest(weights, record)
    print(suggestion)
    assert suggestion.fits
    config, layout = suggestion.config, suggestion.layout
    assert {field: getattr(config, field) for field in expected} == expected
    params = check_home(weights, config, layout)
    found = compare_record(params, config, layout, record)
    assert found.first_differing is None, found
    planted = dataclasses.replace(config, **{field: wrong})
    (explanation, *_) = compare_record(params, planted, layout, record).explanations
    assert explanation.startswith(f"{field}={getattr(config, field)!r}, not {wrong!r}")


SQUARE, UP = (8, 8), (20, 8)
ATTENTION = dict.fromkeys(("a.weight", "b.weight", "c.weight", "d.weight"), SQUARE)
NETWORK = {"e.weight": UP, "f.weight": UP[::-1]}


def names_of(templates, count):
    """Return shapes by name: of each template, parts with {} for their number."""
    return {
        f"{template.format(*[number] * template.count('{'))}.{name}": shape
        for template, part in templates.items()
        for number in range(count)
        for name, shape in part.items()
    }


@pytest.mark.parametrize("words", [("enc", "dec"), ("model.reader", "model.writer"), ("x", "y")])
@pytest.mark.parametrize("joint", [".", "_"])
def test_lists_of_parts_are_stacks_by_the_words_that_they_begin_with(words, joint):
    (one, other), blocks = words, {"attend": ATTENTION, "widen": NETWORK}
    shapes = names_of({f"{one}{joint}{block}.{{}}": part for block, part in blocks.items()}, 2)
    blocks |= {"cross1": ATTENTION}
    shapes |= names_of({f"{other}{joint}{block}.{{}}": part for block, part in blocks.items()}, 3)
    first, second = sorted(find_stacks(shapes), key=lambda stack: len(stack.indices))
    assert (first.indices, second.indices) == ((0, 1), (0, 1, 2))
    names = {s.name(i, suffix) for s in (first, second) for i in s.indices for suffix in s.shapes}
    assert names == shapes.keys()


def test_parts_that_take_turns_are_one_layer():
    turns = {"r.layers": (ATTENTION, NETWORK), "w.layers": (ATTENTION, ATTENTION, NETWORK)}
    shapes = {
        f"{before}.{len(parts) * layer + turn}.{name}": shape
        for before, parts in turns.items()
        for layer in range(2)
        for turn, part in enumerate(parts)
        for name, shape in part.items()
    }
    first, second = find_stacks(shapes)
    assert first.name(1, "{2i+1}.e.weight") == "r.layers.3.e.weight"
    assert second.name(1, "{3i+1}.a.weight") == "w.layers.4.a.weight"
    assert len(first.shapes) + len(second.shapes) == 16


def test_two_stacks_may_take_turns_in_one_list():
    crossing = {f"cross.{name}": shape for name, shape in ATTENTION.items()}
    layers = [ATTENTION | NETWORK, ATTENTION | NETWORK | crossing] * 3
    shapes = {
        f"all.{i}.{name}": shape for i, part in enumerate(layers) for name, shape in part.items()
    }
    first, second = sorted(find_stacks(shapes), key=lambda stack: len(stack.shapes))
    assert {first.name(2, name) for name in first.shapes} == {f"all.4.{name}" for name in layers[0]}
    assert second.name(1, "{2i+1}.cross.d.weight") == "all.3.cross.d.weight"


def test_a_decoder_whose_norms_stand_as_the_encoders_has_no_placement_of_its_own():
    structure = find_structure(weights_of(InTurn()))
    answers = {
        question.name: question.answers[0] for question in find_questions(structure).values()
    }
    for placement, expected in (("pre", None), ("post", "post")):
        answers |= {"norm_placement": "pre", "decoder_norm_placement": placement}
        assert build(structure, answers).config.decoder_norm_placement == expected


def test_kernels_of_heads_are_joined_and_a_list_of_layers_is_none():
    random = np.random.default_rng(0)
    shapes = {f"x.0.q.{head}.weight": (3, 12) for head in range(4)}
    shapes |= {f"x.0.q.{head}.bias": (3,) for head in range(4)}
    shapes |= {f"x.0.k.{head}": (12, 3) for head in range(4)} | {"x.0.o.weight": (12, 12)}
    shapes |= {f"x.{layer}.up.weight": (48, 12) for layer in range(4)}  # 4 layers, 4 times as wide
    shapes |= {f"x.{layer}.norm": (12,) for layer in range(4)}
    shapes |= {f"x.{layer}.distances": (30, 3) for layer in range(4)}
    tensors = {name: random.normal(size=shape) for name, shape in shapes.items()}
    joined, names = join_heads(tensors)
    assert {"x.0.q.{head}.weight", "x.0.q.{head}.bias", "x.0.k.{head}"} == {*names.values()}
    assert joined.keys() == {*names.values()} | shapes.keys() - names.keys()
    assert np.array_equal(joined["x.0.q.{head}.weight"][3:6], tensors["x.0.q.1.weight"])
    assert np.array_equal(joined["x.0.k.{head}"][:, 9:], tensors["x.0.k.3"])
    others = {name: tensors[name] for name in tensors if name[4] not in "qk" or "bias" in name}
    assert join_heads(others) == (others, {})
