"""The optimizer: Adam, Adafactor or Muon, under the schedule of section 5.3 and others.

`with_guard` rejects steps and `parameter_ema` averages parameters, with any optimizer of optax.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.config.lengths import VOCABULARIES
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import PARAMETERS, decayed
from jax_transformer.training.config import TrainingConfig

USUAL_RATE = 1e-3  # the peak of a schedule without a rate of its own
SPIKE_WINDOW = 32  # losses whose median a spike is measured against


def learning_rate_schedule(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps already made.

    The rate grows linearly for `warmup_steps`; with "t5" it is then constant. After that, at step n
    counted from 1, it is the peak times a share: 1 ("constant"), sqrt(warmup_steps / n)
    ("inverse_square_root", "noam" and "t5"), or a half cosine that reaches 0 at `steps` ("cosine").
    The peak of "noam" is factor / sqrt(d_model * warmup_steps) (section 5.3). Over the last
    `cooldown_steps` the rate is also multiplied by a line that falls to 0.
    """
    warmup, schedule = training_config.warmup_steps, training_config.schedule
    peak = training_config.learning_rate or USUAL_RATE
    if schedule == "noam":
        peak = training_config.learning_rate_factor / (config.d_model * warmup) ** 0.5

    def learning_rate(steps_made: Int[Array, ""] | int) -> Float[Array, ""]:
        step = jnp.asarray(steps_made, float) + 1
        if schedule == "constant":
            share = jnp.ones_like(step)
        elif schedule == "cosine":
            done = (step - warmup) / (training_config.steps - warmup)
            share = (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1))) / 2
        else:
            share = jnp.sqrt(warmup / step)
        if training_config.cooldown_steps:
            left = (training_config.steps + 1 - step) / training_config.cooldown_steps
            share = share * jnp.clip(left, 0, 1)
        rise = jnp.ones_like(step) if schedule == "t5" else step / warmup
        return peak * jnp.minimum(rise, share)

    return learning_rate


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Return the transformation that scales a gradient down to a global norm of `max_norm`.

    The divisor is the norm plus 1e-6, as in torch.nn.utils.clip_grad_norm_. optax divides by the
    norm alone, a relative difference of 1e-6 that Adam would accumulate.
    """

    def clip(gradients: Params, _: Params | None) -> Params:
        scale = jnp.minimum(max_norm / (optax.tree.norm(gradients) + 1e-6), 1)
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)

    return optax.stateless(clip)


def refusable(
    transformation: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with an argument `accepted` of `update`; False keeps the state."""

    def update(
        gradients: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        accepted: Bool[Array, ""] | bool = True,
    ) -> tuple[Params, optax.OptState]:
        updates, new_state = transformation.update(gradients, state, params)
        return updates, jax.tree.map(partial(jnp.where, accepted), new_state, state)

    return optax.GradientTransformationExtraArgs(transformation.init, update)


def scale_by_adam(training_config: TrainingConfig) -> optax.GradientTransformationExtraArgs:
    """Return `optax.scale_by_adam` as a `refusable` transformation.

    The update is computed from the moments after the decision whether the step is accepted. optax
    computes it from the new moments before that decision, which makes XLA copy all old moments.
    """
    beta1, beta2 = training_config.adam_beta1, training_config.adam_beta2
    epsilon = training_config.adam_epsilon
    moments = refusable(optax.scale_by_adam(beta1, beta2, epsilon))

    def update(
        gradients: Params,
        state: optax.ScaleByAdamState,
        params: Params | None = None,
        *,
        accepted: Bool[Array, ""] | bool = True,
    ) -> tuple[Params, optax.ScaleByAdamState]:
        _, state = moments.update(gradients, state, params, accepted=accepted)
        mean = optax.tree.bias_correction(state.mu, beta1, state.count)
        square = optax.tree.bias_correction(state.nu, beta2, state.count)
        return jax.tree.map(lambda m, s: m / (jnp.sqrt(s) + epsilon), mean, square), state

    return optax.GradientTransformationExtraArgs(moments.init, update)


def optimizer_by_name(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.GradientTransformationExtraArgs:
    """Return Adam (Kingma and Ba 2015), or optax's Adafactor or Muon, under schedule and clipping.

    Adam's weight decay is decoupled, as in torch.optim.AdamW (Loshchilov and Hutter 2019): learning
    rate times decay times parameter, no part of the moments; biases and norms do not decay.
    """
    schedule = learning_rate_schedule(config, training_config)
    decay, clip_norm = training_config.weight_decay, training_config.clip_norm
    if training_config.optimizer == "adam":
        chain = [scale_by_adam(training_config)]
        if decay:
            chain.append(optax.add_decayed_weights(decay, mask=decayed))
        chain.append(refusable(optax.scale_by_learning_rate(schedule)))
    elif training_config.optimizer == "adafactor":
        chain = [refusable(optax.adafactor(schedule))]
    else:
        muon = optax.contrib.muon(
            schedule,
            weight_decay=decay,
            weight_decay_mask=decayed,
            adam_b1=training_config.adam_beta1,
            adam_b2=training_config.adam_beta2,
            adam_weight_decay=decay,
            muon_weight_dimension_numbers=_kernels_of_layers,
        )
        chain = [refusable(muon)]
    if clip_norm is not None:
        chain.insert(0, clip_by_global_norm(clip_norm))
    return optax.chain(*chain)


def _kernels_of_layers(params: Params) -> Any:
    """Return which parameters Muon trains: the matrices, without tables and the last projection."""

    def numbers(path: tuple[Any, ...], leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = [key.key for key in path]
        is_kernel = names[-1] == "kernel" and leaf.ndim == 2 and names[0] != "output_projection"
        return optax.contrib.MuonDimensionNumbers() if is_kernel else None

    return jax.tree_util.tree_map_with_path(numbers, params)


def keep_rows(rows: int) -> optax.GradientTransformation:
    """Return the transformation that changes no number of the first `rows` ids.

    Before an optimizer it keeps its moments at 0, behind it also what decay would change.
    """

    def keep(path: tuple[Any, ...], leaf: Array) -> Array:
        parameter = PARAMETERS.get("/".join(key.key for key in path))
        lengths = parameter.lengths if parameter else ()
        for axis in (i for i, name in enumerate(lengths) if name in VOCABULARIES):
            ids = jax.lax.broadcasted_iota(jnp.int32, leaf.shape, axis)
            leaf = jnp.where(ids < rows, -0.0, leaf)  # which changes no bit of a parameter
        return leaf

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(keep, updates))


class EmaState(NamedTuple):
    """The state of `parameter_ema`."""

    ema: Params  # exponential moving average (EMA) of the trained parameters
    count: Int[Array, ""]  # accepted steps


def parameter_ema(decay: float) -> optax.GradientTransformationExtraArgs:
    """Return the last link of an `optax.chain`; its state has the parameters' EMA of `decay`."""

    def init(params: Params) -> EmaState:
        return EmaState(jax.tree.map(jnp.copy, params), jnp.zeros((), jnp.int32))

    def update(updates: Params, state: EmaState, params: Params) -> tuple[Params, EmaState]:
        # With a constant decay, the initial parameters would dominate the EMA for a long time.
        weight = jnp.minimum(decay, (1 + state.count) / (10 + state.count))
        ema = optax.incremental_update(optax.apply_updates(params, updates), state.ema, 1 - weight)
        return updates, EmaState(ema, state.count + 1)

    return refusable(optax.GradientTransformation(init, update))


class GuardState(NamedTuple):
    """The state of `with_guard`.

    The answers of the last step are results of the program and not counts of them: XLA would then
    repeat the sum over all gradients in the update of each parameter (compiling took 1.45 times as
    long).
    """

    inner: optax.OptState
    finite: Bool[Array, ""]  # loss and gradient of the last step
    spike: Bool[Array, ""]  # whether its loss was so far above the recent ones
    # The finite losses of the last steps, where spikes are rejected; NaN for steps not made yet.
    recent_losses: Float[Array, " window"] | None


def with_guard(
    optimizer: optax.GradientTransformationExtraArgs, spike_factor: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer, which rejects a step that is not finite or whose loss is a spike.

    A rejected step changes no parameter and no state of the optimizer, by selection: a
    multiplication by 0 would keep a NaN. A spike is a loss above `spike_factor` times the median
    of the recent losses. It joins them, so a loss that stays at its level is accepted later.

    Args:
        optimizer: Keeps its state where the argument `accepted` of `update` is False: that of
            `optimizer_by_name`, or another one made `refusable`.
        spike_factor: None rejects no spikes.
    """

    def init(params: Params) -> GuardState:
        recent = None if spike_factor is None else jnp.full(SPIKE_WINDOW, jnp.nan)
        return GuardState(optimizer.init(params), jnp.array(True), jnp.array(False), recent)

    def update(
        gradients: Params,
        state: GuardState,
        params: Params | None = None,
        *,
        value: Float[Array, ""],
        **extra: Any,
    ) -> tuple[Params, GuardState]:
        # Whether the squares, which Adam needs, are finite too. The sum of magnitudes answers in
        # one pass; XLA would keep squares in memory for the moments.
        magnitude = optax.tree.norm(gradients, ord=1)
        squarable = magnitude < math.sqrt(jnp.finfo(magnitude.dtype).max)
        finite = jnp.isfinite(value) & squarable
        recent, spike = state.recent_losses, jnp.array(False)
        if spike_factor is not None:
            spike = finite & (value > spike_factor * jnp.median(recent))
            recent = jnp.where(finite, jnp.append(recent[1:], value), recent)
        accepted = finite & ~spike
        updates, inner = optimizer.update(
            gradients, state.inner, params, accepted=accepted, **extra
        )
        # Added to a parameter, -0.0 changes no bit of it, not even the sign of a zero.
        updates = jax.tree.map(lambda leaf: jnp.where(accepted, leaf, -0.0), updates)
        return updates, GuardState(inner, finite, spike, recent)

    return optax.GradientTransformationExtraArgs(init, update)


def run_optimizer(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a run, with an EMA if the run has one, under the guard."""
    optimizer = optimizer_by_name(config, training_config)
    if (rows := training_config.freeze_rows) is not None:
        if rows >= config.tgt_vocab_size:
            raise InputError(f"freeze_rows={rows} must be below {config.tgt_vocab_size}, all ids")
        optimizer = optax.chain(keep_rows(rows), optimizer, keep_rows(rows))
    if training_config.ema_decay is not None:
        optimizer = optax.chain(optimizer, parameter_ema(training_config.ema_decay))
    return with_guard(optimizer, training_config.spike_factor)
