"""The maths of the Transformer as pure functions of arrays.

Letters in shapes: B batch, T queries, S keys, L length, D d_model, F d_ff, H heads, K head_dim.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int, Int32, Integer

from jax_transformer.errors import InputError
from jax_transformer.kernels.execution import Attention, Exponentials, Product
from jax_transformer.kernels.fused_attention import cudnn_attention, flash_attention
from jax_transformer.model.checks import check_mask, check_rows
from jax_transformer.model.masks import SegmentMask, dense
from jax_transformer.runtime.host_memory import check_memory

FEWEST_ROWS = 8  # that the matrix unit of a TPU takes at once


def linear(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"],
    bias: Float[Array, " outputs"] | None = None,
    product: Product = "flattened",
) -> Float[Array, "*batch outputs"]:
    """Return `x @ kernel + bias`.

    Args:
        x: Vectors [*batch, inputs].
        kernel: Matrix [inputs, outputs].
        bias: Vector [outputs]; None adds nothing.
        product: "flattened" joins the leading axes of `x` for one plain matrix product, whose
            gradient is faster on a CPU; "batched" keeps them, which is faster on a TPU;
            "wide_sums" joins them and adds up in at least float32; "padded" is "batched", with
            rows of 0 added where there are fewer than 8.
    """
    missing = 0
    if product == "padded" and not any(map(is_symbolic_dim, x.shape)):
        missing = FEWEST_ROWS - math.prod(x.shape[:-1])
    flattened = product in ("flattened", "wide_sums") or missing > 0
    rows = x.reshape(-1, x.shape[-1]) if flattened else x
    if product == "wide_sums":
        kind = jnp.result_type(rows, kernel)
        wide = jnp.promote_types(kind, jnp.float32)
        y = jnp.matmul(rows, kernel, preferred_element_type=wide).astype(kind)
    elif missing > 0:
        y = (jnp.pad(rows, ((0, missing), (0, 0))) @ kernel)[: len(rows)]
    else:
        y = rows @ kernel
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], kernel.shape[-1])


def mixed_linear(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"],
    bias: Float[Array, " outputs"] | None = None,
) -> Float[Array, "*batch outputs"]:
    """Return `x @ kernel + bias` in the dtype of `x`, with gradients in those of the parameters.

    A cast of the parameters before the product would give gradients of half precision, which
    several devices would then add up in half precision.
    """
    y = _mixed_product(x, kernel)
    if bias is not None:
        y = (y.astype(bias.dtype) + bias).astype(x.dtype)
    return y


@jax.custom_vjp
def _mixed_product(
    x: Float[Array, "*batch inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "*batch outputs"]:
    return x @ kernel.astype(x.dtype)


def _mixed_product_forward(
    x: Float[Array, "*batch inputs"], kernel: Float[Array, "inputs outputs"]
) -> tuple[Float[Array, "*batch outputs"], tuple[Array, Array]]:
    return _mixed_product(x, kernel), (x, kernel)


def _mixed_product_backward(
    kept: tuple[Array, Array], gradient: Float[Array, "*batch outputs"]
) -> tuple[Float[Array, "*batch inputs"], Float[Array, "inputs outputs"]]:
    x, kernel = kept
    to_kernel = jnp.einsum("...i,...o->io", x, gradient, preferred_element_type=kernel.dtype)
    return gradient @ kernel.astype(x.dtype).T, to_kernel


_mixed_product.defvjp(_mixed_product_forward, _mixed_product_backward)


def linear_by_rows(
    x: Float[Array, "*batch inputs"],
    table: Float[Array, "outputs inputs"],
    bias: Float[Array, " outputs"] | None = None,
) -> Float[Array, "*batch outputs"]:
    """Return `x @ table.T + bias`, adding up in at least float32.

    XLA for CPU copies neither a large table nor its transpose for it, also of half precision.
    """
    kind = jnp.result_type(x, table)
    wide = jnp.promote_types(kind, jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count == 1 and wide != kind:  # XLA would copy the table for a product with a vector
        rows = jnp.concatenate([rows, rows])
    y = jnp.einsum("vd,rd->vr", table, rows, preferred_element_type=wide).T[:count].astype(kind)
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], len(table))


def embed(ids: Int[Array, "*batch"], table: Float[Array, "vocab D"]) -> Float[Array, "*batch D"]:
    """Return the table's rows for `ids`.

    An id outside the table gives a row of NaN, which no loss can miss, where plain indexing
    would silently use another token's row.
    """
    if ids.dtype.itemsize > 4:
        ids = cast_ids(ids, len(table))
    rows = jnp.asarray(table).at[ids]
    return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def cast_ids(ids: Integer[Array | np.ndarray, "*batch"], count: int) -> Int32[Array, "*batch"]:
    """Return ids as int32, those outside 0 to count - 1 still outside.

    A cast alone wraps, and XLA casts indices too: it would read id 2**32 + 5 as id 5.
    """
    if isinstance(ids, jax.core.Tracer) and ids.dtype.itemsize > 4:
        ids = jnp.where((ids >= 0) & (ids < count), ids, count)
    return jnp.asarray(ids, jnp.int32)


def sinusoidal_positions(
    length: int, d_model: int, kind: str = "sinusoidal", offset: int = 0
) -> Float[np.ndarray, "length d_model"]:
    """Return the float64 table of sinusoidal positions (section 3.5).

    Args:
        length: Rows, positions `offset` to offset + length - 1.
        d_model: Columns; even, except for "sinusoidal_tensor2tensor".
        kind: A value of `TransformerConfig.positions`. Column c of "sinusoidal" has the frequency
            10000**(-2 (c // 2) / d_model), of "sinusoidal_per_column" 10000**(-2 c / d_model);
            even columns are sines, odd columns cosines. "sinusoidal_halves" has the columns of
            "sinusoidal" with all sines first. "sinusoidal_tensor2tensor" has h = d_model // 2
            sines of the frequencies 10000**(-i / (h - 1)), their cosines, and a last column of
            zeros where d_model is odd.
        offset: Position of the first row.

    Raises:
        InputError: This machine has no memory for the table.
    """
    check_memory(3 * 8 * length * d_model, f"a table of {length} positions", "set a lower length")
    position = np.arange(offset, offset + length)[:, None]
    if kind == "sinusoidal_tensor2tensor":
        half = d_model // 2
        angle = position * 10000.0 ** (-np.arange(half) / (half - 1))
        zeros = np.zeros((length, d_model % 2))
        return np.concatenate([np.sin(angle), np.cos(angle), zeros], axis=1)
    column = np.arange(d_model)
    exponent = 2 * column if kind == "sinusoidal_per_column" else column - column % 2
    angle = position / 10000.0 ** (exponent / d_model)
    table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    if kind == "sinusoidal_halves":
        table = np.concatenate([table[:, 0::2], table[:, 1::2]], axis=1)
    return table


def relative_position_buckets(
    distance: Int[np.ndarray, " distances"],
    num_buckets: int,
    max_distance: int,
    bidirectional: bool,
) -> Int[np.ndarray, " distances"]:
    """Return the bucket of each distance between a query and a key (Raffel et al. 2020).

    Near distances have a bucket each; from half of the buckets of a side on, the distances of a
    bucket grow by a constant factor; from `max_distance` on, all distances share the last bucket.

    Args:
        distance: Position of the key minus position of the query [distances].
        num_buckets: Number of buckets.
        max_distance: The distance that ends the growing buckets.
        bidirectional: Whether later keys have half of the buckets, as in an encoder; else they
            all have bucket 0, as in a decoder, whose mask hides them.
    """
    first = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = np.where(distance > 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    # float32, as in the reference: at a distance where a bucket begins, rounding decides.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    growth = np.log(ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (growth * np.float32(num_buckets - exact)).astype(distance.dtype)
    return first + np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))


def toeplitz(by_distance: Float[Array, "distances H"], queries: int) -> Float[Array, "H T S"]:
    """Return the matrices whose element (t, s) is the row of distance s - t.

    Args:
        by_distance: Rows for the distances -(queries - 1) to keys - 1, so T + S - 1 of them.
        queries: Number T of queries.
    """
    distances, num_heads = by_distance.shape
    # Rows one longer than they are read: each row that is read begins one element later.
    rows = jnp.broadcast_to(by_distance.T[:, None], (num_heads, queries, distances))
    flat = jnp.pad(rows, ((0, 0), (0, 0), (0, 1))).reshape(num_heads, -1)
    shifted = flat[:, : queries * distances].reshape(num_heads, queries, distances)
    return shifted[:, :, queries - 1 :]


def segment_positions(segments: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Return positions that start at 0 in each segment of a row; the positions of padding are 0.

    Args:
        segments: Segment of each position: 1, 2, ... side by side; 0 is padding [batch, length].
    """
    index = jnp.arange(segments.shape[1])
    starts = segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.where(segments > 0, positions, 0)


def activation(x: Float[Array, "*shape"], kind: str) -> Float[Array, "*shape"]:
    """Return the feed-forward nonlinearity `kind`, a value of `TransformerConfig.activation`."""
    if kind == "relu":
        return jax.nn.relu(x)
    if kind == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=kind == "gelu_tanh")


def split_heads(x: Float[Array, "B L D"], num_heads: int) -> Float[Array, "B H L K"]:
    """Return the columns of each position split into heads of consecutive columns."""
    return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads).swapaxes(1, 2)


def merge_heads(x: Float[Array, "B H L K"]) -> Float[Array, "B L D"]:
    """Return the heads of each position side by side: the inverse of `split_heads`."""
    batch, num_heads, length, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, num_heads * head_dim)


def clear_unattended(
    x: Float[Array, "B L D"], mask: Bool[Array, "#B #H _ #L"] | SegmentMask | None
) -> Float[Array, "B L D"]:
    """Return `x`, with NaN and very large numbers replaced by 0 at positions no query attends to.

    Such a position is padding: its numbers change no other position's output. But the gradients
    of products multiply them by 0, and 0 * NaN is NaN. A number is very large if its square
    overflows. Other numbers stay, so the outputs at padded positions are defined as well.

    Args:
        x: Vectors that enter a stack of layers [B, L, D].
        mask: Which query attends to which of them, True = attend; None attends to everything.
    """
    if mask is None:
        return x
    limit = math.sqrt(jnp.finfo(x.dtype).max)
    if isinstance(mask, SegmentMask):
        attended = mask.attended(x.shape[1])
    else:
        attended = jnp.any(mask, axis=(1, 2))
    return jnp.where(attended[..., None] | (jnp.abs(x) < limit), x, 0)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def softmax(
    scores: Float[Array, "*batch S"],
    attends: Bool[Array, "*#batch 1"] | None = None,
    kept: jnp.dtype | None = None,
) -> Float[Array, "*batch S"]:
    """Return exp(scores) over its sum along the last axis.

    `jax.nn.softmax` with another order of operations in its derivative. The gradient of
    `jax.nn.softmax` is weights * g - weights * sum(weights * g): two products that nearly cancel
    where the elements of g are alike. Here it is weights * (g - sum(weights * g)), as in torch,
    which halves the float32 error of the gradients of queries and keys.

    Args:
        scores: Any finite numbers [*batch, S].
        attends: Which rows have weights at all [*batch, 1]; the others are 0. None is all rows.
        kept: The dtype that the exponentials are rounded to, after they are summed; None is that
            of the scores.
    """
    if not scores.shape[-1]:
        return scores
    # XLA for TPU recognises this order of operations, and keeps the exponentials. A division of
    # all of them would be repeated in every product that reads the weights.
    largest = jnp.max(scores, axis=-1, keepdims=True)
    exponentials = jnp.exp(scores - largest)
    factor = 1 / jnp.sum(exponentials, axis=-1, keepdims=True)
    if kept is not None:
        exponentials = exponentials.astype(kept).astype(scores.dtype)
    return exponentials * (factor if attends is None else jnp.where(attends, factor, 0))


@softmax.defjvp
def _softmax_jvp(
    kept: jnp.dtype | None,
    primals: tuple[Float[Array, "*batch S"], Bool[Array, "*#batch 1"] | None],
    tangents: tuple[Float[Array, "*batch S"], Any],
) -> tuple[Float[Array, "*batch S"], Float[Array, "*batch S"]]:
    weights = softmax(*primals, kept)
    product = weights * tangents[0]
    return weights, product - weights * jnp.sum(product, axis=-1, keepdims=True)


def attention_weights(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H S K"],
    mask: Bool[Array, "#B #H #T #S"] | None = None,
    bias: Float[Array, "#B H #T S"] | None = None,
    scaled: bool = True,
    exponentials: Exponentials = "wide",
) -> Float[Array, "B H T S"]:
    """Return softmax(query keyᵀ / sqrt(head_dim) + bias) over the keys (section 3.2.1).

    The softmax runs in at least float32. A masked key has weight 0; a query that may attend to
    nothing has weight 0 everywhere, with finite gradients. Arguments as `dot_product_attention`.
    """
    scores = jnp.einsum("bhtk,bhsk->bhts", query, key)
    return _weigh(scores, query.shape[-1], mask, bias, scaled, exponentials=exponentials)


def _weigh(
    scores: Float[Array, "B H T S"],
    head_dim: int,
    mask: Bool[Array, "#B #H #T #S"] | None,
    bias: Float[Array, "#B #H #T S"] | None,
    scaled: bool,
    by_rows: bool = True,
    exponentials: Exponentials = "wide",
) -> Float[Array, "B H T S"]:
    """Return the weights of scores.

    A row without a visible key gets its zeros by a factor for the whole row where `by_rows`, and
    else by a selection of each weight, which is faster for the few queries of a decoding step.
    """
    if scaled:
        scores = scores / math.sqrt(head_dim)
    if bias is not None:
        scores = scores + bias
    dtype = scores.dtype
    scores = scores.astype(jnp.promote_types(dtype, jnp.float32))
    kept = dtype if exponentials == "as_scores" else None
    if mask is None:
        return softmax(scores, None, kept).astype(dtype)
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    if not by_rows:
        return jnp.where(mask, softmax(scores), 0).astype(dtype)
    return softmax(scores, jnp.any(mask, axis=-1, keepdims=True), kept).astype(dtype)


def dot_product_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H S K"],
    value: Float[Array, "B H S K"],
    mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None,
    dropout: Callable[[Float[Array, "B H T S"]], Float[Array, "B H T S"]] | None = None,
    implementation: Attention = "plain",
    bias: Float[Array, "#B H T S"] | None = None,
    scaled: bool = True,
    exponentials: Exponentials = "wide",
) -> Float[Array, "B H T K"]:
    """Return the values averaged by their attention weights (section 3.2.1).

    A query that may attend to nothing gives 0. Keys and values that no query may attend to have
    no influence, whatever they contain: without the selection below, 0 * NaN would be NaN.

    Args:
        query: Queries [B, H, T, K].
        key: Keys [B, H, S, K].
        value: Values [B, H, S, K].
        mask: True = attend, broadcastable to [B, H, T, S], or by segments; None attends to
            everything.
        dropout: Applied to the attention weights, where given.
        implementation: "plain" computes the weights; "flash" runs fused kernels on a TPU, and
            needs a mask by segments and no bias; "cudnn" runs NVIDIA's fused kernels on a GPU.
        bias: Added to the scores, broadcastable to [B, H, T, S]; None adds nothing.
        scaled: Whether the scores are divided by sqrt(head_dim), before the bias.
        exponentials: What "plain" keeps of its softmax, as `Execution.exponentials`.

    Raises:
        InputError: The mask is not boolean or does not fit, or keys or values are of another batch;
            or a fused kernel is asked to drop attention weights, or "flash" to read a mask that is
            not by segments or a bias, which they cannot do.
    """
    batch, num_heads, queries, _ = query.shape
    check_mask("mask", mask, (batch, num_heads, queries, key.shape[2]))
    check_rows("keys", key, batch, "queries")
    check_rows("values", value, batch, "queries")
    if implementation != "plain" and dropout is not None:
        raise InputError(
            f"attention={implementation!r} cannot drop attention weights; use attention='plain', "
            "or set attention_dropout=0"
        )
    if implementation == "flash":
        if bias is not None or not (mask is None or isinstance(mask, SegmentMask)):
            raise InputError(
                "attention='flash' reads masks by segments, and no bias; use attention='plain'"
            )
        return flash_attention(query, key, value, mask, scaled)
    if implementation == "cudnn":
        return cudnn_attention(query, key, value, mask, bias, scaled)
    mask = dense(mask, query.shape[2], key.shape[2])
    if mask is not None:
        attended = jnp.any(mask, axis=-2)[..., None]  # [B, H, S, 1]
        key, value = jnp.where(attended, key, 0), jnp.where(attended, value, 0)
    weights = attention_weights(query, key, mask, bias, scaled, exponentials)
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("bhts,bhsk->bhtk", weights, value)


def cached_attention(
    query: Float[Array, "B H T K"],
    keys: Float[Array, "B H K S"],
    values: Float[Array, "B H S K"],
    mask: Bool[Array, "#B #H #T #S"] | None = None,
    bias: Float[Array, "#B H #T S"] | None = None,
    scaled: bool = True,
) -> Float[Array, "B H T K"]:
    """Return attention over a cache, whose keys lie in columns and whose numbers are all finite.

    With keys in columns, both products of a decoding step read memory row by row. `bias` and
    `scaled` as for `dot_product_attention`.
    """
    scores = jnp.einsum("bhtk,bhks->bhts", query, keys)
    weights = _weigh(scores, query.shape[-1], mask, bias, scaled, by_rows=False)
    return jnp.einsum("bhts,bhsk->bhtk", weights, values)


def joined_attention(
    query: Float[Array, "B H N K"],
    keys: Float[Array, "B S D"],
    values: Float[Array, "B S D"],
    mask: Bool[Array, "#B #H #N #S"] | None = None,
    bias: Float[Array, "#B H #N S"] | None = None,
    scaled: bool = True,
) -> Float[Array, "B H N K"]:
    """Return attention over a cache whose heads lie side by side: D is H * K.

    The same as `cached_attention`, computed by one product for all heads of a source: the query of
    a head stands in the head's columns, with 0 in the columns of the others; of the product with
    the values each head keeps its own columns. The products have H times as many terms, but a
    matrix unit computes them in the time that it needs for a single row. Sums are in at least
    float32.

    Args:
        query: Queries of the N hypotheses of each source [B, H, N, K].
        keys: Keys [B, S, D], finite everywhere.
        values: Values [B, S, D], finite everywhere.
        mask: True = attend, broadcastable to [B, H, N, S]; None attends to everything.
        bias: Added to the scores, broadcastable to [B, H, N, S]; None adds nothing.
        scaled: Whether the scores are divided by sqrt(K), before the bias.
    """
    _, num_heads, _, head_dim = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    width = num_heads * head_dim
    own = np.arange(width) // head_dim == np.arange(num_heads)[:, None]  # [H, D]
    queries = jnp.where(own, merge_heads(query)[:, :, None], 0)  # [B, N, H, D]
    scores = jnp.einsum("bnhd,bsd->bnhs", queries, keys, preferred_element_type=wide)
    mask, bias = (None if x is None else x.swapaxes(1, 2) for x in (mask, bias))
    weights = _weigh(scores, head_dim, mask, bias, scaled).astype(query.dtype)
    heads = jnp.einsum("bnhs,bsd->bnhd", weights, values, preferred_element_type=wide)
    joined = jnp.sum(jnp.where(own, heads, 0), axis=2).astype(query.dtype)
    return split_heads(joined, num_heads)
