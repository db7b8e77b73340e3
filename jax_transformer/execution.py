"""How a model is executed: choices of speed and memory that change a result only by rounding.

An `Execution` is an argument of a call and a static argument of `jax.jit`. Nothing in the model
asks the process which device it has, so one process can trace programs for every platform.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from jax_transformer.errors import InputError

Platform = Literal["cpu", "gpu", "tpu"]
Attention = Literal["plain", "cudnn", "flash"]
Product = Literal["flattened", "batched", "wide_sums"]
DropoutMask = Literal["packed", "unpacked"]
Remat = Literal["none", "layers", "dots"]


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model is executed. The defaults suit a CPU; see `for_platform`.

    Attributes:
        attention: "plain" computes all attention weights. "cudnn" runs NVIDIA's fused kernels,
            "flash" fused kernels for TPU where attention is long, see `attention_of`. These drop
            no attention weights; `runtime.attention_backend` knows their limits.
        flash_length: The length from which "flash" runs its kernels.
        product: A product of [batch, length, features] with a kernel: "flattened" joins batch and
            length first, which makes the gradient faster on a CPU; "batched" leaves them as they
            are, which saves a TPU the transposes. "wide_sums" joins them and adds up in at least
            float32: on a CPU a half-precision kernel is then read as it is, where XLA would make
            a float32 copy of it first. Decoding steps use it; a gradient through it is slow.
        dropout_mask: What the backward pass keeps of a dropout mask: "packed" is one bit for each
            element, "unpacked" one byte or the random bits, which saves the time of packing.
        remat: What the backward pass recomputes to save memory: nothing ("none"), whole layers
            from their inputs ("layers"), or all but the products with kernels ("dots").
        scan_layers: Whether a stack is one loop over stacked parameters, which compiles in the
            time of one layer. Dropout then draws other masks from the same key.
    """

    attention: Attention = "plain"
    flash_length: int = 512
    product: Product = "flattened"
    dropout_mask: DropoutMask = "packed"
    remat: Remat = "none"
    scan_layers: bool = False

    @classmethod
    def for_platform(cls, platform: str, **overrides: str | bool | int) -> Execution:
        """Return what suits a platform, with fields replaced.

        Args:
            platform: "cpu", "gpu" or "tpu", as `jax.Device.platform` names it.
            **overrides: Fields of this class.

        Raises:
            InputError: The platform is unknown.
        """
        if platform not in get_args(Platform):
            raise InputError(
                f"platform={platform!r} is unknown; choose one of {', '.join(get_args(Platform))}"
            )
        fields = {
            "product": "flattened" if platform == "cpu" else "batched",
            "dropout_mask": "unpacked" if platform == "tpu" else "packed",
        }
        return cls(**fields | overrides)

    def attention_of(self, queries: int, keys: int, by_segments: bool) -> Attention:
        """Return how one attention is computed.

        "flash" runs its kernels where there are at least `flash_length`² scores for a row and a
        head, and where the kernels can be told which query attends to which key.

        Args:
            queries: Number of queries.
            keys: Number of keys.
            by_segments: Whether the mask is one by segments, or none, and no bias is added.
        """
        if self.attention != "flash":
            return self.attention
        return "flash" if by_segments and queries * keys >= self.flash_length**2 else "plain"


DEFAULT_EXECUTION = Execution()
