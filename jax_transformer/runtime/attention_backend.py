"""Which implementation computes attention: a rule over facts known before a program is traced."""

import re
from typing import Literal, NamedTuple

import jax

from jax_transformer.execution import Execution


class Choice(NamedTuple):
    """An implementation of `functional.dot_product_attention`.

    Attributes:
        implementation: "cudnn", NVIDIA's fused kernels, or "plain", products and a softmax.
        reason: Why it is the plain one, in a few words; else empty.
    """

    implementation: Literal["cudnn", "plain"]
    reason: str = ""

    def __str__(self) -> str:
        return f"attention: {self.implementation}" + (f" ({self.reason})" if self.reason else "")


def choose(
    backend: str, compute_capability: str, dtype: str, head_dim: int, dropped: bool
) -> Choice:
    """Return the implementation: cuDNN wherever its limits allow.

    The limits are those of `jax.nn.dot_product_attention`, which drops no weights, and of the
    backward pass in cuDNN's support matrix of scaled dot product attention.

    Args:
        backend: Platform of the device, as `jax.Device.platform`.
        compute_capability: Of an NVIDIA GPU, as in "9.0".
        dtype: Of queries, keys and values.
        head_dim: Their length.
        dropped: Whether dropout is applied to the attention weights.
    """
    if backend != "gpu":
        return Choice("plain", f"{backend}; cuDNN needs a GPU")
    capability = re.fullmatch(r"(\d+)\.\d+", compute_capability)
    generation = int(capability[1]) if capability else 0
    if generation < 8:
        return Choice("plain", f"a GPU {compute_capability}; cuDNN needs NVIDIA's, from 8.0")
    if dtype not in ("bfloat16", "float16"):
        return Choice("plain", f"{dtype}; cuDNN needs bfloat16")
    most = 256 if generation == 9 else 128
    if head_dim % 8 or head_dim > most:
        limits = f"a multiple of 8, at most {most}"
        return Choice("plain", f"head_dim={head_dim}; cuDNN needs {limits}")
    if dropped:
        return Choice("plain", "attention weights are dropped; cuDNN through JAX drops none")
    return Choice("cudnn")


def choose_for(device: jax.Device, dtype: str, head_dim: int, dropped: bool) -> Choice:
    """Return `choose` for the backend and the compute capability of a device."""
    capability = getattr(device, "compute_capability", "")
    return choose(device.platform, capability, dtype, head_dim, dropped)


def execution_on(device: jax.Device, dtype: str, head_dim: int, dropped: bool) -> Execution:
    """Return how a model is best executed on a device; arguments as `choose`."""
    choice = choose_for(device, dtype, head_dim, dropped)
    return Execution.for_platform(device.platform, attention=choice.implementation)
