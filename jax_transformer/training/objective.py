"""The training objective: cross-entropy with label smoothing, as a sum and a count."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.errors import InputError
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, Execution
from jax_transformer.kernels.segments import SegmentMask
from jax_transformer.model.checks import (
    check_array,
    check_floats,
    check_id_batch,
    check_ids,
    check_rows,
    check_whole,
)
from jax_transformer.model.functional import pick, segment_positions
from jax_transformer.model.masks import source_mask
from jax_transformer.model.transformer import Params, Transformer, decode, encode
from jax_transformer.runtime.sharding import divides_rows_alone, map_own_rows
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import Share
from jax_transformer.training.distillation import Teacher, check_teacher, distillation_loss


def batch_loss(
    params: Params,
    batch: Batch,
    config: TransformerConfig,
    label_smoothing: float,
    dropout_key: PRNGKeyArray | None = None,
    execution: Execution = DEFAULT_EXECUTION,
    teacher: Teacher | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed objective of a checked batch and its number of target tokens.

    It is the cross-entropy of the targets; with a teacher, the weighted mean of that and of
    `distillation_loss`.
    """
    body = dataclasses.replace(
        config, output_projection="none", output_bias=False, output_scale="none"
    )
    of_body = {name: part for name, part in params.items() if name != "output_projection"}
    hidden = decode_batch(of_body, batch, body, execution, dropout_key)
    if teacher is not None:
        check_teacher(teacher, config)
        teacher_logits = decode_batch(teacher.params, batch, teacher.config, execution)

    def loss(
        head: Params, hidden: Float[Array, "rows part D"], targets: Int[Array, "rows part"]
    ) -> Float[Array, ""]:
        model = Transformer(config, execution)
        logits = model.apply({"params": head}, hidden, method="project")
        total = cross_entropy(logits, targets, config.pad_id, label_smoothing)[0]
        if teacher is None:
            return total
        distilled, _ = distillation_loss(
            logits, teacher_logits, targets, config.pad_id, teacher.temperature
        )
        return (1 - teacher.weight) * total + teacher.weight * distilled

    targets = jnp.asarray(batch.tgt_out)
    parts = min(execution.loss_parts, targets.shape[1])
    head = _head(params, config)
    # The logits of a teacher have all of the length.
    if teacher is None and parts > 1 and divides_rows_alone(len(targets)):
        total = _sum_of_parts(loss, parts, head, hidden, targets)
    else:
        total = loss(head, hidden, targets)
    return total, jnp.sum(targets != config.pad_id)


def check_batch(batch: Batch) -> None:
    """Refuse a batch whose fields do not fit together; `encode` and `decode` check its ids."""
    sides = [("tgt_out", "tgt_in")]
    if batch.src_segments is not None or batch.tgt_segments is not None:
        sides += [("src_segments", "src"), ("tgt_segments", "tgt_in")]
    for name, input_name in sides:
        array, inputs = getattr(batch, name), getattr(batch, input_name)
        check_whole(f"batch.{name}", array)
        check_array(f"batch.{input_name}", inputs)
        if array.shape != inputs.shape[:2]:
            raise InputError(
                f"batch.{name} of shape {array.shape} must be [batch, length] as batch."
                f"{input_name}, which is {list(inputs.shape[:2])}"
            )


def _head(params: Params, config: TransformerConfig) -> Params:
    """Return the parameters that turn hidden states into logits."""
    names = ["output_projection"]
    if config.output_projection == "tied":
        shared = config.token_embeddings == "shared"
        names.append("token_embedding" if shared else "target_embedding")
    return {name: jax.tree.map(jnp.asarray, params[name]) for name in names if name in params}


PartLoss = Callable[
    [Params, Float[Array, "rows part D"], Int[Array, "rows part"]], Float[Array, ""]
]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_of_parts(
    loss: PartLoss,
    parts: int,
    head: Params,
    hidden: Float[Array, "rows length D"],
    targets: Int[Array, "rows length"],
) -> Float[Array, ""]:
    """Return the sum of a loss over parts of the length; its gradient holds one part at a time.

    The forward pass computes the gradient of each part with its value, so no logits are kept.
    """
    pieces = zip(*(jnp.array_split(side, parts, axis=1) for side in (hidden, targets)), strict=True)
    return sum(loss(head, *piece) for piece in pieces)


def _sum_of_parts_forward(
    loss: PartLoss,
    parts: int,
    head: Params,
    hidden: Float[Array, "rows length D"],
    targets: Int[Array, "rows length"],
) -> tuple[Float[Array, ""], tuple[Params, Float[Array, "rows length D"]]]:
    differentiate = jax.value_and_grad(loss, argnums=(0, 1))

    def device_rows(
        head: Params, hidden: Float[Array, "rows length D"], targets: Int[Array, "rows _"]
    ) -> tuple[tuple[Float[Array, ""], Params], Float[Array, "rows length D"]]:
        # Summed in at least float32: each part's gradient alone is rounded.
        def zeros(leaf: Array) -> Array:
            return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

        sums = jax.tree.map(zeros, (jnp.zeros(()), head))
        to_hidden = []
        split = (jnp.array_split(side, parts, axis=1) for side in (hidden, targets))
        for piece, ids in zip(*split, strict=True):
            # XLA may not compute the parts at the same time.
            piece, sums = jax.lax.optimization_barrier((piece, sums))
            total, (to_head, to_piece) = differentiate(head, piece, ids)
            sums = jax.tree.map(jnp.add, sums, (total, to_head))
            to_hidden.append(to_piece)
        total, to_head = sums
        to_head = jax.tree.map(lambda sum_, leaf: sum_.astype(leaf.dtype), to_head, head)
        return (total, to_head), jnp.concatenate(to_hidden, axis=1)

    (totals, to_head), to_hidden = map_own_rows(device_rows, head, hidden, targets)
    return jnp.sum(totals), (to_head, to_hidden)


def _sum_of_parts_backward(
    loss: PartLoss,
    parts: int,
    gradients: tuple[Params, Float[Array, "rows length D"]],
    factor: Float[Array, ""],
) -> tuple[Params, Float[Array, "rows length D"], None]:
    # XLA adds up the devices' shares together with those of other uses of the same parameter.
    shares, to_hidden = jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), gradients)
    return jax.tree.map(partial(jnp.sum, axis=0), shares), to_hidden, None


_sum_of_parts.defvjp(_sum_of_parts_forward, _sum_of_parts_backward)


def check_packs(config: TransformerConfig) -> None:
    """Refuse a model that cannot keep the pairs of a packed row apart."""
    # Merged attention turns queries by their places in the row, and the memory's keys not at all.
    refused = {"token_embeddings": ("none",), "decoder_attention": ("self_over_memory", "merged")}
    for name, values in refused.items():
        if (value := getattr(config, name)) in values:
            raise InputError(f"{name}={value!r} cannot be trained packed; set batching='buckets'")
    if config.source_features is not None:
        raise InputError("sources of sound cannot be trained packed; set batching='buckets'")


def decode_batch(
    params: Params,
    batch: Batch,
    config: TransformerConfig,
    execution: Execution = DEFAULT_EXECUTION,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "rows length _"]:
    """Return what `decode` returns of a batch; each pair of a row has what it has alone.

    In a packed row, attention stays inside a segment: a target segment attends to the source
    segment of the same number. Positions start at 0 in each segment.
    """
    check_rows("tgt", batch.tgt_in, batch.src.shape[0], "src")
    tgt_mask = src_positions = tgt_positions = None
    if batch.src_segments is None:
        src_mask = memory_mask = source_mask(batch.src, config)
    else:
        check_packs(config)
        src_segments, tgt_segments = map(jnp.asarray, (batch.src_segments, batch.tgt_segments))
        src_mask = SegmentMask(src_segments, src_segments)
        tgt_mask = SegmentMask(tgt_segments, tgt_segments, causal=True)
        memory_mask = SegmentMask(src_segments, tgt_segments)
        src_positions = segment_positions(src_segments)
        tgt_positions = segment_positions(tgt_segments)
    memory = encode(
        params,
        config,
        batch.src,
        src_mask,
        src_positions=src_positions,
        dropout_key=dropout_key,
        execution=execution,
    )
    return decode(
        params,
        config,
        batch.tgt_in,
        memory,
        tgt_mask=tgt_mask,
        src_mask=memory_mask,
        tgt_positions=tgt_positions,
        dropout_key=dropout_key,
        execution=execution,
    )


def cross_entropy(
    logits: Float[Array | np.ndarray, "batch length vocab"],
    targets: Int[Array | np.ndarray, "batch length"],
    pad_id: int,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the summed cross-entropy of the targets and their number.

    With smoothing s (section 5.4) a target's distribution is 1 - s on its token plus s spread
    evenly over the vocabulary. The loss is logsumexp - (1 - s) * gold logit - s * mean logit, in
    at least float32. Padding is excluded by selection, not by multiplication with 0.

        total, count = jax_transformer.cross_entropy(logits, targets, config.pad_id, 0.1)
        loss = total / count

    Args:
        logits: What `apply` returns [B, T, V].
        targets: The ids that these logits predict [B, T]: BOS is not among them, EOS is.
        pad_id: `config.pad_id`, the id of targets that do not count.
        label_smoothing: From 0 to below 1.

    Returns:
        (sum, count), both []: the loss in nats, and the number of targets that are not padding.

    Raises:
        InputError: An argument has another type than this, or logits and targets do not belong
            together; where targets are concrete (not traced), one is outside the vocabulary. Under
            `jit` such a target gives NaN: the loss, and the gradient of its logits.
    """
    check_floats("logits", logits)
    check_id_batch("targets", targets)
    if logits.shape[:-1] != targets.shape:
        raise InputError(
            f"targets of shape {targets.shape} must be [batch, length] as logits, which are "
            f"{list(logits.shape)}"
        )
    label_smoothing = checked("label_smoothing", label_smoothing, Share)
    if not isinstance(targets, jax.core.Tracer):
        check_ids("targets", np.asarray(targets), logits.shape[-1])
    loss = _losses(jnp.asarray(logits), jnp.asarray(targets), label_smoothing)
    counted = targets != pad_id
    return jnp.sum(loss, where=counted), jnp.sum(counted)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _losses(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    label_smoothing: float,
) -> Float[Array, "batch length"]:
    """Return the cross-entropy of each target, in at least float32.

    The derivative is the softmax minus the target's distribution, in one pass over the logits. JAX
    would derive a scatter of the targets' share into float32 zeros in the shape of all logits.
    """
    return _losses_and_normalizers(logits, targets, label_smoothing)[0]


@_losses.defjvp
def _derivative_of_losses(
    targets: Int[Array, "batch length"],
    label_smoothing: float,
    primals: tuple[Float[Array, "batch length vocab"]],
    tangents: tuple[Float[Array, "batch length vocab"]],
) -> tuple[Float[Array, "batch length"], Float[Array, "batch length"]]:
    # The loss is logsumexp(logits) - sum(target * logits), of the target's distribution: its
    # derivative by a logit is softmax - target.
    (logits,), (tangent,) = primals, tangents
    vocabulary = logits.shape[-1]
    right = jnp.arange(vocabulary) == targets[..., None]
    target = jnp.where(right, 1 - label_smoothing, 0) + label_smoothing / vocabulary
    losses, normalizers = _losses_and_normalizers(logits, targets, label_smoothing)
    # NaN for a target outside, as the loss; known by the id without waiting for other devices.
    normalizers = jnp.where((targets >= 0) & (targets < vocabulary), normalizers, jnp.nan)
    softmax = jnp.exp(_widened(logits) - normalizers[..., None])
    return losses, jnp.sum((softmax - target) * _widened(tangent), axis=-1)


def _losses_and_normalizers(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    label_smoothing: float,
) -> tuple[Float[Array, "batch length"], Float[Array, "batch length"]]:
    """Return the losses, and the logarithm of the sum of each position's exponentials."""
    gold = pick(logits, targets)
    normalizers = jax.nn.logsumexp(_widened(logits), axis=-1)
    losses = normalizers - (1 - label_smoothing) * _widened(gold)
    if label_smoothing:
        losses -= label_smoothing * jnp.mean(_widened(logits), axis=-1)
    return losses, normalizers


def _widened(array: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
