"""How a model is trained: the settings of section 5."""

import dataclasses
from collections.abc import Collection
from dataclasses import field
from typing import Annotated, Literal, no_type_check

from msgspec import Meta

from jax_transformer.config import LARGEST
from jax_transformer.config.declared import check_fields, short_repr
from jax_transformer.errors import InputError
from jax_transformer.kernels.execution import Remat

Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
TeacherWeight = Annotated[float, Meta(gt=0, le=1)]
Temperature = Annotated[float, Meta(ge=0.01, le=100)]

Objective = Literal["translation", "span_corruption", "ul2", "infilling", "prefix_lm"]
Batching = Literal["buckets", "packed"]
ComputeDtype = Literal["float32", "bfloat16"]

# Settings that have an effect only beside certain values of another one.
ACTS_WITH = {
    "learning_rate": ("schedule", ("constant", "cosine", "inverse_square_root", "t5")),
    "learning_rate_factor": ("schedule", ("noam",)),
    "adam_epsilon": ("optimizer", ("adam",)),
    "adam_beta1": ("optimizer", ("adam", "muon")),
    "adam_beta2": ("optimizer", ("adam", "muon")),
    "bucket_count": ("batching", ("buckets",)),
    "pack_length": ("batching", ("packed",)),
}

# The metadata of a field that may change when a run is resumed: the run's own value holds unless
# another one is named. A field without it keeps the run's value, and another one is refused.
CHANGEABLE = {"resumed": "changeable"}


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Batches, schedule, optimizer and objective of a training run.

    Frozen, hashable (a static argument of `jax.jit`) and checked on construction.

    Attributes:
        steps: Optimizer steps.
        schedule: Course of the learning rate after the linear warm-up: "noam" is section 5.3, whose
            rate follows from the model's width; the others have the rate that learning_rate names,
            which fine-tuning needs. "cosine" ends at 0 with the last step. "t5" has no linear
            warm-up: its rate is constant for `warmup_steps`, then falls with the inverse square
            root of the step (Raffel et al. 2020, section 3.1.2: learning_rate 0.01, warmup_steps
            10000).
        warmup_steps: Steps of the linear warm-up (section 5.3).
        learning_rate_factor: With "noam", factor on the rate of section 5.3; the peak is factor /
            sqrt(d_model * warm-up steps).
        learning_rate: Peak of the learning rate, with any schedule but "noam"; by default 0.001.
        cooldown_steps: Last steps in which the rate also falls linearly to 0; not with "cosine".
        optimizer: "adam", or by their names in optax "adafactor" (Shazeer and Stern 2018), which
            clips each update and scales it by its parameter, and "muon" (Jordan et al. 2024) for
            the kernels of the layers, with Nesterov's Adam (Dozat 2016) for all others.
        adam_beta1: Decay of Adam's first moment.
        adam_beta2: Decay of Adam's second moment.
        adam_epsilon: Added to the root of Adam's second moment.
        weight_decay: Decoupled weight decay (AdamW), of kernels and embeddings alone.
        clip_norm: Largest global norm of the gradient; a larger one is scaled down.
            Without it, no limit.
        spike_factor: Reject a step whose loss is above this factor times the median of the 32
            losses before it; without it, only losses and gradients that are not finite.
        freeze: Patterns of parameters to keep fixed: of their paths, for example 'encoder/*', as
            jax-transformer convert prints them; "*" also matches "/".
        freeze_rows: Number of ids whose rows of the token tables and columns of the output
            projection stay (an EMA rounds them), so that only the new tokens behind are trained.
        lora_rank: Rank of an adapter (LoRA, Hu 2021), which alone is trained: it stands beside the
            products that lora_targets match. The run writes it as a folder of PEFT, and the model
            with the adapter merged. Without it, the parameters themselves are trained.
        lora_alpha: The adapter's product is scaled by lora_alpha / lora_rank; without it, by 1.
        lora_targets: Patterns of the paths of these products, for example '*/query' or
            '*/feed_forward/*'.
        lora_whole: Patterns of parameters that are trained whole beside these products, PEFT's
            modules_to_save: for example '*_embedding/*' of a model with new tokens.
        lora_dropout: Dropout of what the adapter reads.
        num_microbatches: Parts of a batch whose gradients are added up, to save memory.
        ema_decay: Decay of the exponential moving average (EMA) of the parameters, which is then
            evaluated and kept in their place. Without it, no EMA is kept.
        compute_dtype: Dtype of the computation; parameters, loss and optimizer stay float32.
        gradient_dtype: With compute_dtype "bfloat16", dtype in which devices add up their gradients
            of kernels and tables; "float32" doubles what they exchange.
        remat: What the backward pass recomputes, to save memory: "none", whole "layers" from their
            inputs, or "dots", everything except the matrix products with kernels.
        scan_layers: Compile the layers as one loop, which shortens the compilation of a deep model;
            the dropout masks are then different ones.
        objective: What plain text (--text) trains: "span_corruption" (T5), "ul2" (seven
            denoisers), "infilling" (BART) or "prefix_lm". Pairs always train "translation".
        noise_density: Share of the tokens that are noise; by default 0.15 for "span_corruption",
            0.3 for "infilling".
        mean_span_length: Mean tokens of a span of noise; by default 3.
        label_smoothing: Probability spread evenly over the vocabulary (section 5.4).
        max_tokens: Most tokens of a batch on each side, padding included (sentences times length).
            A sound has as many as the window of its model has positions, 1,500 in Whisper.
        batching: A row of a batch is one pair, in "buckets" of similar lengths, or several "packed"
            pairs.
        bucket_count: With "buckets", most batch lengths; each is compiled separately.
        pack_length: With "packed", the batch length of source and target. With a plain text, that
            of the longer side; the other one is as much shorter as examples are on average.
        evaluation_interval: Steps between two evaluations of the validation loss; each writes a
            checkpoint of the run.
        select_by: What selects the best evaluation: the validation loss, or the BLEU or chrF of
            the validation text, translated greedily; for a model of sound also the word error rate,
            "wer".
        patience: End the run after so many evaluations without a better one. Without it, never.
        keep_checkpoints: Number of run checkpoints to keep, the newest ones.
        bpe_dropout: Probability of dropping a merge of the byte-pair encoding, drawn anew in each
            epoch (Provilkov et al. 2020); for a tokenizer that this library has trained.
        spec_augment: Mask two spans of frames and two of bands of each sound, drawn anew in each
            epoch (Park et al. 2019, policy LD without time warping).
        seed: Seed of initialisation, batch order, dropout and the choice of held-out pairs.
    """

    steps: Count = field(default=2600, metadata=CHANGEABLE)
    schedule: Literal["noam", "inverse_square_root", "t5", "cosine", "constant"] = "noam"
    warmup_steps: Count = 600
    learning_rate_factor: Positive = 0.6
    learning_rate: Positive | None = None
    cooldown_steps: Annotated[int, Meta(ge=0, le=LARGEST)] = field(default=0, metadata=CHANGEABLE)
    optimizer: Literal["adam", "adafactor", "muon"] = "adam"
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.98
    adam_epsilon: Positive = 1e-9
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    clip_norm: Positive | None = None
    spike_factor: Annotated[float, Meta(gt=1)] | None = None
    freeze: tuple[str, ...] = ()
    freeze_rows: Count | None = None
    lora_rank: Count | None = None
    lora_alpha: Positive | None = None
    lora_targets: tuple[str, ...] = ("*/query", "*/value")  # those of the paper (section 4.2)
    lora_whole: tuple[str, ...] = ()
    lora_dropout: Share = 0.0
    num_microbatches: Count = 1
    ema_decay: Annotated[float, Meta(gt=0, lt=1)] | None = None
    compute_dtype: ComputeDtype = "float32"
    gradient_dtype: ComputeDtype = "bfloat16"
    remat: Remat = field(default="none", metadata=CHANGEABLE)
    scan_layers: bool = False
    objective: Objective = "translation"
    noise_density: Annotated[float, Meta(gt=0, lt=1)] | None = None
    mean_span_length: Annotated[float, Meta(ge=1)] | None = None
    label_smoothing: Share = 0.1
    max_tokens: Count = 2048
    batching: Batching = "buckets"
    bucket_count: Count = 7
    pack_length: Count = 128
    evaluation_interval: Count = field(default=325, metadata=CHANGEABLE)
    select_by: Literal["loss", "bleu", "chrf", "wer"] = "loss"
    patience: Count | None = field(default=None, metadata=CHANGEABLE)
    keep_checkpoints: Count = field(default=3, metadata=CHANGEABLE)
    bpe_dropout: Share = 0.0
    spec_augment: bool = False
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Refuse settings that cannot train."""
        check_fields(self)
        self.check_acting(["learning_rate"])
        if self.schedule == "cosine" and self.warmup_steps >= self.steps:
            raise InputError(
                f"warmup_steps={self.warmup_steps} must be below steps={self.steps} for "
                "schedule='cosine'"
            )
        if self.cooldown_steps and self.schedule == "cosine":
            raise InputError(f"cooldown_steps={self.cooldown_steps} must be 0 for schedule=cosine")
        if self.optimizer == "adafactor" and self.weight_decay:
            raise InputError(
                f"weight_decay={self.weight_decay} must be 0 for optimizer='adafactor'; set it to 0"
            )
        if self.batching == "packed" and self.pack_length > self.max_tokens:
            length, most = self.pack_length, self.max_tokens
            raise InputError(f"pack_length={length} must be at most max_tokens={most}")

    def check_acting(self, named: Collection[str]) -> None:
        """Refuse a setting that was named, is not its default, and has no effect beside another."""
        for name, (other, values) in ACTS_WITH.items():
            chosen = getattr(self, other)
            is_default = getattr(self, name) == getattr(TrainingConfig, name)
            if name not in named or is_default or chosen in values:
                continue
            fault = f"{name}={getattr(self, name)} has no effect with {other}={chosen!r}"
            remedy = f"leave it out, or set {other}={' or '.join(map(repr, values))}"
            raise InputError(f"{fault}; {remedy}")
