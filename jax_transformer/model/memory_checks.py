"""What a call needs at least, held against this machine's memory before any of it is allocated.

Only where JAX computes on the CPU: an accelerator refuses what does not fit by itself, at once.
"""

import jax
from jax.export import is_symbolic_dim
from jaxtyping import PRNGKeyArray

from jax_transformer.config import LARGEST, TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model.parameters import parameter_count
from jax_transformer.runtime.host_memory import check_memory

FLOAT32 = 4  # bytes


def check_parameters(config: TransformerConfig, key: PRNGKeyArray | None = None) -> None:
    """Refuse a model whose float32 parameters this machine cannot hold.

    Args:
        key: The key that they are drawn with; if it is traced, nothing is allocated or refused.
    """
    if not isinstance(key, jax.core.Tracer) and _on_cpu():
        count = parameter_count(config)
        what = f"a model of d_model={config.d_model} with {count:,} parameters"
        check_memory(FLOAT32 * count, what, "choose smaller sizes")


def check_position_table(length: int, d_model: int) -> None:
    """Refuse a table of sinusoids that this machine cannot compute."""
    check_memory(3 * 8 * length * d_model, f"a table of {length} positions", "set a lower length")


def check_cache(
    config: TransformerConfig,
    batch: int,
    source_length: int,
    max_new_tokens: int,
    beam_size: int,
    bytes_of_a_number: int,
) -> None:
    """Refuse a cache whose slots no int32 counts, or that this machine cannot hold."""
    if is_symbolic_dim(batch) or is_symbolic_dim(source_length):
        return  # a program for any size (`jax.export`) allocates nothing here
    named = f"max_new_tokens={max_new_tokens} with beam_size={beam_size}"
    slots = batch * beam_size * max_new_tokens
    if slots > LARGEST:
        raise InputError(f"{named} and {batch} sources makes {slots} slots, but at most {LARGEST}")
    if not _on_cpu():
        return
    kept = slots if config.decoder_attention == "self_then_cross" else 0
    width = 2 * config.num_heads * config.head_dim * bytes_of_a_number  # a key and a value
    cache = config.num_decoder_layers * width * (kept + batch * source_length)
    remedy = "set fewer tokens, hypotheses or sources"
    check_memory(cache + 4 * slots, f"the cache for {named} and {batch} sources", remedy)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
