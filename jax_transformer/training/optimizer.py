"""The optimizer: Adam under the schedule of section 5.3 and under other common schedules."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import decayed
from jax_transformer.training.config import TrainingConfig


def learning_rate_schedule(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps already made.

    The rate grows linearly for `warmup_steps`. After that, at step n counted from 1, it is the peak
    times a share: 1 ("constant"), sqrt(warmup_steps / n) ("inverse_square_root" and "noam"), or a
    half cosine that reaches 0 at `steps` ("cosine"). The peak of "noam" is
    factor / sqrt(d_model * warmup_steps) (section 5.3). Over the last `cooldown_steps` the rate is
    also multiplied by a line that falls to 0.
    """
    warmup, schedule = training_config.warmup_steps, training_config.schedule
    peak = training_config.learning_rate
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
        return peak * jnp.minimum(step / warmup, share)

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


def adam(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.GradientTransformationExtraArgs:
    """Return Adam (Kingma and Ba 2015) under the schedule, after clipping.

    Weight decay is decoupled, as in torch.optim.AdamW (Loshchilov and Hutter 2019): learning rate
    times decay times parameter, no part of the moments; biases and norms do not decay.
    """
    chain = [scale_by_adam(training_config)]
    if training_config.clip_norm is not None:
        chain.insert(0, clip_by_global_norm(training_config.clip_norm))
    if training_config.weight_decay:
        chain.append(optax.add_decayed_weights(training_config.weight_decay, mask=decayed))
    schedule = learning_rate_schedule(config, training_config)
    chain.append(refusable(optax.scale_by_learning_rate(schedule)))
    return optax.chain(*chain)
