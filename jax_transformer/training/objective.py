"""The training objective: cross-entropy with label smoothing, as a sum and a count."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.data.batches import Batch
from jax_transformer.errors import InputError
from jax_transformer.execution import DEFAULT_EXECUTION, Execution, TargetLogit
from jax_transformer.functional import segment_positions
from jax_transformer.masks import SegmentMask
from jax_transformer.model import Params, apply, decode, encode


def batch_loss(
    params: Params,
    batch: Batch,
    config: TransformerConfig,
    label_smoothing: float,
    dropout_key: PRNGKeyArray | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed cross-entropy of a batch, packed or not, and its number of target tokens.

    Args:
        params: Parameters, as from `init_params`.
        batch: Pairs; padding does not count.
        config: The shape of the model.
        label_smoothing: As for `cross_entropy`.
        dropout_key: Random key that switches dropout on.
        execution: How the model is executed.

    Raises:
        InputError: The batch is packed, and the model takes vectors or its targets do not attend
            to each other.
    """
    if batch.src_segments is None:
        inputs = (batch.src, batch.tgt_in)
        logits = apply(params, config, *inputs, dropout_key=dropout_key, execution=execution)
    else:
        logits = packed_logits(params, batch, config, dropout_key, execution)
    smoothing, target_logit = label_smoothing, execution.target_logit
    return cross_entropy(logits, batch.tgt_out, config.pad_id, smoothing, target_logit)


def check_packs(config: TransformerConfig) -> None:
    """Refuse a model that cannot keep the pairs of a packed row apart.

    Raises:
        InputError: The model takes vectors, or its decoder runs self-attention over the memory,
            where source and target of a pair have different positions.
    """
    for name, value in (("token_embeddings", "none"), ("decoder_attention", "self_over_memory")):
        if getattr(config, name) == value:
            raise InputError(f"{name}={value!r} cannot be trained packed; set batching='buckets'")


def packed_logits(
    params: Params,
    batch: Batch,
    config: TransformerConfig,
    dropout_key: PRNGKeyArray | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> Float[Array, "batch length vocab"]:
    """Return the logits of a packed batch; each pair has the logits that it has alone.

    Attention stays inside a segment: a target segment attends to the source segment of the same
    number. Positions start at 0 in each segment. Arguments and errors as `batch_loss`.
    """
    check_packs(config)
    src_segments, tgt_segments = map(jnp.asarray, (batch.src_segments, batch.tgt_segments))
    memory = encode(
        params,
        config,
        batch.src,
        SegmentMask(src_segments, src_segments),
        src_positions=segment_positions(src_segments),
        dropout_key=dropout_key,
        execution=execution,
    )
    return decode(
        params,
        config,
        batch.tgt_in,
        memory,
        SegmentMask(tgt_segments, tgt_segments, causal=True),
        SegmentMask(src_segments, tgt_segments),
        tgt_positions=segment_positions(tgt_segments),
        dropout_key=dropout_key,
        execution=execution,
    )


def cross_entropy(
    logits: Float[Array | np.ndarray, "batch length vocab"],
    targets: Int[Array | np.ndarray, "batch length"],
    pad_id: int,
    label_smoothing: float = 0.0,
    target_logit: TargetLogit = "gathered",
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed cross-entropy of the targets and their number.

    With smoothing s (section 5.4) a target's distribution is 1 - s on its token plus s spread
    evenly over the vocabulary. The loss is logsumexp - (1 - s) * gold logit - s * mean logit, in
    at least float32. Padding is excluded by selection, not by multiplication with 0.

    Args:
        logits: Unnormalised scores [batch, length, vocab].
        targets: Token ids [batch, length].
        pad_id: Id of the targets that do not count.
        label_smoothing: s, from 0 to 1.
        target_logit: As `Execution.target_logit`.

    Returns:
        (sum, count): the loss in nats, and the number of targets that are not padding.
    """
    logits = jnp.asarray(logits, jnp.promote_types(logits.dtype, jnp.float32))
    ids = jnp.asarray(targets)[..., None]
    if target_logit == "gathered":
        gold = jnp.take_along_axis(logits, ids, axis=-1)[..., 0]
    else:
        gold = jnp.sum(logits, axis=-1, where=jnp.arange(logits.shape[-1]) == ids)
    loss = jax.nn.logsumexp(logits, axis=-1) - (1 - label_smoothing) * gold
    if label_smoothing:
        loss -= label_smoothing * jnp.mean(logits, axis=-1)
    counted = targets != pad_id
    return jnp.sum(loss, where=counted), jnp.sum(counted)
