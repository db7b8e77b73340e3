"""How parameters are drawn: the values of `TransformerConfig.initialization`."""

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.config.lengths import axis_length

# What a product is for.
Role = Literal["query", "key", "value", "attention_output", "feed_forward", "logits"]


class Distribution(NamedTuple):
    """What the elements of a parameter are drawn from.

    Attributes:
        kind: "uniform" is the interval (-scale, scale), "normal" has the standard deviation
            `scale`, and "constant" is `scale` itself.
    """

    kind: Literal["uniform", "normal", "constant"]
    scale: float


ZEROS, ONES = Distribution("constant", 0.0), Distribution("constant", 1.0)


@partial(jax.jit, static_argnames=("kind", "shape"))
def draw(
    key: PRNGKeyArray, kind: str, scale: float | Float[Array, ""], shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Return a float32 array of independent draws; compiled once for each kind and shape."""
    if kind == "constant":
        return jnp.full(shape, scale, jnp.float32)
    if kind == "uniform":
        return scale * jax.random.uniform(key, shape, jnp.float32, -1, 1)
    return scale * jax.random.normal(key, shape, jnp.float32)


def _xavier_uniform(inputs: int, outputs: int) -> Distribution:
    return Distribution("uniform", math.sqrt(6 / (inputs + outputs)))  # Glorot and Bengio 2010


def kernel(config: TransformerConfig, inputs: int, outputs: int, role: Role) -> Distribution:
    """Return the distribution of an (inputs, outputs) kernel.

    "xavier_uniform_fused" draws query, key and value as one matrix, whose fan-out is the sum of
    theirs, and "t5" divides the query's kernel by sqrt(head_dim), in the place of the scores.
    """
    if config.initialization == "torch_default":
        return Distribution("uniform", 1 / math.sqrt(inputs))
    if config.initialization == "normal":
        return Distribution("normal", 0.02)
    if config.initialization == "t5":
        fan_in = inputs * (config.head_dim if role == "query" else 1)
        return Distribution("normal", 1.0 if role == "logits" else fan_in**-0.5)
    if config.initialization == "xavier_uniform_fused" and role in ("query", "key", "value"):
        projected = ("projected_heads", "projected_key_heads", "projected_value_heads")
        outputs = sum(axis_length(config, name) for name in projected)
    return _xavier_uniform(inputs, outputs)


def bias(config: TransformerConfig, inputs: int, role: Role) -> Distribution:
    """Return the distribution of the bias beside a kernel of `inputs` rows.

    torch.nn.Linear draws its biases, and torch's Xavier schemes leave them so;
    torch.nn.MultiheadAttention sets its own to 0.
    """
    if config.initialization in ("vaswani2017", "normal", "t5"):
        return ZEROS
    if config.initialization == "xavier_uniform_fused" and role not in ("feed_forward", "logits"):
        return ZEROS
    return Distribution("uniform", 1 / math.sqrt(inputs))


def embedding(config: TransformerConfig, rows: int, columns: int) -> Distribution:
    """Return the distribution of a (rows, columns) table of tokens, positions or biases."""
    if config.initialization == "vaswani2017":
        return Distribution("normal", config.d_model**-0.5)
    if config.initialization in ("torch_default", "t5"):
        return Distribution("normal", 1.0)
    if config.initialization == "normal":
        return Distribution("normal", 0.02)
    return _xavier_uniform(rows, columns)


def relative_bias(config: TransformerConfig, buckets: int, heads: int) -> Distribution:
    """Return the distribution of a (buckets, heads) table of relative biases."""
    if config.initialization == "t5":
        return Distribution("normal", config.d_model**-0.5)
    return embedding(config, buckets, heads)
