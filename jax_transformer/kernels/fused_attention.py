"""Fused attention: kernels that never write the attention weights to memory.

Letters in shapes: B batch, T queries, S keys, H heads, G key heads, K head_dim, L length.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jax_transformer.errors import InputError
from jax_transformer.kernels.execution import Attention
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask, attended_keys
from jax_transformer.runtime.sharding import map_rows_and_heads

# Measured for a TPU v5e with heads of 64: longer blocks need fewer cycles, until they take more
# than a kernel's memory. A block of keys is never split where one holds them all: the backward
# pass writes the queries' gradients once for each block of keys, and adds them up.
LONGEST_QUERY_BLOCK = 1024
LONGEST_KEY_BLOCK = 2048
KEYS_AT_ONCE = 512  # a part of a long block of keys, whose scores are computed together
LANES = 128  # of a TPU's vectors: the length of a block is a multiple


def fused_attention(
    implementation: Attention,
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S _"],
    mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None,
    bias: Float[Array, "#B H T S"] | None,
    divisor: float,
    dropping: bool = False,
    softcap: float | None = None,
) -> Float[Array, "B H T _"]:
    """Return `functional.dot_product_attention` by "flash" or "cudnn" kernels."""
    if dropping:
        raise InputError(
            f"attention={implementation!r} cannot drop attention weights; use attention='plain', "
            "or set attention_dropout=0"
        )
    if value.shape[3] != key.shape[3]:
        raise InputError(
            f"attention={implementation!r} needs values as wide as keys, not d_v={value.shape[3]}; "
            "use attention='plain'"
        )
    if implementation == "cudnn":
        if softcap is not None:
            raise InputError(
                f"attention='cudnn' cannot cap scores (softcap={softcap}); use attention='plain'"
            )
        return cudnn_attention(query, key, value, mask, bias, divisor)
    if bias is not None or not (mask is None or isinstance(mask, SegmentMask)):
        raise InputError(
            "attention='flash' reads masks by segments, and no bias; use attention='plain'"
        )
    return flash_attention(query, key, value, mask, divisor, softcap)


def flash_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    mask: SegmentMask | None,
    divisor: float,
    softcap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B H T K"]:
    """Return attention by JAX's splash kernels for TPU (FlashAttention-2, Dao 2023).

    Scores, softmax and sums are float32. On a mesh of `runtime.sharding.make_mesh` each device
    computes its own rows and heads.

    Args:
        interpret: Whether XLA computes what the kernels say, which needs no TPU.
    """
    batch, _, num_queries, _ = query.shape
    num_keys = key.shape[2]
    if divisor != 1:
        query = query / divisor
    if mask is not None:
        attended = mask.attended(num_keys)[:, None, :, None]
        key, value = jnp.where(attended, key, 0), jnp.where(attended, value, 0)
    query_segments, key_segments = _segments(mask, batch, num_queries, num_keys)
    query_block = block_length(num_queries, LONGEST_QUERY_BLOCK)
    key_block = block_length(num_keys, LONGEST_KEY_BLOCK)
    causal, window = (False, None) if mask is None else (mask.causal, mask.window)
    heads = map_rows_and_heads(
        partial(
            _splash_attention,
            blocks=(query_block, key_block),
            causal=causal,
            window=window,
            softcap=softcap,
            interpret=interpret,
        ),
        [_pad(query, 2, query_block), _pad(key, 2, key_block), _pad(value, 2, key_block)],
        [_pad(query_segments, 1, query_block), _pad(key_segments, 1, key_block)],
    )[:, :, :num_queries]
    if mask is None:
        return heads
    attending = mask.attending(num_queries, num_keys)[:, None, :, None]
    return jnp.where(attending, heads, 0)


def block_length(length: int, longest: int) -> int:
    """Return the length of the blocks that a length, padded to a multiple of it, is cut into."""
    blocks = -(-length // longest)
    step = LANES if length <= 2 * KEYS_AT_ONCE else 2 * LANES  # fewer parts of an odd length
    return -(-length // (blocks * step)) * step


def _splash_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    query_segments: Int[Array, "B T"],
    key_segments: Int[Array, "B S"],
    blocks: tuple[int, int],
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float | None,
    interpret: bool,
) -> Float[Array, "B H T K"]:
    """Return attention of lengths that are multiples of their blocks, on one device."""
    # Half a second to import, which only a program for TPU needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    (query_block, key_block), shape = blocks, (query.shape[2], key.shape[2])
    if window is None:
        kind = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
        mask = kind(shape)
    else:
        sides = window[0], 0 if causal else window[1]
        mask = splash_attention_mask.LocalMask(shape, sides, offset=0)
    at_once = key_block if key_block <= 2 * KEYS_AT_ONCE else math.gcd(key_block, KEYS_AT_ONCE)
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * query.shape[1]),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=query_block,
            block_kv=key_block,
            block_kv_compute=at_once,
            block_q_dkv=query_block,
            block_kv_dkv=key_block,
            block_kv_dkv_compute=at_once,
            use_fused_bwd_kernel=True,
            # The length last: XLA would fill heads of 64 up to the 128 lanes of a vector.
            q_layout=splash_attention_kernel.QKVLayout.SEQ_MINOR,
            k_layout=splash_attention_kernel.QKVLayout.SEQ_MINOR,
            v_layout=splash_attention_kernel.QKVLayout.SEQ_MINOR,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    segments = splash_attention_kernel.SegmentIds(query_segments, key_segments)
    return jax.vmap(kernel)(query, key, value, segments)


def _segments(
    mask: SegmentMask | None, batch: int, num_queries: int, num_keys: int
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Return segment ids: a query attends to keys with its id, or to fewer in causal attention."""
    queries, keys = jnp.ones((batch, num_queries), int), jnp.ones((batch, num_keys), int)
    if mask is not None and mask.keys is not None:
        keys = jnp.broadcast_to(mask.keys, keys.shape).astype(jnp.int32)
    if mask is not None and mask.queries is not None:
        queries = mask.queries  # what those of segment 0 gather is replaced later
    return queries.astype(jnp.int32), keys.astype(jnp.int32)


def _pad(x: Shaped[Array, "*shape"], axis: int, multiple: int) -> Shaped[Array, "*padded"]:
    """Return `x` with zeros at the end of an axis, up to a multiple of a length."""
    widths = [(0, -size % multiple if axis == n else 0) for n, size in enumerate(x.shape)]
    return jnp.pad(x, widths)


def cudnn_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S K"],
    mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None,
    bias: Float[Array, "#B H T S"] | None,
    divisor: float,
) -> Float[Array, "B H T K"]:
    """Return attention by NVIDIA's kernels, which skip what a causal `SegmentMask` hides.

    Padding is handed over as a mask and never as lengths, which would have to be known to stand
    at the end of the rows: ids may hold the pad id anywhere. A window is part of the mask too:
    before 9.10.2, cuDNN has none of its own beside a mask. Arguments as
    `functional.dot_product_attention`.
    """
    length, even_bias = query.shape[2], bias
    visible = even_mask = as_boolean_mask(mask, length, key.shape[2])
    if visible is not None:
        attended = attended_keys(visible, key.shape[1])
        key, value = jnp.where(attended, key, 0), jnp.where(attended, value, 0)
    causal = isinstance(mask, SegmentMask) and mask.causal
    if causal:
        segments = mask.replace(causal=False)
        alone = mask.keys is None and mask.window is None
        even_mask = None if alone else as_boolean_mask(segments, length, key.shape[2])
    if even_mask is None and bias is not None and (length % 2 or key.shape[2] % 2):
        even_mask = jnp.ones((1, 1, length, key.shape[2]), bool)  # hides what is added
    if even_mask is not None:
        # JAX passes a mask to cuDNN as a bias. The backward pass of cuDNN needs a bias of even
        # lengths that is not broadcast along them.
        even_mask = jnp.broadcast_to(even_mask, (*even_mask.shape[:2], length, key.shape[2]))
        even_mask = _pad(_pad(even_mask, 2, 2), 3, 2)
        query, key, value = (_pad(x, 2, 2) for x in (query, key, value))
        if bias is not None:
            even_bias = _pad(_pad(bias, 2, 2), 3, 2)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [B, L, H, K]
    heads = jax.nn.dot_product_attention(
        query,
        key,
        value,
        even_bias,
        even_mask,
        scale=1 / divisor,
        is_causal=causal,
        implementation="cudnn",
    )
    heads = heads.swapaxes(1, 2)[:, :, :length]
    if visible is None:
        return heads
    return jnp.where(jnp.any(visible, axis=-1, keepdims=True), heads, 0)
