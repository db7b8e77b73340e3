"""One optimizer step in torch: objective, schedule and optimizer of `jax_transformer.training`.

`training_config` is a `TrainingConfig` of JAX's side or has its attributes: nothing of JAX is
imported. Letters in shapes: B batch, L length, V target vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from jax_transformer.config import TransformerConfig
from torch_reference.model import Transformer


def cross_entropy(
    logits: Float[Tensor, "B L V"],
    targets: Int[Tensor, "B L"],
    pad_id: int,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the summed cross-entropy of the targets that are not padding, and their number."""
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten().long(),
        ignore_index=pad_id,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total, (targets != pad_id).sum()


def distillation_loss(
    logits: Float[Tensor, "B L V"],
    teacher_logits: Float[Tensor, "B L V"],
    targets: Int[Tensor, "B L"],
    pad_id: int,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the summed cross-entropy against a teacher's distributions (Kim and Rush 2016, 3.1).

    It is summed over the targets that are not padding; their number is the second result. The
    logits are divided by `temperature`, and the loss multiplied by its square (Hinton et al. 2015).
    """
    shares = (teacher_logits.detach() / temperature).softmax(-1)
    student = (logits / temperature).log_softmax(-1)
    losses = -(shares * student.where(shares > 0, 0.0)).sum(-1)
    counted = targets != pad_id
    return temperature**2 * losses[counted].sum(), counted.sum()


def classification_loss(
    scores: Float[Tensor, "*batch labels"],
    targets: Shaped[Tensor, "*shape"],
    config: TransformerConfig,
) -> tuple[Float[Tensor, ""], int]:
    """Return the summed loss of scores and the number of its terms.

    Arguments and result as `jax_transformer.classification_loss`.
    """
    if config.scores_are == "single_label_classification":
        counted = targets >= 0
        total = nn.functional.cross_entropy(
            scores[counted], targets[counted].long(), reduction="sum"
        )
        return total, int(counted.sum())
    targets = targets.reshape(scores.shape).to(scores)
    if config.scores_are == "regression":
        return nn.functional.mse_loss(scores, targets, reduction="sum"), scores.numel()
    losses = nn.functional.binary_cross_entropy_with_logits
    return losses(scores, targets, reduction="sum"), scores.numel()


def learning_rate(config: TransformerConfig, training_config: Any, steps_made: int) -> float:
    """Return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5) (section 5.3)."""
    step = steps_made + 1
    warm_up = step * training_config.warmup_steps**-1.5
    return training_config.learning_rate_factor * config.d_model**-0.5 * min(step**-0.5, warm_up)


def adam(model: Transformer, training_config: Any) -> torch.optim.AdamW:
    """Return AdamW with nothing left to torch's defaults; matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {
                "params": [parameter for parameter in parameters if parameter.dim() == 2],
                "weight_decay": training_config.weight_decay,
            },
            {
                "params": [parameter for parameter in parameters if parameter.dim() < 2],
                "weight_decay": 0.0,
            },
        ],
        lr=0.0,  # `train_step` sets it
        betas=(training_config.adam_beta1, training_config.adam_beta2),
        eps=training_config.adam_epsilon,
        amsgrad=False,
        maximize=False,
    )


def train_step(
    model: Transformer,
    optimizer: torch.optim.AdamW,
    steps_made: int,
    batch: tuple[
        Int[Tensor, "B L"] | Float[Tensor, "B _ _"], Int[Tensor, "B L"], Int[Tensor, "B L"]
    ],
    training_config: Any,
    teacher: Transformer | None = None,
    teacher_weight: float = 0.5,
    temperature: float = 1.0,
) -> float:
    """Make one step in place; return the loss before it, in nats a target token.

    Args:
        batch: Source ids, target ids that begin with BOS, target ids that end with EOS.
        teacher: A model to learn from; None learns from the targets alone.
        teacher_weight: Share of `distillation_loss` in the loss; the cross-entropy has the rest.
        temperature: As of `distillation_loss`.
    """
    config = model.config
    count = max(int((batch[2] != config.pad_id).sum()), 1)
    optimizer.zero_grad()
    loss = 0.0
    microbatches = (ids.tensor_split(training_config.num_microbatches) for ids in batch)
    for src, tgt_in, tgt_out in zip(*microbatches, strict=True):
        logits = model(src, tgt_in)
        total, _ = cross_entropy(logits, tgt_out, config.pad_id, training_config.label_smoothing)
        if teacher is not None:
            with torch.no_grad():
                teacher_logits = teacher(src, tgt_in)
            distilled, _ = distillation_loss(
                logits, teacher_logits, tgt_out, config.pad_id, temperature
            )
            total = (1 - teacher_weight) * total + teacher_weight * distilled
        (total / count).backward()
        loss += total.item() / count
    if training_config.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), training_config.clip_norm, norm_type=2.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, training_config, steps_made)
    optimizer.step()
    return loss
