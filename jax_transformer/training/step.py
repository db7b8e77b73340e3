"""One optimizer step and one evaluation step: pure functions, and compiled for a mesh."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.attention_backend import Choice, choose_for, execution_on
from jax_transformer.kernels.compiler_options import compiler_options
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, Execution
from jax_transformer.model.checks import check_config, check_execution
from jax_transformer.model.transformer import Params, init_params
from jax_transformer.model.tree import parameter_shardings, shard_parameters
from jax_transformer.runtime.sharding import replicated, row_sharding
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.freeze import merged, trainable
from jax_transformer.training.objective import batch_loss, check_batch, check_label_smoothing
from jax_transformer.training.optimizer import adam, learning_rate_schedule

SPIKE_WINDOW = 32  # losses whose median a spike is measured against


class TrainState(NamedTuple):
    """Everything that a step changes, and the random key of its dropout."""

    params: Params  # the frozen ones included
    optimizer_state: optax.OptState  # of the trained parameters
    step: Int[Array, ""]  # number of steps made
    key: PRNGKeyArray  # of the run; step n drops with `fold_in(key, n)`
    ema: Params | None = None  # exponential moving average (EMA) of the trained parameters
    # The finite losses of the last steps, where spikes are rejected; NaN for steps not made yet.
    recent_losses: Float[Array, " window"] | None = None

    @property
    def eval_params(self) -> Params:
        """The parameters to evaluate and to keep: the EMA, where the run has one."""
        return self.params if self.ema is None else merged(self.params, self.ema)


class Metrics(NamedTuple):
    """Measurements of one step, kept on the device."""

    loss: Float[Array, ""]  # in nats a target token
    target_tokens: Int[Array, ""]  # without padding
    learning_rate: Float[Array, ""]
    finite: Bool[Array, ""]  # loss and gradient; if not, the state did not change
    spike: Bool[Array, ""] | bool = False  # so far above recent losses that it did not either


def init_state(
    config: TransformerConfig, training_config: TrainingConfig, params: Params | None = None
) -> TrainState:
    """Return the state before the first step; parameters that are None are drawn by `seed`."""
    init_key, dropout_key = jax.random.split(jax.random.key(training_config.seed))
    if params is None:
        params = init_params(init_key, config)
    trained = trainable(params, training_config.freeze)
    optimizer_state = adam(config, training_config).init(trained)
    ema = None
    if training_config.ema_decay is not None:
        ema = jax.tree.map(jnp.copy, trained)  # both are donated to the step
    recent = None if training_config.spike_factor is None else jnp.full(SPIKE_WINDOW, jnp.nan)
    step = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer_state, step, dropout_key, ema, recent)


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvaluationStep = Callable[[Params, Batch], tuple[Float[Array, ""], Int[Array, ""]]]

STATIC = ("config", "training_config", "execution")  # each new value is a compilation


@partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def train_step(
    state: TrainState,
    batch: Batch,
    config: TransformerConfig,
    training_config: TrainingConfig,
    execution: Execution | None = None,
) -> tuple[TrainState, Metrics]:
    """Return the state after one optimizer step on a batch, and the step's metrics.

    The loss is the sum over the batch's target tokens, divided once by their number, whatever the
    number of microbatches. A loss or gradient that is not finite leaves the state unchanged, by
    selection: a multiplication by 0 would keep a NaN. A loss above `spike_factor` times the median
    of the recent losses also leaves it unchanged. Such a loss joins the recent losses, so a loss
    that stays at this level is accepted later. Frozen parameters have no gradient and stay as they
    are. The argument `state` is donated: do not use it afterwards.

    Args:
        execution: As `training_execution` returns it; None is that of a CPU.

    Raises:
        InputError: As `freeze.trained_names`, `check_batch` and `batch_loss`.
    """
    check_batch(batch)
    execution = execution or training_execution(None, config, training_config)
    dropout_key = jax.random.fold_in(state.key, state.step)
    loss, gradients = _loss_and_gradients(
        state.params, batch, dropout_key, config, training_config, execution
    )
    # Whether the squares, which Adam needs, are finite too. The sum of magnitudes answers in one
    # pass; XLA would keep squares in memory for the moments.
    magnitude = optax.tree.norm(gradients, ord=1)
    squarable = magnitude < math.sqrt(jnp.finfo(magnitude.dtype).max)
    finite = jnp.isfinite(loss) & squarable
    recent, spike = state.recent_losses, jnp.array(False)
    if training_config.spike_factor is not None:
        spike = finite & (loss > training_config.spike_factor * jnp.median(recent))
        recent = jnp.where(finite, jnp.append(recent[1:], loss), recent)
    accepted = finite & ~spike
    old = trainable(state.params, training_config.freeze)
    updates, optimizer_state = adam(config, training_config).update(
        gradients, state.optimizer_state, old, accepted=accepted
    )
    new = optax.apply_updates(old, updates)
    ema = None
    if training_config.ema_decay is not None:
        # With a constant decay, the initial parameters would dominate the EMA for a long time.
        decay = jnp.minimum(training_config.ema_decay, (1 + state.step) / (10 + state.step))
        ema = optax.incremental_update(new, state.ema, 1 - decay)
    new, step, ema = jax.tree.map(
        partial(jnp.where, accepted), (new, state.step + 1, ema), (old, state.step, state.ema)
    )
    params = merged(state.params, new)
    new_state = TrainState(params, optimizer_state, step, state.key, ema, recent)
    learning_rate = learning_rate_schedule(config, training_config)(state.step)
    target_tokens = jnp.sum(batch.tgt_out != config.pad_id)
    return new_state, Metrics(loss, target_tokens, learning_rate, finite, spike)


Step = Callable[..., tuple[Params, optax.OptState, Float[Array, ""]]]


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    execution: Execution = DEFAULT_EXECUTION,
    *,
    label_smoothing: float = 0.0,
) -> Step:
    """Return a training step for any optimizer of optax: a pure function, for the caller to jit.

        step = jax.jit(jax_transformer.make_train_step(config, optimizer, label_smoothing=0.1))
        state = optimizer.init(params)
        params, state, loss = step(params, state, batch, dropout_key)

    The step takes the parameters, the optimizer's state, a `Batch` and a random key for dropout
    (None: no dropout). It returns the new parameters, the new state and the loss before the step:
    the summed `cross_entropy` of the batch divided by its number of target tokens. On a mesh, call
    it under `jax.set_mesh(mesh)`, with the parameters placed by `parameter_shardings`; gradients
    are then added up over the mesh.

    Args:
        optimizer: `optax.adam(1e-3)` for example; accumulation and clipping are optax's too.
        execution: How the model is executed; `compute_dtype="bfloat16"` computes in bfloat16 and
            keeps parameters, gradients and the optimizer's state in float32.
        label_smoothing: From 0 to below 1 (section 5.4).

    Raises:
        InputError: An argument has another type than this. The step raises it where the fields of
            its batch do not fit together.
    """
    check_config(config)
    check_execution(execution)
    check_label_smoothing(label_smoothing)
    if not hasattr(optimizer, "update"):
        raise InputError(f"optimizer={shorten(optimizer)} must be one of optax, as optax.sgd(0.1)")

    def step(
        params: Params,
        optimizer_state: optax.OptState,
        batch: Batch,
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        """Return the parameters and the optimizer's state after a step, and the loss before it."""
        check_batch(batch)

        def mean_loss(params: Params) -> Float[Array, ""]:
            total, count = batch_loss(
                params, batch, config, label_smoothing, dropout_key, execution
            )
            return total / jnp.maximum(count, 1)  # a batch of padding alone has loss 0

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, loss

    return step


def _loss_and_gradients(
    params: Params,
    batch: Batch,
    dropout_key: PRNGKeyArray,
    config: TransformerConfig,
    training_config: TrainingConfig,
    execution: Execution,
) -> tuple[Float[Array, ""], Params]:
    """Return the loss of a batch and its gradient for the parameters that are trained."""
    # A batch of padding alone has loss 0.
    count = jnp.maximum(jnp.sum(batch.tgt_out != config.pad_id), 1)
    smoothing = training_config.label_smoothing

    def share(trained: Params, part: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
        whole = merged(params, trained)
        if execution.compute_dtype is None:
            whole = _cast(whole, config, training_config)
        total, _ = batch_loss(whole, part, config, smoothing, key, execution=execution)
        return total / count

    differentiate = jax.value_and_grad(share)
    parts = training_config.num_microbatches
    trained = trainable(params, training_config.freeze)
    if parts == 1:
        return differentiate(trained, batch, dropout_key)

    def add(sums: tuple, part_and_key: tuple) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, sums, differentiate(trained, *part_and_key)), None

    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(differentiate, trained, batch, dropout_key))
    split = (_split_rows(batch, parts, config.pad_id), jax.random.split(dropout_key, parts))
    return jax.lax.scan(add, zeros, split)[0]


def _cast(params: Params, config: TransformerConfig, training_config: TrainingConfig) -> Params:
    """Return the parameters in the dtype of the computation; gradients have the original dtype."""
    if training_config.compute_dtype == "float32":
        return params
    params = jax.tree.map(lambda leaf: leaf.astype(training_config.compute_dtype), params)
    return shard_parameters(params, config)


def _split_rows(batch: Batch, parts: int, pad_id: int) -> Batch:
    """Return the batch as [parts, rows, length], with rows of padding at the end."""

    # A part takes every `parts`-th row. So added rows of padding move no row and change no dropout,
    # and every part has rows of every device of the mesh.
    def split(ids: Int[Array, "rows length"], padding: int) -> Int[Array, "parts _ length"]:
        missing = -len(ids) % parts
        ids = jnp.pad(ids, ((0, missing), (0, 0)), constant_values=padding)
        return ids.reshape(-1, parts, ids.shape[1]).swapaxes(0, 1)

    fields = zip(batch, (pad_id, pad_id, pad_id, 0, 0), strict=True)
    return Batch(*(None if ids is None else split(ids, padding) for ids, padding in fields))


@partial(jax.jit, static_argnames=STATIC)
def evaluation_step(
    params: Params,
    batch: Batch,
    config: TransformerConfig,
    training_config: TrainingConfig,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the objective of a batch without dropout, as (sum, count)."""
    check_batch(batch)
    params = _cast(params, config, training_config)
    return batch_loss(params, batch, config, training_config.label_smoothing, execution=execution)


def state_shapes(config: TransformerConfig, training_config: TrainingConfig) -> TrainState:
    """Return the shapes and dtypes of the state, without any array."""
    return jax.eval_shape(partial(init_state, config, training_config))


def state_shardings(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> TrainState:
    """Return the sharding of each array of the state."""
    return parameter_shardings(mesh, state_shapes(config, training_config), config)


def sharded_init_state(
    mesh: Mesh,
    config: TransformerConfig,
    training_config: TrainingConfig,
    params: Params | None = None,
) -> TrainState:
    """Return `init_state`, with each shard computed on the device that holds it."""
    make = partial(init_state, config, training_config)
    places = state_shardings(mesh, config, training_config)
    if params is not None:
        params = jax.device_put(params, places.params)
    return jax.jit(make, out_shardings=places)(params)


def attention_choice(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> Choice:
    """Return which implementation of attention `sharded_train_step` uses, and why."""
    dropped = config.attention_dropout_rate > 0
    return choose_for(mesh.devices.flat[0], training_config.compute_dtype, config.head_dim, dropped)


def training_execution(
    device: jax.Device | None, config: TransformerConfig, training_config: TrainingConfig
) -> Execution:
    """Return how a training step is executed on a device; None is any CPU."""
    dtype, wide = training_config.compute_dtype, training_config.gradient_dtype == "float32"
    fields = {
        "remat": training_config.remat,
        "scan_layers": training_config.scan_layers,
        # The kernels stay float32, and so do their gradients.
        "compute_dtype": dtype if dtype == "bfloat16" and wide else None,
    }
    if device is None:
        return Execution(**fields)
    dropped = config.attention_dropout_rate > 0
    return execution_on(device, dtype, config.head_dim, dropped, **fields)


def sharded_train_step(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> TrainStep:
    """Return `train_step` for a mesh, jitted; the state handed in is donated."""
    state = state_shardings(mesh, config, training_config)
    execution = training_execution(mesh.devices.flat[0], config, training_config)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with use_abstract_mesh(mesh.abstract_mesh):
            return train_step(state, batch, config, training_config, execution)

    return jax.jit(
        step,
        in_shardings=(state, row_sharding(mesh)),
        out_shardings=(state, replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


def sharded_evaluation_step(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> EvaluationStep:
    """Return `evaluation_step` for a mesh, jitted."""
    device = mesh.devices.flat[0]
    execution = execution_on(device, training_config.compute_dtype, config.head_dim, dropped=False)

    def step(params: Params, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        with use_abstract_mesh(mesh.abstract_mesh):
            return evaluation_step(params, batch, config, training_config, execution)

    params = state_shardings(mesh, config, training_config).params
    return jax.jit(step, in_shardings=(params, row_sharding(mesh)), out_shardings=replicated(mesh))
