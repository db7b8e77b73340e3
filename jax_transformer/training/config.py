"""How a model is trained: the settings of section 5."""

import dataclasses
from typing import Literal, get_args

from jax_transformer.errors import InputError

Schedule = Literal["noam", "inverse_square_root", "cosine", "constant"]
Batching = Literal["buckets", "packed"]
ComputeDtype = Literal["float32", "bfloat16"]
Criterion = Literal["loss", "bleu"]
Remat = Literal["none", "layers", "dots"]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Batches, schedule, optimizer and objective of a training run.

    Frozen and hashable: a static argument of `jax.jit`.
    """

    steps: int = 2600
    """Optimizer steps."""

    schedule: Schedule = "noam"
    """How the learning rate goes on after its linear warm-up: "noam" is section 5.3, "cosine" ends
    at 0 with the last step."""

    warmup_steps: int = 600
    """Steps over which the learning rate grows (section 5.3)."""

    learning_rate_factor: float = 0.6
    """With "noam", factor on section 5.3's rate; the peak is this / sqrt(d_model * warm-up)."""

    learning_rate: float = 1e-3
    """With any other schedule, the peak of the learning rate."""

    cooldown_steps: int = 0
    """Last steps, over which the learning rate also falls linearly to 0; not with "cosine"."""

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

    spike_factor: float | None = None
    """A step with a loss above this many times the median of the 32 before it is left out; None
    leaves out only losses and gradients that are not finite."""

    num_microbatches: int = 1
    """Parts of a batch whose gradients are added up one after the other, to save memory."""

    ema_decay: float | None = None
    """Decay of the exponential moving average of the parameters, which then is evaluated and kept
    instead of them; None keeps no average."""

    compute_dtype: ComputeDtype = "float32"
    """What the model computes in; parameters, loss and optimizer are float32 throughout."""

    remat: Remat = "none"
    """What the backward pass computes anew, to save memory: "none" of it, whole "layers" from their
    inputs, or "dots", all but the matrix products."""

    scan_layers: bool = False
    """Whether the layers are one compiled loop, which shortens the compilation of a deep model;
    dropout then has other masks."""

    label_smoothing: float = 0.1
    """Probability spread evenly over the vocabulary (section 5.4)."""

    max_tokens: int = 2048
    """Most slots (sentences times length) of a batch, a side."""

    batching: Batching = "buckets"
    """A row of a batch is a pair, in "buckets" of similar lengths, or is "packed" with several."""

    bucket_count: int = 7
    """With "buckets", most batch lengths, each with a compilation of its own."""

    pack_length: int = 128
    """With "packed", the one batch length, of source and target alike."""

    evaluation_interval: int = 325
    """Steps between two evaluations of the validation loss, each followed by a run checkpoint."""

    select_by: Criterion = "loss"
    """What says which evaluation is the best: the validation loss, or the BLEU of the validation
    text, translated greedily."""

    patience: int | None = None
    """Evaluations in a row that find none better before the run ends; None waits for `steps`."""

    keep_checkpoints: int = 3
    """Run checkpoints kept, the newest ones."""

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
            "max_tokens",
            "bucket_count",
            "pack_length",
            "evaluation_interval",
            "patience",
            "keep_checkpoints",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("adam_beta1", "adam_beta2", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        words_of = {
            "schedule": Schedule,
            "compute_dtype": ComputeDtype,
            "remat": Remat,
            "batching": Batching,
            "select_by": Criterion,
        }
        for name, allowed in words_of.items():
            if getattr(self, name) not in get_args(allowed):
                words = ", ".join(map(repr, get_args(allowed)))
                raise InputError(f"{name}={getattr(self, name)!r} must be one of {words}")
        if self.schedule == "cosine" and self.warmup_steps >= self.steps:
            raise InputError(
                f"warmup_steps={self.warmup_steps} must be below steps={self.steps} for "
                "schedule='cosine'"
            )
        if self.cooldown_steps < 0:
            raise InputError(f"cooldown_steps={self.cooldown_steps} must be at least 0")
        if self.cooldown_steps and self.schedule == "cosine":
            raise InputError(
                f"cooldown_steps={self.cooldown_steps} must be 0 for schedule='cosine', which "
                "ends at 0 already"
            )
        if self.batching == "packed" and self.pack_length > self.max_tokens:
            raise InputError(
                f"pack_length={self.pack_length} must be at most max_tokens={self.max_tokens} "
                "for batching='packed'"
            )
        if self.spike_factor is not None and not 1 < self.spike_factor < float("inf"):
            raise InputError(f"spike_factor={self.spike_factor} must be above 1 and finite")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise InputError(f"ema_decay={self.ema_decay} must be above 0 and below 1")
        for name in ("learning_rate_factor", "learning_rate", "adam_epsilon", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name}={value} must be above 0 and finite")
        if not 0 <= self.weight_decay < float("inf"):
            raise InputError(f"weight_decay={self.weight_decay} must be at least 0 and finite")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed} must be from 0 to {2**32 - 1}")
