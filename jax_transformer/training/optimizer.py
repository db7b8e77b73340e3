"""The optimizer of section 5.3: Adam under the paper's learning rate schedule."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.training.config import TrainingConfig


def noam(d_model: int, warmup_steps: int, factor: float = 1.0) -> optax.Schedule:
    """Return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5) (section 5.3).

    Steps count from 1; the schedule takes, as optax has it, the number of steps already made.
    """

    def learning_rate(steps_made: Int[Array, ""] | int) -> Float[Array, ""]:
        step = jnp.asarray(steps_made, float) + 1
        return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return learning_rate


def learning_rate_schedule(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps already made."""
    return noam(config.d_model, training_config.warmup_steps, training_config.learning_rate_factor)


def adam(
    config: TransformerConfig, training_config: TrainingConfig
) -> optax.GradientTransformation:
    """Return Adam (Kingma and Ba 2015) under the schedule; no weight decay, no clipping."""
    return optax.adam(
        learning_rate_schedule(config, training_config),
        b1=training_config.adam_beta1,
        b2=training_config.adam_beta2,
        eps=training_config.adam_epsilon,
        eps_root=0.0,
        mu_dtype=None,  # the first moment is as precise as the parameters
        nesterov=False,
    )
