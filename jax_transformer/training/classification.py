"""The loss of a classification head, as a sum and a count."""

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Shaped

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError


def classification_loss(
    scores: Float[Array, "*batch labels"],
    targets: Shaped[Array | np.ndarray, "*shape"],
    config: TransformerConfig,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed loss of scores and the number of its terms: their quotient is the mean.

    Of one right label it is the cross-entropy, of labels that are each right or wrong the binary
    cross-entropy of each, and of a regression the squared error of each number: the losses of
    transformers' classes.

    Args:
        scores: What `classify` returned [batch, labels], or [batch, length, labels] of tokens.
        targets: For one right label its number in `config.labels` [batch] or [batch, length], where
            a negative one, as of padding, does not count. Else numbers of the shape of `scores`, 0
            to 1 for labels that are right or wrong; a regression of one label may have [batch].
        config: The shape of the model, whose `problem_type` is what the scores are.

    Raises:
        InputError: The targets have another shape than this.
    """
    targets = jnp.asarray(targets)
    one_of_them = config.scores_are == "single_label_classification"
    if not one_of_them and targets.shape == scores.shape[:-1] and config.num_labels == 1:
        targets = targets[..., None]
    wanted = scores.shape[:-1] if one_of_them else scores.shape
    if targets.shape != wanted:
        raise InputError(f"targets of shape {targets.shape} must be {wanted} for these scores")
    if one_of_them:
        counted = targets >= 0
        labels = jnp.where(counted, targets, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return jnp.sum(jnp.where(counted, losses, 0)), jnp.sum(counted)
    targets = targets.astype(scores.dtype)
    if config.scores_are == "regression":
        losses = (scores - targets) ** 2
    else:
        losses = optax.sigmoid_binary_cross_entropy(scores, targets)
    return jnp.sum(losses), jnp.asarray(losses.size)
