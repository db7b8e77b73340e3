"""What differs between the frameworks: logits, gradients and optimizer steps, leaf by leaf."""

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_reference
from jax_transformer import TransformerConfig, apply, convert
from jax_transformer.convert.table import flatten
from jax_transformer.text.batches import Batch
from jax_transformer.training import objective
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, make_run_step
from tests.models import random_params, random_tokens, small_config, unchecked
from tests.parity.ladder import beside, error
from torch_reference import training

Jit = Callable[..., Callable[..., Any]]

STEPS = 20
# The learning rate peaks at 1.4e-3, twice that of the paper's base model; every gradient's norm
# is above the one that it is clipped to.
SETTINGS = TrainingConfig(
    steps=STEPS,
    warmup_steps=5,
    learning_rate_factor=0.02,
    label_smoothing=0.1,
    weight_decay=0.1,
    clip_norm=0.1,
)
BATCH, LENGTH = 5, 11

# The layers of torch.nn.Transformer end at hidden states; to be trained they need a head.
WITH_HEAD = {
    "token_embeddings": "separate",
    "output_projection": "linear",
    "output_bias": True,
    "positions": "sinusoidal",
}


class Pair(NamedTuple):
    """One model in both frameworks with the same weights."""

    config: TransformerConfig
    params: dict
    module: torch_reference.Transformer


def trainable(preset: str, **fields: Any) -> TransformerConfig:
    """Return a small model of token ids of this preset."""
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 2}
    return small_config(preset, **(layers | (WITH_HEAD if preset == "torch_nn" else {}) | fields))


def make_pair(config: TransformerConfig, dtype: str, seed: int = 0) -> Pair:
    """Return a model with random numbers in every leaf, in both frameworks."""
    params = random_params(config, seed, dtype)
    module = torch_reference.Transformer(config).to(getattr(torch, dtype))
    module.load_state_dict(convert.to_torch(params, config), strict=True)
    return Pair(config, params, module)


def make_case(preset: str, config: TransformerConfig, dtype: str) -> SimpleNamespace:
    """Return a pair with the name of its preset and with ids, or vectors, of both sides."""
    src, tgt = random_tokens(config, dtype=dtype)
    pair = make_pair(config, dtype)._asdict()
    return SimpleNamespace(preset=preset, src=src, tgt=tgt, **pair)


def random_batches(config: TransformerConfig, count: int) -> list[Batch]:
    """Return batches of ragged rows; the last row's source is all padding."""
    random = np.random.default_rng(7)
    batches = []
    for _ in range(count):
        src = random.integers(3, config.src_vocab_size - 1, (BATCH, LENGTH)).astype(np.int32)
        tgt = random.integers(3, config.tgt_vocab_size - 1, (BATCH, LENGTH + 1)).astype(np.int32)
        for row in range(1, BATCH):
            src[row, random.integers(1, LENGTH) :] = config.pad_id
            tgt[row, random.integers(2, LENGTH) :] = config.pad_id
        src[-1], tgt[:, 0] = config.pad_id, config.bos_id
        if (width := config.source_features) is not None:
            src = random.normal(size=(BATCH, 2 * LENGTH, width)).astype(np.float32)
        batches.append(Batch(src, tgt[:, :-1], tgt[:, 1:]))
    return batches


def forward(pair: Pair, batch: Batch, jit: Jit = jax.jit) -> float:
    """Return the error of the logits."""
    run = jit(lambda params: apply(params, pair.config, batch.src, batch.tgt_in))
    return error(run(pair.params), pair.module(*map(torch.from_numpy, batch[:2])))


def gradient_functions(
    pair: Pair, batch: Batch, jit: Jit = jax.jit
) -> dict[str, tuple[Callable[[dict], dict], Callable[[torch.nn.Module], dict]]]:
    """Return for two objectives what computes every leaf's gradient: from params, from a module.

    "logits" is the sum of the logits, each times a number of its own; "loss" the training loss
    of the batch, with padding and label smoothing.
    """
    config = pair.config
    shape = (*batch.tgt_in.shape, config.tgt_vocab_size)
    drawn = np.random.default_rng(8).normal(size=shape)
    weights = drawn.astype(jax.tree.leaves(pair.params)[0].dtype)

    def objectives(cross_entropy, logits, targets, weights):
        total, count = cross_entropy(logits, targets, config.pad_id, SETTINGS.label_smoothing)
        return (logits * weights).sum(), total / count

    @jit
    def differentiate(params, weights, which):
        def ours(params):
            logits = apply(params, config, batch.src, batch.tgt_in)
            both = objectives(objective.cross_entropy, logits, batch.tgt_out, weights)
            return jnp.where(which == 0, *both)

        return jax.grad(ours)(params)

    def ours(params, which):
        return differentiate(params, weights.astype(jax.tree.leaves(params)[0].dtype), which)

    def theirs(module, which):
        module.zero_grad()
        src, tgt_in, tgt_out = map(torch.from_numpy, batch[:3])
        logits = module(src, tgt_in)
        typed = torch.from_numpy(weights).to(logits.dtype)
        objectives(training.cross_entropy, logits, tgt_out, typed)[which].backward()
        named = {key: value.grad for key, value in module.named_parameters()}
        return convert.from_torch(named, config)

    return {
        name: (functools.partial(ours, which=which), functools.partial(theirs, which=which))
        for which, name in enumerate(("logits", "loss"))
    }


def gradients(pair: Pair, batch: Batch, jit: Jit = jax.jit) -> dict[str, dict[str, float]]:
    """Return the error of every leaf's gradient, for both objectives."""
    return {
        name: gradient_errors(ours(pair.params), theirs(pair.module))
        for name, (ours, theirs) in gradient_functions(pair, batch, jit).items()
    }


def gradient_errors(actual: dict, expected: dict) -> dict[str, float]:
    """Return max|a - b| / max|b| of each leaf, or of the leaf beside it."""
    actual, expected = flatten(actual), flatten(expected)
    errors = {}
    for name in expected:
        one, other = np.asarray(actual[name]), np.asarray(expected[name])
        largest = np.abs(np.asarray(expected[beside(name)])).max()
        errors[name] = float(np.abs(one - other).max() / largest)
    return errors


class Trained(NamedTuple):
    """Both models after the same steps, and the losses on the way."""

    ours: dict
    theirs: dict
    our_losses: np.ndarray
    their_losses: np.ndarray


def train(pair: Pair, batches: list[Batch], settings: TrainingConfig) -> Trained:
    """Make one optimizer step a batch in both frameworks, from the pair's weights."""
    pair.module.load_state_dict(convert.to_torch(pair.params, pair.config), strict=True)
    ours, our_losses = steps(pair.config, batches, settings)(pair.params)
    theirs, their_losses = steps_in_torch(pair.module, pair.config, batches, settings)
    return Trained(ours, theirs, our_losses, their_losses)


def steps(
    config: TransformerConfig, batches: list[Batch], settings: TrainingConfig
) -> Callable[[dict], tuple[dict, np.ndarray]]:
    """Return what makes one optimizer step a batch: from params to params and losses."""
    step = jax.jit(make_run_step(config, settings))

    def run(params):
        state = init_state(config, settings, jax.tree.map(jnp.array, params))
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
        return state.params, np.array(losses)

    return run


def steps_in_torch(
    module: torch_reference.Transformer,
    config: TransformerConfig,
    batches: list[Batch],
    settings: TrainingConfig,
) -> tuple[dict, np.ndarray]:
    """Make the same steps with a module, which they change."""
    optimizer = training.adam(module.train(), settings)  # dropout has rate 0
    losses = []
    for steps_made, batch in enumerate(batches):
        tensors = tuple(map(torch.from_numpy, batch[:3]))
        with unchecked() if steps_made else contextlib.nullcontext():  # the first step is checked
            losses.append(training.train_step(module, optimizer, steps_made, tensors, settings))
    return convert.from_torch(module.state_dict(), config), np.array(losses)


def training_errors(trained: Trained) -> dict[str, float]:
    """Return max|a - b| / max(1, max|b|) of each parameter after the steps."""
    ours, theirs = without_key_biases(trained.ours), without_key_biases(trained.theirs)
    return {name: float(error(ours[name], theirs[name])) for name in theirs}


def without_key_biases(params: dict) -> dict[str, Any]:
    """Return the parameters that can be compared after training, by name.

    Adam turns the rounding noise of a gradient that is 0 in theory into steps of full size. The
    biases of keys change no output (`error` of the logits shows it).
    """
    leaves = flatten(params)
    return {name: leaf for name, leaf in leaves.items() if not name.endswith("key/bias")}


def step_functions(
    pair: Pair, batches: list[Batch], settings: TrainingConfig
) -> tuple[Callable[[dict], dict], Callable[[torch_reference.Transformer], dict]]:
    """Return what computes parameters and losses of these steps: from params, from a module."""
    ours = steps(pair.config, batches, settings)

    def comparable(params, losses):
        leaves = without_key_biases(params)
        return leaves | {"losses": losses.astype(next(iter(leaves.values())).dtype)}

    return (
        lambda params: comparable(*ours(params)),
        lambda module: comparable(*steps_in_torch(module, pair.config, batches, settings)),
    )


def worst(errors: dict[str, float]) -> tuple[str, float]:
    """Return the leaf with the largest error, and that error."""
    return max(errors.items(), key=lambda item: item[1])
