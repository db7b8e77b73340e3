"""How a model is trained: the settings of section 5."""

import dataclasses

from jax_transformer.errors import InputError


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Batches, schedule, optimizer and objective of a training run.

    Frozen and hashable: a static argument of `jax.jit`.
    """

    steps: int = 2600
    """Optimizer steps."""

    warmup_steps: int = 600
    """Steps over which the learning rate grows (section 5.3)."""

    learning_rate_factor: float = 0.6
    """Factor on the learning rate of section 5.3; the peak is this / sqrt(d_model * warm-up)."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: float = 0.98
    """Decay of Adam's second moment."""

    adam_epsilon: float = 1e-9
    """Added to the root of Adam's second moment."""

    weight_decay: float = 0.0
    """Decoupled weight decay of kernels and embeddings, not of biases and norms (AdamW)."""

    clip_norm: float | None = None
    """Largest global norm of a gradient, a larger one is scaled down to it; None clips nothing."""

    num_microbatches: int = 1
    """Parts of a batch whose gradients are added up one after the other, to save memory."""

    label_smoothing: float = 0.1
    """Probability spread evenly over the vocabulary (section 5.4)."""

    token_budget: int = 2048
    """Most slots (sentences times length) of a batch, a side."""

    bucket_count: int = 6
    """Most batch lengths, each with a compilation of its own."""

    evaluation_interval: int = 325
    """Steps between two evaluations of the validation loss."""

    seed: int = 0
    """What initialisation, batch order and dropout depend on."""

    def check(self) -> None:
        """Refuse settings that cannot train.

        Not done on construction: the command line's parser would hide the message in its own.

        Raises:
            InputError: A value is out of range; names the field.
        """
        for name in (
            "steps",
            "warmup_steps",
            "num_microbatches",
            "token_budget",
            "bucket_count",
            "evaluation_interval",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("adam_beta1", "adam_beta2", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        for name in ("learning_rate_factor", "adam_epsilon", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name}={value} must be above 0 and finite")
        if not 0 <= self.weight_decay < float("inf"):
            raise InputError(f"weight_decay={self.weight_decay} must be at least 0 and finite")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed} must be from 0 to {2**32 - 1}")
