"""The training objective: cross-entropy with label smoothing, as a sum and a count."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array | np.ndarray, "batch length vocab"],
    targets: Int[Array | np.ndarray, "batch length"],
    pad_id: int,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed cross-entropy of the targets and their number.

    With smoothing s (section 5.4) a target's distribution is 1 - s on its token plus s spread
    evenly over the vocabulary. Computed as logsumexp - (1 - s) * gold logit - s * mean logit, in
    at least float32. Padding is left out by selection.

    Args:
        logits: Unnormalised scores [batch, length, vocab].
        targets: Token ids [batch, length].
        pad_id: Id of the targets that do not count.
        label_smoothing: s, from 0 to 1.

    Returns:
        (sum, count): the loss in nats, and the number of targets that are not padding.
    """
    logits = jnp.asarray(logits, jnp.promote_types(logits.dtype, jnp.float32))
    gold = jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - (1 - label_smoothing) * gold
    if label_smoothing:
        loss -= label_smoothing * jnp.mean(logits, axis=-1)
    counted = targets != pad_id
    return jnp.sum(loss, where=counted), jnp.sum(counted)
