"""One optimizer step and one evaluation step, as pure functions of all they depend on."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

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
        finite: Whether loss and gradient were finite; if not, the state was left as it was.
    """

    loss: Float[Array, ""]
    target_tokens: Int[Array, ""]
    learning_rate: Float[Array, ""]
    finite: Bool[Array, ""]


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

    The loss is the sum over the batch's target tokens, divided once by their number, whatever
    the number of microbatches. A loss or gradient that is not finite leaves the state as it was,
    by selection: multiplying by 0 would keep a NaN. The state handed in is donated: its arrays
    are gone afterwards.
    """
    dropout_key = jax.random.fold_in(state.key, state.step)
    loss, gradients = _loss_and_gradients(state.params, batch, dropout_key, config, training_config)
    updates, optimizer_state = adam(config, training_config).update(
        gradients, state.optimizer_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradients))
    new_state = TrainState(params, optimizer_state, state.step + 1, state.key)
    kept_state = jax.tree.map(partial(jnp.where, finite), new_state, state)
    learning_rate = learning_rate_schedule(config, training_config)(state.step)
    target_tokens = jnp.sum(batch.tgt_out != config.pad_id)
    return kept_state, Metrics(loss, target_tokens, learning_rate, finite)


def _loss_and_gradients(
    params: Params,
    batch: Batch,
    dropout_key: PRNGKeyArray,
    config: TransformerConfig,
    training_config: TrainingConfig,
) -> tuple[Float[Array, ""], Params]:
    # A batch of padding alone has loss 0.
    count = jnp.maximum(jnp.sum(batch.tgt_out != config.pad_id), 1)

    def share(params: Params, part: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
        logits = apply(params, config, part.src, part.tgt_in, dropout_key=key)
        total, _ = cross_entropy(
            logits, part.tgt_out, config.pad_id, training_config.label_smoothing
        )
        return total / count

    differentiate = jax.value_and_grad(share)
    parts = training_config.num_microbatches
    if parts == 1:
        return differentiate(params, batch, dropout_key)

    def add(sums: tuple, part_and_key: tuple) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, sums, differentiate(params, *part_and_key)), None

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(differentiate, params, batch, dropout_key))
    split = (_split_rows(batch, parts, config.pad_id), jax.random.split(dropout_key, parts))
    return jax.lax.scan(add, zeros, split)[0]


def _split_rows(batch: Batch, parts: int, pad_id: int) -> Batch:
    """Return the batch as [parts, rows, length], filled up with rows of padding."""

    def split(ids: Int[Array, "rows length"]) -> Int[Array, "parts _ length"]:
        missing = -len(ids) % parts
        ids = jnp.pad(ids, ((0, missing), (0, 0)), constant_values=pad_id)
        return ids.reshape(parts, -1, ids.shape[1])

    return Batch(*map(split, batch))


@partial(jax.jit, static_argnames=("config", "training_config"))
def evaluation_step(
    params: Params, batch: Batch, config: TransformerConfig, training_config: TrainingConfig
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the objective of a batch without dropout, as (sum, count)."""
    logits = apply(params, config, batch.src, batch.tgt_in)
    return cross_entropy(logits, batch.tgt_out, config.pad_id, training_config.label_smoothing)
