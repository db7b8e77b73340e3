"""How a model is executed: choices of speed and memory that change a result only by rounding.

The dropout of an adapter is here too: an adapter is no part of the config.

An `Execution` is an argument of a call and a static argument of `jax.jit`. Nothing in the model
asks the process which device it has, so one process can trace programs for every platform. The
figures are in docs/performance.md and docs/scaling.md.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self, no_type_check

from msgspec import Meta

from jax_transformer.config import LARGEST
from jax_transformer.config.declared import check_fields, short_repr
from jax_transformer.errors import InputError

Attention = Literal["plain", "cudnn", "flash"]
Product = Literal["flattened", "batched", "wide_sums", "padded"]
DropoutMask = Literal["packed", "generated"]
NormForm = Literal["shifted", "fused"]
Remat = Literal["none", "layers", "dots"]
CacheLayout = Literal["split_heads", "joined_heads"]
TopK = Literal["batched", "flattened"]
Argmax = Literal["by_blocks", "at_once"]
Exponentials = Literal["wide", "as_scores"]

SHORTEST_FLASH = 512  # the length of queries and keys from which "flash" runs its kernels

# What suits each platform, as `jax.Device.platform` names it; the defaults suit a CPU.
PLATFORM_FIELDS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {
        "product": "batched",
        "exponentials": "as_scores",
        "norm": "fused",
        "step_product": "batched",
        "copied_kernels": "aligned",
        "wide_cache": False,
        "argmax": "at_once",
    },
    "tpu": {
        "product": "batched",
        "dropout_mask": "generated",
        "exponentials": "as_scores",
        "loss_parts": 4,
        "norm": "fused",
        "step_product": "padded",
        "copied_kernels": "none",
        "wide_norms": True,
        "cache": "joined_heads",
        "wide_cache": False,
        "top_k": "flattened",
        "argmax": "at_once",
    },
}


@no_type_check  # its own checks give the messages; the type checks of the tests would come first
@dataclasses.dataclass(frozen=True, repr=False)
class Execution:
    """How a forward pass and its gradient are executed. The defaults suit a CPU.

    Frozen, hashable and checked on construction; `for_platform` makes what suits a device.

    Attributes:
        attention: "plain" computes all attention weights. "cudnn" runs NVIDIA's fused kernels,
            "flash" fused kernels for TPU where attention is long, see `attention_of`. These drop
            no attention weights; `kernels.attention_backend` knows their limits.
        product: A product of [batch, length, features] with a kernel: "flattened" joins batch and
            length first, which makes the gradient faster on a CPU; "batched" leaves them as they
            are, which saves a TPU the transposes. "wide_sums" joins them and adds up in at least
            float32: on a CPU a half-precision kernel is then read as it is, where XLA would make
            a float32 copy of it first. A gradient through it is slow. "padded" is "batched" with
            at least 8 rows: XLA for a TPU multiplies a single row on the vector unit, and a step
            takes 2.1 times the cycles.
        dropout_mask: "packed" draws by the key's own algorithm, the same elements on every mesh,
            and keeps one bit for each element. "generated" draws by XLA's RngBitGenerator, which a
            TPU has in hardware; which elements are dropped depends on the mesh.
        exponentials: What the backward pass of plain attention keeps of a softmax: exponentials in
            at least float32 ("wide"), or rounded to the dtype of the scores ("as_scores"), which is
            half the memory where a TPU computes in half precision.
        loss_parts: Parts of the target's length. The loss keeps the logits of one part at a time:
            it computes value and gradient of one part after the other, and nothing twice. A mesh
            that divides more than the rows has one part.
        norm: "shifted" subtracts a row's first element before it takes the mean, so that the mean
            of equal numbers is exact. "fused" does not, and writes its gradient by hand: XLA for
            TPU then computes the sums of both inside the products next to the norm, and a training
            step takes 4 % fewer cycles. It has no forward-mode derivative.
        compute_dtype: None computes in the dtype of the parameters. Otherwise the parameters keep
            theirs and each product casts its kernel to this, so that devices add up gradients in
            the dtype of the parameters.
        remat: What the backward pass recomputes to save memory: nothing ("none"), whole layers
            from their inputs ("layers"), or all but the products with kernels ("dots").
        scan_layers: Whether a stack is one loop over stacked parameters, which compiles in the
            time of one layer. Dropout then draws other masks from the same key.
        lora_dropout: Dropout of what an adapter's first product reads, where dropout is on.
    """

    attention: Attention = "plain"
    product: Product = "flattened"
    dropout_mask: DropoutMask = "packed"
    exponentials: Exponentials = "wide"
    loss_parts: Annotated[int, Meta(ge=1, le=LARGEST)] = 1
    norm: NormForm = "shifted"
    compute_dtype: Literal["bfloat16"] | None = None
    remat: Remat = "none"
    scan_layers: bool = False
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    __repr__ = short_repr  # signatures show an `Execution`

    @classmethod
    def for_platform(cls, platform: str, **overrides: str | bool | int | float | None) -> Self:
        """Return what suits a platform, with fields replaced.

        Args:
            platform: "cpu", "gpu" or "tpu", as `jax.Device.platform` names it.
            **overrides: Fields of this class.

        Raises:
            InputError: The platform is unknown, or a value is not one of its field's.
        """
        if platform not in PLATFORM_FIELDS:
            known = ", ".join(PLATFORM_FIELDS)
            raise InputError(f"platform={platform!r} is unknown; choose one of {known}")
        own = {field.name for field in dataclasses.fields(cls)}
        suits = {name: value for name, value in PLATFORM_FIELDS[platform].items() if name in own}
        return cls(**suits | overrides)

    def attention_of(self, queries: int, keys: int, by_segments: bool) -> Attention:
        """Return how one attention is computed.

        "flash" runs its kernels where there are at least `SHORTEST_FLASH`² scores for a row and a
        head, and where the kernels can be told which query attends to which key. They are compiled
        for known lengths alone: a program for any length computes plain attention.

        Args:
            by_segments: Whether the mask is one by segments, or none, and no bias is added.
        """
        if self.attention != "flash":
            return self.attention
        known = isinstance(queries, int) and isinstance(keys, int)  # not symbolic (`jax.export`)
        long = known and queries * keys >= SHORTEST_FLASH**2
        return "flash" if by_segments and long else "plain"


@no_type_check
@dataclasses.dataclass(frozen=True, repr=False)
class SearchExecution(Execution):
    """How a search is executed: its forward passes, and what only a search needs.

    Attributes:
        step_product: The products of a decoding step, as `product`.
        copied_kernels: What a search copies before its loop: "panels" of the decoder's kernels,
            without which greedy search of four sources took 1.44 - 1.49 - 1.56 times the processor
            time on a CPU (base width, 6 layers, 48 tokens); the kernel of the output projection
            where the vocabulary is no multiple of 8 ("aligned"), because XLA for a GPU would pad
            it in every step, which is 0.35 ms of 0.78 of NLLB-600M on an H100 by its estimate; or
            "none".
        wide_norms: Whether a search converts the norms' parameters to float32 before its loop. On
            a TPU each conversion in the loop costs as much as a small product: a step takes 12 %
            more cycles with them.
        cache: How a decoding step attends to its cache, whose arrays lie as this needs them:
            "split_heads" multiplies the query of each head by the head's own matrix, "joined_heads"
            all heads of a source by one matrix of full width. On a TPU a step of greedy search
            takes 2.6 times the cycles with the first, because the matrix unit takes at least 8 rows
            and 128 columns.
        wide_cache: Whether the cache of a model in bfloat16 is in float32. XLA for a CPU converts
            the whole of a bfloat16 cache to float32 and back in every step.
        top_k: How beam search ranks the next tokens [sources, hypotheses, vocabulary]: "batched"
            as they are; "flattened" joins the first two axes, because XLA for a TPU has a kernel
            for the best of two axes, and sorts the whole vocabulary for three.
        argmax: How greedy search finds the likeliest token: "by_blocks" of ids, because XLA has no
            vector code for a long argmax on a CPU; or "at_once". By XLA's estimate, a step of 256
            slots of opus-mt takes 1.46 ms so on a v5e, and 2.03 ms by blocks; an H100 takes 1 %
            less.
    """

    step_product: Product = "wide_sums"
    copied_kernels: Literal["panels", "aligned", "none"] = "panels"
    wide_norms: bool = False
    cache: CacheLayout = "split_heads"
    wide_cache: bool = True
    top_k: TopK = "batched"
    argmax: Argmax = "by_blocks"

    @property
    def of_step(self) -> Execution:
        """Return how the forward pass of a decoding step is executed."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Execution)}
        fields["product"] = self.step_product
        return Execution(**fields)


DEFAULT_EXECUTION = Execution()
DEFAULT_SEARCH_EXECUTION = SearchExecution()
