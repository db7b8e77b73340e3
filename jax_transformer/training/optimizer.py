"""The optimizer of section 5.3, Adam under the paper's schedule, with what practice has added."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.model import Params
from jax_transformer.training.config import TrainingConfig

DECAYED = ("kernel", "embedding")  # names of the parameters that weight decay shrinks


def learning_rate_schedule(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps already made.

    It grows linearly for `warmup_steps`, and then, at step n counted from 1, is the peak times
    1 ("constant"), sqrt(warmup_steps / n) ("inverse_square_root", and "noam", whose peak is
    factor / sqrt(d_model * warmup_steps), section 5.3), or half a cosine's way down to 0 at
    `steps` ("cosine"). Over the last `cooldown_steps` it is drawn down to 0 along a line besides.
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

    As torch.nn.utils.clip_grad_norm_, whose divisor is the norm plus 1e-6. optax's own has none:
    a difference of 1e-6 that Adam carries along.
    """

    def clip(gradients: Params, _: Params | None) -> Params:
        scale = jnp.minimum(max_norm / (optax.tree.norm(gradients) + 1e-6), 1)
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)

    return optax.stateless(clip)


def refusable(
    transformation: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with `accepted` for its `update`; False leaves the state alone."""

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
    """Return optax's transformation of that name, `refusable`.

    The update is made of the moments that are kept. Made, as optax makes it, of those of a step
    that may yet be refused, it would have XLA copy all of the old ones.
    """
    beta1, beta2 = training_config.adam_beta1, training_config.adam_beta2
    epsilon = training_config.adam_epsilon
    moments = refusable(
        optax.scale_by_adam(
            b1=beta1,
            b2=beta2,
            eps=epsilon,
            eps_root=0.0,
            mu_dtype=None,  # the first moment is as precise as the parameters
            nesterov=False,
        )
    )

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
    """Return Adam (Kingma and Ba 2015) under the schedule.

    Gradients are clipped first where the settings say so. Weight decay is decoupled, as in
    torch.optim.AdamW (Loshchilov and Hutter 2019): learning rate times decay times parameter,
    beside Adam's step and not inside its moments; biases and norms are left alone.
    """
    chain = [scale_by_adam(training_config)]
    if training_config.clip_norm is not None:
        chain.insert(0, clip_by_global_norm(training_config.clip_norm))
    if training_config.weight_decay:
        chain.append(optax.add_decayed_weights(training_config.weight_decay, mask=_decayed))
    schedule = learning_rate_schedule(config, training_config)
    chain.append(refusable(optax.scale_by_learning_rate(schedule)))
    return optax.chain(*chain)


def _decayed(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)
