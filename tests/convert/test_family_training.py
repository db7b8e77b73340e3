"""Every family trains as in transformers: the same gradients, and the same outputs after Adam."""

import functools

import jax
import numpy as np
import optax
import pytest
import torch

from jax_transformer import apply
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.convert.transfer import to_params
from jax_transformer.training.freeze import merged, trainable
from jax_transformer.training.objective import cross_entropy
from tests.convert.families.case import (
    CASES,
    as_inputs,
    foreign_model,
    forward,
    ragged_tokens,
    widened,
)
from tests.parity.ladder import bound, check_errors, error, moved, widen
from tests.parity.measure import gradient_errors, worst
from tests.tiers import tiered

STEPS, LENGTH, RATE = 20, 9, 1e-3


def batches(config):
    """Return sources, decoder inputs and labels of every step, each [steps, B, L]."""
    random = np.random.default_rng(1)
    src, tgt = ragged_tokens(config, LENGTH, LENGTH + 1)
    shapes = (STEPS, *src.shape), (STEPS, *tgt.shape)
    sources, targets = (random.integers(6, config.src_vocab_size - 3, shape) for shape in shapes)
    for ids in (sources, targets):
        ids[ids == config.pad_id] = config.eos_id
    sources = np.where(src == config.pad_id, config.pad_id, sources)
    targets[:, :, 0] = config.bos_id
    targets[:, 1, 6:] = config.pad_id
    return [ids.astype(np.int32) for ids in (sources, targets[:, :, :-1], targets[:, :, 1:])]


@functools.partial(jax.jit, static_argnums=0)
def train(config, params, src, tgt_in, labels):
    """Return the gradients of the first step, and what is trained after the last."""
    optimizer = optax.adam(RATE)

    def loss(trained, src, tgt_in, labels):
        logits = apply(merged(params, trained), config, src, tgt_in)
        total, count = cross_entropy(logits, labels, config.pad_id)
        return total / count

    def step(carry, batch):
        trained, state = carry
        gradients = jax.grad(loss)(trained, *batch)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(trained, updates), state), gradients

    start = trainable(params, ())
    carry = start, optimizer.init(start)
    (trained, _), gradients = jax.lax.scan(step, carry, (src, tgt_in, labels))
    return jax.tree.map(lambda leaf: leaf[0], gradients), trained


def train_in_torch(model, trained, config, src, tgt_in, labels):
    """Make the steps in place; return the gradients of the first one by name."""
    optimizer, gradients = torch.optim.Adam(trained.values(), RATE), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = run_in_torch(model, config, src[step], tgt_in[step])
        targets = torch.tensor(labels[step]).long().flatten()
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets, ignore_index=config.pad_id
        ).backward()
        gradients = gradients or {name: leaf.grad.clone() for name, leaf in trained.items()}
        optimizer.step()
    return gradients


def run_in_torch(model, config, src, tgt_in):
    return model(**as_inputs(config, src), decoder_input_ids=torch.tensor(tgt_in).long()).logits


@pytest.mark.parametrize("name", tiered(CASES, ["umt5"]))
def test_gradients_and_twenty_steps_of_adam(name, dtype):
    shape = [*CASES[name].shapes][-1]
    model = foreign_model(name, shape, getattr(torch, dtype))
    config, params = from_huggingface(model)
    data = batches(config)
    valid = data[1][0] != config.pad_id  # outputs at padding are not defined

    def ours(params):
        gradients, trained = train(config, params, *data)
        return gradients, np.asarray(forward(trained, config, data[0][0], data[1][0]))[valid]

    def theirs(model):
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # padding may begin targets: here it is trained, too
        trained = {key: leaf for key, leaf in model.named_parameters() if leaf.requires_grad}
        for key, buffer in model.named_buffers():
            if key == "final_logits_bias":
                trained[key] = buffer.requires_grad_()
        gradients = train_in_torch(model, trained, config, *data)
        expected, _ = to_params(gradients, config, FAMILIES[name].layout, buffers=False)
        logits = run_in_torch(model, config, data[0][0], data[1][0])
        return expected, logits.detach().numpy()[valid]

    wide_model = widened(model, name)  # before training
    results = ours(params), theirs(model)
    (gradients, logits), (expected, their_logits) = results
    leaf, apart = worst(gradient_errors(gradients, expected))
    after = error(logits, their_logits)
    print(
        f"\n{name} {dtype}: gradient {apart:.1e} ({leaf}), logits after {STEPS} steps {after:.1e}"
    )
    assert after <= bound("adam", dtype)
    if dtype == "float64":
        assert apart <= bound("gradient", dtype)
        return
    with jax.enable_x64(True):
        wide = widen(params)
        exact, near = (ours(wide), theirs(wide_model)), map(ours, moved(wide))
        of_gradients = ([gradients for gradients, _ in both] for both in (results, exact, near))
        check_errors(name, *of_gradients, kind="gradient")
