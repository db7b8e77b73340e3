"""How parameters are drawn: the values of `TransformerConfig.initialization`."""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer, glorot_uniform, normal, zeros
from jaxtyping import Array, Float, PRNGKeyArray

from jax_transformer.config import TransformerConfig

# What a kernel is for.
Role = Literal["query", "key", "value", "attention_output", "feed_forward", "logits"]


def parameter(
    module: nn.Module, name: str, draw: Initializer, shape: tuple[int, ...]
) -> Float[Array | np.ndarray, "..."]:
    """Return a module's parameter, which `draw` makes where there is none yet.

    `module.param` alone would trace `draw` in every call, to compare the shapes.
    """
    value = module.get_variable("params", name)
    return value if np.shape(value) == shape else module.param(name, draw, shape)


def uniform(limit: float) -> Initializer:
    """Return the initializer that draws from the interval (-limit, limit)."""

    def draw(
        key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32
    ) -> Float[Array, "..."]:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return draw


def kernel(config: TransformerConfig, inputs: int, outputs: int, role: Role) -> Initializer:
    """Return the initializer of an (inputs, outputs) kernel.

    "xavier_uniform_fused" draws query, key and value as one matrix, with a fan-out of 3 * outputs,
    and "t5" divides the query's kernel by sqrt(head_dim), in the place of the scores.
    """
    if config.initialization == "torch_default":
        return uniform(1 / math.sqrt(inputs))
    if config.initialization == "normal":
        return normal(0.02)
    if config.initialization == "t5" and role == "logits":
        return normal(1.0)
    if config.initialization == "t5":
        return normal((inputs * (config.head_dim if role == "query" else 1)) ** -0.5)
    if config.initialization == "xavier_uniform_fused":
        fused = 3 if role in ("query", "key", "value") else 1
        return uniform(math.sqrt(6 / (inputs + fused * outputs)))
    return glorot_uniform()


def bias(config: TransformerConfig, inputs: int, role: Role) -> Initializer:
    """Return the initializer of the bias beside a kernel of `inputs` rows.

    torch.nn.Linear draws its biases, and torch's Xavier schemes leave them so;
    torch.nn.MultiheadAttention sets its own to 0.
    """
    if config.initialization in ("vaswani2017", "normal", "t5"):
        return zeros
    if config.initialization == "xavier_uniform_fused" and role not in ("feed_forward", "logits"):
        return zeros
    return uniform(1 / math.sqrt(inputs))


def relative_bias(config: TransformerConfig) -> Initializer:
    """Return the initializer of a (buckets, heads) table of relative biases."""
    return normal(config.d_model**-0.5) if config.initialization == "t5" else embedding(config)


def embedding(config: TransformerConfig) -> Initializer:
    """Return the initializer of a (vocab, d_model) table."""
    if config.initialization == "vaswani2017":
        return normal(config.d_model**-0.5)
    if config.initialization in ("torch_default", "t5"):
        return normal(1.0)
    if config.initialization == "normal":
        return normal(0.02)
    return glorot_uniform()
