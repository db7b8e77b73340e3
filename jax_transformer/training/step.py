"""One optimizer step and one evaluation step, as pure functions of all they depend on."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.data.batches import Batch
from jax_transformer.model import Params, apply, init_params
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import cross_entropy
from jax_transformer.training.optimizer import adam, learning_rate_schedule


class TrainState(NamedTuple):
    """All that a step changes, and the key that its dropout comes from.

    Attributes:
        params: The model's parameters.
        optimizer_state: The optimizer's moments.
        step: Number of steps made.
        key: Random key of the run; step n drops with `fold_in(key, n)`.
    """

    params: Params
    optimizer_state: optax.OptState
    step: Int[Array, ""]
    key: PRNGKeyArray


class Metrics(NamedTuple):
    """What a step tells of itself, left on the device.

    Attributes:
        loss: The objective, in nats a target token.
        target_tokens: Target tokens that are not padding.
        learning_rate: The learning rate of the step.
    """

    loss: Float[Array, ""]
    target_tokens: Int[Array, ""]
    learning_rate: Float[Array, ""]


def init_state(config: TransformerConfig, training_config: TrainingConfig) -> TrainState:
    """Return the state before the first step, a pure function of `training_config.seed`."""
    init_key, dropout_key = jax.random.split(jax.random.key(training_config.seed))
    params = init_params(init_key, config)
    optimizer_state = adam(config, training_config).init(params)
    return TrainState(params, optimizer_state, jnp.zeros((), jnp.int32), dropout_key)


@partial(jax.jit, static_argnames=("config", "training_config"), donate_argnames="state")
def train_step(
    state: TrainState, batch: Batch, config: TransformerConfig, training_config: TrainingConfig
) -> tuple[TrainState, Metrics]:
    """Return the state after one optimizer step on a batch, and the step's metrics.

    The loss is the sum over the batch's target tokens, divided once by their number. The state
    handed in is donated: its arrays are gone afterwards.
    """

    def mean_loss(params: Params) -> tuple[Float[Array, ""], Int[Array, ""]]:
        dropout_key = jax.random.fold_in(state.key, state.step)
        logits = apply(params, config, batch.src, batch.tgt_in, dropout_key=dropout_key)
        total, count = cross_entropy(
            logits, batch.tgt_out, config.pad_id, training_config.label_smoothing
        )
        return total / jnp.maximum(count, 1), count  # a batch of padding alone has loss 0

    (loss, count), gradients = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
    updates, optimizer_state = adam(config, training_config).update(
        gradients, state.optimizer_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    learning_rate = learning_rate_schedule(config, training_config)(state.step)
    new_state = TrainState(params, optimizer_state, state.step + 1, state.key)
    return new_state, Metrics(loss, count, learning_rate)


@partial(jax.jit, static_argnames=("config", "training_config"))
def evaluation_step(
    params: Params, batch: Batch, config: TransformerConfig, training_config: TrainingConfig
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the objective of a batch without dropout, as (sum, count)."""
    logits = apply(params, config, batch.src, batch.tgt_in)
    return cross_entropy(logits, batch.tgt_out, config.pad_id, training_config.label_smoothing)
