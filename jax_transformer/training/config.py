"""How a model is trained: the settings of section 5."""

import dataclasses
from typing import Literal, get_args

from jax_transformer.config import check_whole_numbers
from jax_transformer.errors import InputError
from jax_transformer.kernels.execution import Remat

Schedule = Literal["noam", "inverse_square_root", "cosine", "constant"]
Batching = Literal["buckets", "packed"]
ComputeDtype = Literal["float32", "bfloat16"]
Criterion = Literal["loss", "bleu"]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Batches, schedule, optimizer and objective of a training run.

    Frozen and hashable: a static argument of `jax.jit`.
    """

    steps: int = 2600
    """Optimizer steps."""

    schedule: Schedule = "noam"
    """Learning rate after the linear warm-up: "noam" is section 5.3, "cosine" ends at 0 with the
    last step."""

    warmup_steps: int = 600
    """Steps in which the learning rate grows linearly (section 5.3)."""

    learning_rate_factor: float = 0.6
    """With "noam", factor on the rate of section 5.3; the peak is factor / sqrt(d_model * warm-up
    steps)."""

    learning_rate: float = 1e-3
    """With any other schedule, the peak of the learning rate."""

    cooldown_steps: int = 0
    """Number of last steps in which the rate also falls linearly to 0; not with "cosine"."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: float = 0.98
    """Decay of Adam's second moment."""

    adam_epsilon: float = 1e-9
    """Added to the root of Adam's second moment."""

    weight_decay: float = 0.0
    """Decoupled weight decay of kernels and embeddings, not of biases and norms (AdamW)."""

    clip_norm: float | None = None
    """Largest global norm of the gradient; a larger gradient is scaled down. None: no clipping."""

    spike_factor: float | None = None
    """Reject a step whose loss is above this factor times the median of the 32 losses before it;
    None rejects only losses and gradients that are not finite."""

    freeze: tuple[str, ...] = ()
    """Keep the parameters fixed whose path matches one of these patterns, as 'encoder/*'. The paths
    are those that jax-transformer convert prints; "*" also matches "/"."""

    num_microbatches: int = 1
    """Split each batch into this many parts and accumulate their gradients, to save memory."""

    ema_decay: float | None = None
    """Decay of the exponential moving average (EMA) of the parameters, which is then evaluated and
    kept in their place; None keeps no EMA."""

    compute_dtype: ComputeDtype = "float32"
    """Dtype that the model computes in; parameters, loss and optimizer are always float32."""

    gradient_dtype: ComputeDtype = "bfloat16"
    """With compute_dtype "bfloat16", dtype in which devices add up their gradients of kernels and
    tables; "float32" doubles what they exchange."""

    remat: Remat = "none"
    """What the backward pass recomputes, to save memory: "none", whole "layers" from their inputs,
    or "dots", everything except the matrix products with kernels."""

    scan_layers: bool = False
    """Compile the layers as one loop, which shortens the compilation of a deep model; the dropout
    masks are then different ones."""

    label_smoothing: float = 0.1
    """Probability spread evenly over the vocabulary (section 5.4)."""

    max_tokens: int = 2048
    """Most tokens of a batch on each side, padding included (sentences times length)."""

    batching: Batching = "buckets"
    """A row of a batch is one pair, in "buckets" of similar lengths, or several "packed" pairs."""

    bucket_count: int = 7
    """With "buckets", most batch lengths; each is compiled separately."""

    pack_length: int = 128
    """With "packed", the batch length of source and target."""

    evaluation_interval: int = 325
    """Steps between two evaluations of the validation loss; each writes a checkpoint of the run."""

    select_by: Criterion = "loss"
    """What selects the best evaluation: the validation loss, or the BLEU of the validation text,
    translated greedily."""

    patience: int | None = None
    """End the run after this many evaluations in a row without a better one; None never does."""

    keep_checkpoints: int = 3
    """Number of run checkpoints to keep, the newest ones."""

    bpe_dropout: float = 0.0
    """Probability of dropping a merge of the byte-pair encoding, drawn anew in each epoch
    (Provilkov et al. 2020); for a tokenizer that this library has trained."""
    seed: int = 0
    """Seed of initialisation, batch order, dropout and the choice of held-out pairs."""

    def check(self) -> None:
        """Refuse settings that cannot train.

        Not done on construction: the parser of the command line would hide the message.

        Raises:
            InputError: A value is out of range; the message names the field.
        """
        # A seed has 32 bits; everything else is counted in int32.
        check_whole_numbers({**vars(self), "seed": 0})
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
            "gradient_dtype": ComputeDtype,
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
        if not 0 <= self.bpe_dropout < 1:
            raise InputError(f"bpe_dropout={self.bpe_dropout} must be at least 0 and below 1")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed} must be from 0 to {2**32 - 1}")
