"""The training step: a pure function for any optimizer of optax, and that of a run on a mesh."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from jax_transformer.adapters import lora
from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.attention_backend import AttentionChoice, choose_for, execution_on
from jax_transformer.kernels.compiler_options import compiler_options
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, Execution
from jax_transformer.model.checks import check_config, check_decoder, check_execution
from jax_transformer.model.transformer import Params, init_params
from jax_transformer.model.tree import (
    in_dtype,
    match_paths,
    parameter_shardings,
    shard_parameters,
)
from jax_transformer.runtime.sharding import replicated, row_sharding
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import ComputeDtype, Count, Share, TrainingConfig
from jax_transformer.training.distillation import Teacher
from jax_transformer.training.freeze import merged, trainable
from jax_transformer.training.objective import batch_loss, check_batch
from jax_transformer.training.optimizer import GuardState, learning_rate_schedule, run_optimizer

Step = Callable[..., tuple[Params, optax.OptState, Float[Array, ""]]]


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    execution: Execution = DEFAULT_EXECUTION,
    *,
    label_smoothing: float = 0.0,
    num_microbatches: int = 1,
    freeze: tuple[str, ...] = (),
    gradient_dtype: ComputeDtype = "float32",
) -> Step:
    """Return a training step for any optimizer of optax: a pure function, for the caller to jit.

        step = jax.jit(jax_transformer.make_train_step(config, optimizer, label_smoothing=0.1))
        state = optimizer.init(params)
        params, state, loss = step(params, state, batch, dropout_key)

    The step takes the parameters, the optimizer's state, a `Batch`, and perhaps a random key for
    dropout and a `Teacher`. It returns the new parameters, the new state and the loss before the
    step: the summed `cross_entropy`, or its weighted mean with `distillation_loss`, divided once by
    the number of targets that are not padding. If it is not finite, every trained parameter becomes
    NaN; with `with_guard`, nothing changes. Of an adapter (`lora.attach`) the factors alone are
    trained. On a mesh, call it under `jax.set_mesh(mesh)`, parameters as `parameter_shardings`.

    Args:
        config: The shape of the model.
        optimizer: `optax.adam(1e-3)` for example; clipping is optax's too. In `training.optimizer`,
            `parameter_ema` averages the parameters and `with_guard` rejects steps. To accumulate
            gradients, set `num_microbatches`. `optax.MultiSteps` averages the mean gradients of its
            batches: it gives the tokens of a batch with fewer tokens more weight.
        execution: How the model is executed, for example `Execution(compute_dtype="bfloat16")`.
        label_smoothing: From 0 to below 1 (section 5.4).
        num_microbatches: Parts of the batch's rows whose gradients are added up, to save memory.
            The step is that of the whole batch, except that each part drops its own elements.
        freeze: Patterns of fixed parameters, for example `("encoder/*",)`. The state is then, and
            for an adapter too, `optimizer.init(training.freeze.trainable(params, freeze))`.
        gradient_dtype: "bfloat16" rounds the parameters before the computation, which is then in
            bfloat16: devices add up their gradients in half the bytes.

    Raises:
        InputError: An argument has another type than this. The step raises it where the fields of
            its batch do not fit together, or a pattern matches no parameter.
    """
    check_config(config)
    check_decoder(config)
    if config.head != "none":
        raise InputError(
            f"head={config.head!r} is trained by classification_loss, in a step of your own"
        )
    check_execution(execution)
    if not hasattr(optimizer, "update"):
        raise InputError(
            f"optimizer={shorten(optimizer)} must be one of optax, for example optax.sgd(0.1)"
        )
    smoothing = checked("label_smoothing", label_smoothing, Share)
    parts = checked("num_microbatches", num_microbatches, Count)
    patterns = checked("freeze", freeze, tuple[str, ...])
    checked("gradient_dtype", gradient_dtype, ComputeDtype)
    optimizer = optax.with_extra_args_support(optimizer)

    def step(
        params: Params,
        optimizer_state: optax.OptState,
        batch: Batch,
        dropout_key: PRNGKeyArray | None = None,
        teacher: Teacher | None = None,
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        """Return the parameters and the optimizer's state after a step, and the loss before it."""
        check_batch(batch)
        count = jnp.maximum(jnp.sum(batch.tgt_out != config.pad_id), 1)  # of padding alone: loss 0

        def share(trained: Params, part: Batch, key: PRNGKeyArray | None) -> Float[Array, ""]:
            whole = _in_dtype(merged(params, trained), config, gradient_dtype)
            return batch_loss(whole, part, config, smoothing, key, execution, teacher)[0] / count

        differentiate = jax.value_and_grad(share)
        trained = trainable(params, patterns)
        if parts == 1:
            loss, gradients = differentiate(trained, batch, dropout_key)
        else:
            split = _split_rows(batch, parts, config.pad_id)
            loss, gradients = _sum_of_microbatches(differentiate, trained, split, dropout_key)
        if not isinstance(optimizer_state, GuardState):  # which refuses the step
            # Else the rows of tables that no id names would look right.
            finite = jnp.isfinite(loss)
            gradients = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.nan), gradients)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, trained, value=loss)
        new = optax.apply_updates(trained, updates)
        return merged(params, new), optimizer_state, loss

    return step


def _sum_of_microbatches(
    differentiate: Callable[..., tuple[Float[Array, ""], Params]],
    trained: Params,
    split: Batch,
    dropout_key: PRNGKeyArray | None,
) -> tuple[Float[Array, ""], Params]:
    """Return the sums of the losses and of the gradients of the parts of a batch."""
    parts = len(split.src)
    keys = None if dropout_key is None else jax.random.split(dropout_key, parts)

    def add(sums: tuple, part_and_key: tuple) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, sums, differentiate(trained, *part_and_key)), None

    first = jax.tree.map(lambda ids: ids[0], split)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(differentiate, trained, first, dropout_key))
    return jax.lax.scan(add, zeros, (split, keys))[0]


def _in_dtype(params: Params, config: TransformerConfig, dtype: ComputeDtype) -> Params:
    """Return float32 parameters in the dtype of the computation; their gradients are float32."""
    if dtype == "float32":
        return params
    return shard_parameters(in_dtype(params, dtype), config)


def _split_rows(batch: Batch, parts: int, pad_id: int) -> Batch:
    """Return the batch as [parts, rows, length], with rows of padding at the end."""

    # A part takes every `parts`-th row. So added rows of padding move no row and change no dropout,
    # and every part has rows of every device of the mesh.
    def split(rows: Shaped[Array, "rows *row"], padding: int) -> Shaped[Array, "parts _ *row"]:
        missing = (0, -len(rows) % parts)
        rows = jnp.pad(rows, (missing, *[(0, 0)] * (rows.ndim - 1)), constant_values=padding)
        return rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1)

    fields = zip(batch, (pad_id, pad_id, pad_id, 0, 0), strict=True)
    return Batch(*(None if ids is None else split(ids, padding) for ids, padding in fields))


class TrainState(NamedTuple):
    """Everything that a step of a run changes, and the random key of its dropout."""

    params: Params  # the frozen ones included
    optimizer_state: optax.OptState  # of the trained parameters, as `run_optimizer` makes it
    step: Int[Array, ""]  # number of accepted steps
    key: PRNGKeyArray  # of the run; step n drops with `fold_in(key, n)`

    @property
    def eval_params(self) -> Params:
        """The parameters to evaluate and to keep: the EMA, where the run has one."""
        ema = optax.tree.get(self.optimizer_state, "ema")
        return self.params if ema is None else merged(self.params, ema)


class Metrics(NamedTuple):
    """Measurements of one step, kept on the device."""

    loss: Float[Array, ""]  # in nats a target token
    target_tokens: Int[Array, ""]  # without padding
    learning_rate: Float[Array, ""]
    finite: Bool[Array, ""]  # loss and gradient; if not, the state did not change
    spike: Bool[Array, ""] | bool = False  # so far above recent losses that it did not either
    task_counts: Sequence[int] = ()  # examples of each task of a mixed corpus; the loop adds them


def init_state(
    config: TransformerConfig, training_config: TrainingConfig, params: Params | None = None
) -> TrainState:
    """Return the state before the first step; `seed` draws an adapter, and parameters of None."""
    init_key, dropout_key = jax.random.split(jax.random.key(training_config.seed))
    if params is None:
        params = init_params(init_key, config)
    if (rank := training_config.lora_rank) is not None:
        targets, alpha = training_config.lora_targets, training_config.lora_alpha
        adapter = flatten_dict(lora.init(init_key, config, rank, targets, alpha), sep="/")
        leaves = flatten_dict(params, sep="/")
        whole = match_paths("lora_whole", leaves, training_config.lora_whole)
        adapter |= {path: jnp.copy(leaves[path]) for path in whole}
        params = lora.attach(params, unflatten_dict(adapter, sep="/"))
    optimizer = run_optimizer(config, training_config)
    optimizer_state = optimizer.init(trainable(params, training_config.freeze))
    return TrainState(params, optimizer_state, jnp.zeros((), jnp.int32), dropout_key)


# Parts of a state that a new run may keep of an earlier one, with the numbers of their steps.
KEPT_STATES = {"moments": optax.ScaleByAdamState, "step": optax.ScaleByScheduleState}


def with_kept(state: TrainState, earlier: TrainState, parts: Collection[str]) -> TrainState:
    """Return the first state of a run with some of `KEPT_STATES` of an earlier run's state."""
    kinds = tuple(KEPT_STATES[part] for part in parts)

    def is_kept(node: Any) -> bool:
        return isinstance(node, kinds)

    nodes = jax.tree.leaves(earlier.optimizer_state, is_leaf=is_kept)
    kept = {type(node): node for node in nodes if is_kept(node)}
    optimizer_state = jax.tree.map(
        lambda node: kept.get(type(node), node), state.optimizer_state, is_leaf=is_kept
    )
    step = earlier.step if "step" in parts else state.step
    return state._replace(optimizer_state=optimizer_state, step=step)


TrainStep = Callable[..., tuple[TrainState, Metrics]]  # of a state, a batch, perhaps a teacher
EvaluationStep = Callable[[Params, Batch], tuple[Float[Array, ""], Int[Array, ""]]]


def make_run_step(
    config: TransformerConfig,
    training_config: TrainingConfig,
    execution: Execution | None = None,
    mesh: AbstractMesh | None = None,
) -> TrainStep:
    """Return the training step of a run: that of `make_train_step` with `run_optimizer`.

    It takes the state of the run, a batch and perhaps a `Teacher`, and returns the state after the
    step and the step's metrics. `jax.jit` may donate it the state.

    Args:
        execution: As `training_execution` returns it; None is that of a CPU.
        mesh: The mesh that the rows and the parameters are split over; None is one device.

    Raises:
        InputError: As `make_train_step`.
    """
    execution = execution or training_execution(None, config, training_config)
    half = training_config.compute_dtype == "bfloat16" and execution.compute_dtype is None
    step = make_train_step(
        config,
        run_optimizer(config, training_config),
        execution,
        label_smoothing=training_config.label_smoothing,
        num_microbatches=training_config.num_microbatches,
        freeze=training_config.freeze,
        gradient_dtype="bfloat16" if half else "float32",
    )

    def train_step(
        state: TrainState, batch: Batch, teacher: Teacher | None = None
    ) -> tuple[TrainState, Metrics]:
        dropout_key = jax.random.fold_in(state.key, state.step)
        with use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            params, optimizer_state, loss = step(
                state.params, state.optimizer_state, batch, dropout_key, teacher
            )
        finite, spike = optimizer_state.finite, optimizer_state.spike
        learning_rate = learning_rate_schedule(config, training_config)(state.step)
        target_tokens = jnp.sum(batch.tgt_out != config.pad_id)
        new_state = TrainState(params, optimizer_state, state.step + (finite & ~spike), state.key)
        return new_state, Metrics(loss, target_tokens, learning_rate, finite, spike)

    return train_step


def make_evaluation_step(
    config: TransformerConfig,
    training_config: TrainingConfig,
    execution: Execution = DEFAULT_EXECUTION,
    mesh: AbstractMesh | None = None,
) -> EvaluationStep:
    """Return the function of parameters and a batch whose (sum, count) is the objective.

    It drops nothing. Arguments as `make_run_step`.
    """

    def evaluation_step(params: Params, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        check_batch(batch)
        with use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            return batch_loss(
                _in_dtype(params, config, training_config.compute_dtype),
                batch,
                config,
                training_config.label_smoothing,
                execution=execution,
            )

    return evaluation_step


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
        params = jax.device_put(params, parameter_shardings(mesh, params, config))
    return jax.jit(make, out_shardings=places)(params)


def batch_shapes(
    config: TransformerConfig,
    training_config: TrainingConfig,
    rows: int,
    length: int,
    target_length: int,
) -> Batch:
    """Return the shapes and dtypes of a batch of a run, without any array."""
    src = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    if config.source_features is not None:
        frames = 2 * config.stack("encoder").max_length
        src = jax.ShapeDtypeStruct((rows, frames, config.source_features), jnp.float32)
    tgt = jax.ShapeDtypeStruct((rows, target_length), jnp.int32)
    if training_config.batching == "packed":
        return Batch(src, tgt, tgt, src_segments=src, tgt_segments=tgt)
    return Batch(src, tgt, tgt)


def attention_choice(
    device: jax.Device, config: TransformerConfig, training_config: TrainingConfig
) -> AttentionChoice:
    """Return which implementation of attention a training step uses on a device, and why."""
    dropped = config.attention_dropout_rate > 0
    return choose_for(device, training_config.compute_dtype, config, dropped)


def training_execution(
    device: jax.Device | None, config: TransformerConfig, training_config: TrainingConfig
) -> Execution:
    """Return how a training step is executed on a device; None is any CPU."""
    dtype, execution = training_config.compute_dtype, Execution()
    if device is not None:
        attention = attention_choice(device, config, training_config).implementation
        execution = Execution.for_platform(device.platform, attention=attention)
    wide = dtype == "bfloat16" and training_config.gradient_dtype == "float32"
    return dataclasses.replace(
        execution,
        remat=training_config.remat,
        scan_layers=training_config.scan_layers,
        lora_dropout=training_config.lora_dropout,
        # The parameters stay float32, and so do their gradients.
        compute_dtype=dtype if wide else None,
    )


def sharded_train_step(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig, *teachers: Teacher
) -> TrainStep:
    """Return `make_run_step` for a mesh, compiled; the state handed in is donated.

    A teacher, which lies on the mesh, is a third argument of the step.
    """
    state = state_shardings(mesh, config, training_config)
    execution = training_execution(mesh.devices.flat[0], config, training_config)
    return jax.jit(
        make_run_step(config, training_config, execution, mesh.abstract_mesh),
        in_shardings=(
            state,
            row_sharding(mesh),
            *jax.tree.map(lambda leaf: leaf.sharding, teachers),
        ),
        out_shardings=(state, replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


def sharded_evaluation_step(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> EvaluationStep:
    """Return `make_evaluation_step` for a mesh, compiled."""
    execution = execution_on(mesh.devices.flat[0], training_config.compute_dtype, config)
    params = state_shardings(mesh, config, training_config).params
    return jax.jit(
        make_evaluation_step(config, training_config, execution, mesh.abstract_mesh),
        in_shardings=(params, row_sharding(mesh)),
        out_shardings=replicated(mesh),
    )
