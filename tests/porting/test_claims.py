"""What `suggest` says holds: masks that are found are used; what is only near is not found."""

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer import convert
from jax_transformer.convert import ConversionError
from jax_transformer.convert.table import Masks
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import compare
from jax_transformer.porting.hypothesis import build
from jax_transformer.porting.questions import SIDES, find_questions
from jax_transformer.porting.search import layer_modules
from jax_transformer.porting.simulate import Tensors, simulate
from jax_transformer.porting.structure import StackAlone, find_structure
from jax_transformer.porting.suggest import suggest
from jax_transformer.storage import weights as files
from tests.models import small_config
from tests.porting.renamed import run_snippet
from tests.porting.workshop import HEADS, PAD, WIDTH, WORDS, UnbiasedNorm, workshop


def weights_and_record(module):
    weights = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    return weights, run_snippet(module, PAD, WORDS, WORDS)


@pytest.mark.exhaustive
def test_masks_that_are_found_stand_in_the_layout_and_are_used(tmp_path):
    module = workshop(source_mask="nothing")
    weights, record = weights_and_record(module)
    suggestion = suggest(weights, record)
    assert suggestion.fits
    path = tmp_path / "layout.toml"
    convert.write_layout(path, suggestion.layout, suggestion.config)
    assert "[masks]\nencoder = false\nmemory = false\n" in path.read_text()
    read = convert.read_layout(path)
    assert read.layout.masks == Masks(encoder=False, memory=False)
    params, _ = convert.to_params(weights, read.config, read.layout)
    batch = record.batches[2]
    result = compare(module, params, read.config, str(path), batch.src, batch.tgt)
    assert (result.first_differing, result.masks) == (None, "default")


@pytest.mark.exhaustive
def test_padding_that_is_hidden_from_queries_and_not_from_keys_is_not_found():
    """Each layer follows from the one before it; what padding holds is the program's own."""
    suggestion = suggest(*weights_and_record(workshop(source_mask="rows")))
    assert not suggestion.fits
    text = str(suggestion)
    assert "nothing fits at logits in batch 2: " in text
    assert "the masks are others than a config can have" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("epsilon", [1e-5, 1e-6, 1e-8])
def test_a_norm_that_no_config_has_is_near_and_not_equal(epsilon):
    module = workshop(norm=functools.partial(UnbiasedNorm, epsilon=epsilon))
    suggestion = suggest(*weights_and_record(module))
    assert not suggestion.fits
    assert re.search(r"near, not equal: \S+ in batch 0 is \de-\d\d off", str(suggestion))


def fit_of(module, **answers):
    """Return how far a model of these answers, the others as they are first, follows a module."""
    weights, record = weights_and_record(module)
    structure = find_structure(weights)
    first = {q.name: q.answers[0] for q in find_questions(structure).values()}
    hypothesis = build(structure, first | {"num_heads": HEADS} | answers)
    return simulate(Tensors(weights), hypothesis, record, layer_modules(structure))


def test_what_reads_the_embeddings_may_hold_a_number_in_float32():
    fit = fit_of(workshop(scale=float(np.float32(WIDTH**0.5))))
    assert fit.complete
    assert 1e-9 < fit.error < 1e-7
    inexact = {point.name for point in fit.points if point.error > 1e-12}
    assert inexact == {f"{side}.layers.0 of batch {n}" for side in SIDES for n in range(3)}


def test_what_reads_the_outputs_of_the_program_is_exact():
    norm = functools.partial(UnbiasedNorm, epsilon=1e-8)
    fit = fit_of(workshop(norm=norm), norm="std_norm", norm_epsilon=1e-8)
    assert [point.name for point in fit.points][-1] == "encoder.layers.1 of batch 0"
    assert not fit.complete
    assert 1e-11 < fit.error < 1e-7
    assert fit_of(workshop()).complete


@pytest.mark.parametrize("saved", [True, False])
def test_layers_that_share_weights_are_refused(tmp_path, saved):
    """Also after a file that has lost which tensors were one."""
    module = workshop(shared=True)
    tensors = module.state_dict()
    if saved:
        files.write(tmp_path / "shared.safetensors", tensors)
        tensors = files.read(tmp_path / "shared.safetensors")
    names = r"readers\.0\.benches\.0\.key\.\w+ and readers\.1\.benches\.0\.key\.\w+ are equal"
    with pytest.raises(InputError, match=names):
        suggest(tensors)


def test_a_norm_that_layers_share_is_refused_where_the_file_tells(tmp_path):
    module = workshop()
    module.readers[1].norms[0] = module.readers[0].norms[0]
    torch.save(module.state_dict(), tmp_path / "shared.pt")
    with pytest.raises(InputError, match=r"readers\.0\.norms\.0\.\w+ and readers\.1\.norms\.0"):
        suggest(files.read(tmp_path / "shared.pt"))


def test_layers_that_were_copied_and_not_trained_are_placed():
    """torch copies the layers of nn.Transformer and draws their matrices anew."""
    tensors = nn.Transformer(WIDTH, HEADS, 2, 2, 40).state_dict()
    assert torch.equal(*(tensors[f"encoder.layers.{i}.linear1.bias"] for i in (0, 1)))
    assert suggest(tensors).config.num_encoder_layers == 2


def test_shared_layers_are_not_converted_by_a_layout_either():
    config = small_config("torch_nn")
    module = convert.torch_nn_module(config)
    module.encoder.layers[1].linear1 = module.encoder.layers[0].linear1
    with pytest.raises(
        ConversionError, match=r"shared +encoder\.layers\.1\.linear1\.weight  is en"
    ):
        convert.from_torch(module.state_dict(), config, "torch_nn")


def test_all_names_without_a_place_are_named_at_once():
    more = {"topic.0.weight": (7, WIDTH), "topic.0.bias": (7,), "topic.1.weight": (2, 7)}
    more |= {"criterion.weight": (WORDS,), "squares.weight": (WIDTH, WIDTH)}
    random = np.random.default_rng(0)
    extra = {name: random.normal(size=shape).astype(np.float32) for name, shape in more.items()}
    with pytest.raises(InputError) as refused:
        suggest(workshop().state_dict() | extra)
    named, remedy = str(refused.value).split(": no place in a Transformer of this library; ")
    names = ["topic.0.weight", "topic.1.weight", "criterion.weight", "squares.weight"]
    assert sorted(name.split()[0] for name in named.split(", ") if "." in name) == sorted(names)
    assert "--drop" in remedy


@pytest.mark.parametrize(
    ("kind", "prefix", "stack"),
    [
        ("an encoder alone", "encoder.", "readers"),
        ("a decoder alone", "", "writers"),  # two attentions tell it
        ("a decoder alone", "gpt.", "readers"),
        ("an encoder or a decoder alone", "", "readers"),
    ],
)
def test_one_stack_is_called_by_its_name(kind, prefix, stack):
    module = workshop()
    part = getattr(module, stack).state_dict()
    tensors = {f"{prefix}blocks.{name}": value for name, value in part.items()}
    tensors |= {"words.weight": module.source.weight}
    with pytest.raises(StackAlone, match=rf"^{kind}: one stack of layers, {prefix}blocks\.\{{0"):
        suggest(tensors)


def test_a_stack_beside_layers_that_are_not_alike_is_not_alone():
    tensors = {
        name.replace("writers.1.grow", "writers.1.widen"): value
        for name, value in workshop().state_dict().items()
    }
    with pytest.raises(InputError, match=r"found 1 stacks of layers among \d+ tensors"):
        suggest(tensors)


def test_buffers_that_layers_share_are_given_back(tmp_path):
    module = workshop()
    frequencies, empty = torch.rand(5), torch.zeros(0)
    for layer in (*module.readers, *module.writers):
        layer.register_buffer("inv_freq", frequencies)
        layer.register_buffer("empty", empty)
    torch.save(module.state_dict(), tmp_path / "shared.pt")
    weights = files.read(tmp_path / "shared.pt")
    suggestion = suggest(weights)
    params = convert.from_torch(weights, suggestion.config, suggestion.layout)
    back = convert.to_torch(params, suggestion.config, suggestion.layout)
    module.load_state_dict(back, strict=True)
    assert torch.equal(back["writers.1.inv_freq"], frequencies)


@pytest.mark.exhaustive
def test_a_model_that_differs_from_what_is_usual_in_two_fields_is_found():
    """No change of one field comes nearer; no sentence about what no config has is taken for it."""
    suggestion = suggest(*weights_and_record(workshop(post=True, scale=1)))
    assert suggestion.fits
    assert (suggestion.config.norm_placement, suggestion.config.embedding_scale) == ("post", "none")
