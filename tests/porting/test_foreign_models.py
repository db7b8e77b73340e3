"""The foreign models themselves: they run, mask as they say, and are what `MODELS` says."""

import pytest
import torch

from tests.porting.foreign_models import MODELS, OUTSIDE, random_ids, vocabularies
from tests.tiers import QUICK_MODELS, tiered

EVERY = MODELS | OUTSIDE


def first_output(model, module, src, tgt):
    """Return the logits [B, T, V] of a module that may return more, or [T, B, V]."""
    with torch.no_grad():
        output = module(src, tgt)
    output = output[0] if isinstance(output, tuple) else output
    return output if model.batch_first else output.transpose(0, 1)


@pytest.mark.parametrize("name", tiered(EVERY, QUICK_MODELS))
def test_a_model_runs_and_uses_every_parameter(name):
    model = EVERY[name]
    module = model.module()
    src, tgt = random_ids(model)
    output = module(src, tgt)
    output = output[0] if isinstance(output, tuple) else output
    batch_first = output if model.batch_first else output.transpose(0, 1)
    assert batch_first.shape == (*tgt.shape, vocabularies(model)[1])
    sums = batch_first.exp().sum(-1)
    assert torch.allclose(sums, torch.ones(())) == (model.output == "log_softmax")
    output.square().sum().backward()
    unused = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert not unused


@pytest.mark.parametrize("name", MODELS)
def test_a_model_masks_the_padding_that_it_says(name):
    """The vector of PAD must not reach what is behind it; the logits of PAD itself may differ."""
    model = MODELS[name]
    module = model.module().double()
    src, tgt = random_ids(model)
    whole = first_output(model, module, src[:1], tgt[:1])
    padding = torch.full((1, 2), model.pad_id)
    padded_source = torch.cat([src[:1], padding], 1)
    difference = (first_output(model, module, padded_source, tgt[:1]) - whole).abs().max()
    assert (difference < 1e-12) == (model.masks in ("both", "source"))
    padded_target = tgt[:1].clone()
    padded_target[0, 2] = model.pad_id
    row = first_output(model, module, src[:1], padded_target)
    other_row = first_output(model, with_another_pad_vector(model, module), src[:1], padded_target)
    difference = (row - other_row)[:, 3:, 2:].abs().max()
    assert (difference < 1e-12) == (model.masks == "both")


def with_another_pad_vector(model, module):
    """Return a copy of the module with another vector for PAD in the table of the target."""
    twin = model.module().double()
    tables = [part for part in twin.modules() if isinstance(part, torch.nn.Embedding)]
    target_size = vocabularies(model)[1]
    with torch.no_grad():
        for table in tables:
            if table.num_embeddings == target_size:
                table.weight[model.pad_id] *= -1
    return twin


def test_twelve_models_differ_in_names_and_fields():
    assert len(MODELS) == 12
    names = [frozenset(model.build().state_dict()) for model in MODELS.values()]
    for index, one in enumerate(names):
        assert all(one.isdisjoint(other) or len(one & other) <= 2 for other in names[:index])
    assert len({tuple(model.expected.items()) for model in MODELS.values()}) == 12
