"""Which implementation computes attention: a rule over facts known before a program is traced."""

import re
from typing import NamedTuple, TypeVar

import jax

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.execution import SHORTEST_FLASH, Attention, Execution

Kind = TypeVar("Kind", bound=Execution)

LONGEST_FLASH_HEAD = 128  # the longest that was compiled for v5e in float32 and bfloat16


class AttentionChoice(NamedTuple):
    """An implementation of `functional.dot_product_attention`.

    Attributes:
        implementation: "cudnn", NVIDIA's fused kernels; "flash", fused kernels for TPU where
            attention is long; or "plain", products and a softmax.
        reason: Why it is the plain one, or from which length "flash" runs its kernels, in a few
            words; else empty.
    """

    implementation: Attention
    reason: str = ""

    def __str__(self) -> str:
        return f"attention: {self.implementation}" + (f" ({self.reason})" if self.reason else "")


def choose_for(
    device: jax.Device, dtype: str, config: TransformerConfig, dropped: bool
) -> AttentionChoice:
    """Return the implementation for a device: fused kernels wherever their limits allow.

    The limits of cuDNN are those of `jax.nn.dot_product_attention`, which drops no weights, and of
    the backward pass in cuDNN's support matrix of scaled dot product attention.

    Args:
        dtype: What the model computes in.
        dropped: Whether attention weights are dropped.
    """
    backend = device.platform
    if config.value_dim != config.head_dim:
        reason = f"d_v={config.d_v}; fused kernels need values as wide as keys"
    elif backend == "tpu":
        reason = _why_not_flash(dtype, config.head_dim, dropped)
    elif backend == "gpu" and config.attention_softcap is not None:
        reason = "scores are capped; cuDNN caps none"
    else:
        reason = _why_not_cudnn(device, dtype, config.head_dim, dropped)
    if reason:
        return AttentionChoice("plain", reason)
    if backend != "tpu":
        return AttentionChoice("cudnn")
    shorter = "shorter, with a mask of the caller's or with relative positions: plain"
    return AttentionChoice("flash", f"from length {SHORTEST_FLASH}; {shorter}")


def _why_not_cudnn(device: jax.Device, dtype: str, head_dim: int, dropped: bool) -> str:
    """Return which limit of cuDNN is exceeded, in a few words; empty if none is."""
    if device.platform != "gpu":
        return f"{device.platform}; fused kernels need a GPU or a TPU"
    capability = getattr(device, "compute_capability", "")
    numbers = re.fullmatch(r"(\d+)\.\d+", capability)  # "9.0" of NVIDIA's; AMD's have other words
    generation = int(numbers[1]) if numbers else 0
    if generation < 8:
        return f"a GPU {capability}; cuDNN needs NVIDIA's, from 8.0"
    if dtype not in ("bfloat16", "float16"):
        return f"{dtype}; cuDNN needs bfloat16"
    most = 256 if generation == 9 else 128
    if head_dim % 8 or head_dim > most:
        return f"head_dim={head_dim}; cuDNN needs a multiple of 8, at most {most}"
    return "attention weights are dropped; cuDNN through JAX drops none" if dropped else ""


def _why_not_flash(dtype: str, head_dim: int, dropped: bool) -> str:
    """Return which limit of the kernels for TPU is exceeded; empty if none is."""
    if dtype not in ("bfloat16", "float32"):
        return f"{dtype}; flash needs bfloat16 or float32"
    if head_dim > LONGEST_FLASH_HEAD:
        return f"head_dim={head_dim}; flash needs at most {LONGEST_FLASH_HEAD}"
    return "attention weights are dropped; flash drops none" if dropped else ""


def execution_on(
    device: jax.Device,
    dtype: str,
    config: TransformerConfig,
    kind: type[Kind] = Execution,
    **overrides: str | bool | int | float | None,
) -> Kind:
    """Return how a model that drops nothing is best executed on a device; see `choose_for`.

    Args:
        kind: `Execution`, or `SearchExecution` for a search.
        **overrides: Fields of that class.
    """
    choice = choose_for(device, dtype, config, dropped=False)
    return kind.for_platform(device.platform, attention=choice.implementation, **overrides)
