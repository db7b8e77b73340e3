"""The maths of the Transformer as pure functions of arrays.

Letters in shapes: B batch, T queries, S keys, L length, D d_model, F d_ff, H heads, G key heads,
K width of a head's queries and keys, U of its values.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, Integer, Shaped

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.execution import Exponentials
from jax_transformer.kernels.segments import SegmentMask, attended_keys, join_queries
from jax_transformer.kernels.softmax import masked_softmax, soft_cap


def embed(ids: Int[Array, "*batch"], table: Float[Array, "vocab D"]) -> Float[Array, "*batch D"]:
    """Return the table's rows for `ids`.

    An id outside the table gives a row of NaN, which no loss can miss, where plain indexing
    would silently use another token's row.
    """
    if ids.dtype.itemsize > 4:
        ids = cast_ids(ids, len(table))
    rows = jnp.asarray(table).at[ids]
    return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def pick(values: Float[Array, "*batch vocab"], ids: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Return of each row of `values` the one at its id, and NaN at an id outside, as `embed`."""
    ids = cast_ids(ids, values.shape[-1])[..., None]
    return jnp.take_along_axis(values, ids, axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]


def cast_ids(ids: Integer[Array | np.ndarray, "*batch"], count: int) -> Int32[Array, "*batch"]:
    """Return ids as int32; `count` in the place of those outside 0 to count - 1.

    JAX reads -1 as the last index, and a cast wraps: it would read id 2**32 + 5 as id 5.
    """
    if ids.dtype.itemsize < 4:
        ids = ids.astype(np.int32)  # a short type may not hold `count`
    where = np.where if isinstance(ids, np.ndarray) else jnp.where
    return jnp.asarray(where((ids >= 0) & (ids < count), ids, count), jnp.int32)


def neighbours(x: Float[Array, "B L C"], stride: int) -> Float[Array, "B M 3*C"]:
    """Return what a convolution of width 3 reads at each position, or at each `stride`-th.

    The three elements of a channel stand side by side, those before and after the sequence are 0:
    a product with a kernel (3 C, outputs) is the convolution of torch.nn.Conv1d with padding 1.
    """
    padded, length = jnp.pad(x, ((0, 0), (1, 1), (0, 0))), x.shape[1]
    parts = [padded[:, start : start + length : stride] for start in range(3)]
    return jnp.stack(parts, axis=-1).reshape(*parts[0].shape[:2], -1)


def sinusoidal_positions(
    length: int, d_model: int, kind: str = "sinusoidal", offset: int = 0, rounding: str = "none"
) -> Float[np.ndarray, "length d_model"]:
    """Return the float64 table of sinusoidal positions (section 3.5).

    Args:
        d_model: Columns; even, except for "sinusoidal_tensor2tensor".
        kind: A value of `TransformerConfig.positions`. Column c of "sinusoidal" has the frequency
            10000**(-2 (c // 2) / d_model), of "sinusoidal_per_column" 10000**(-2 c / d_model);
            even columns are sines, odd columns cosines. "sinusoidal_halves" has the columns of
            "sinusoidal" with all sines first. "sinusoidal_tensor2tensor" has h = d_model // 2
            sines of the frequencies 10000**(-i / (h - 1)), their cosines, and a last column of
            zeros where d_model is odd.
        rounding: A value of `TransformerConfig.position_rounding`.
    """
    position = np.arange(offset, offset + length)[:, None]
    if kind == "sinusoidal_tensor2tensor":
        half = d_model // 2
        angle = position * 10000.0 ** (-np.arange(half) / (half - 1))
        zeros = np.zeros((length, d_model % 2))
        table = np.concatenate([np.sin(angle), np.cos(angle), zeros], axis=1)
    else:
        column = np.arange(d_model)
        exponent = 2 * column if kind == "sinusoidal_per_column" else column - column % 2
        angle = position / 10000.0 ** (exponent / d_model)
        table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    if kind == "sinusoidal_halves":
        table = np.concatenate([table[:, 0::2], table[:, 1::2]], axis=1)
    if rounding != "none":  # of the float32 table, as PyTorch rounds it
        table = table.astype(np.float32).astype(jnp.dtype(rounding)).astype(np.float64)
    return table


def sinusoids_of(
    config: TransformerConfig, length: int, d_model: int
) -> Float[np.ndarray, "length d_model"]:
    """Return the sinusoids that a config adds to vectors of a width."""
    kind, offset, rounding = config.positions, config.position_offset, config.position_rounding
    return sinusoidal_positions(length, d_model, kind, offset, rounding)


def rotary_angles(
    length: int, columns: int, theta: float, scaling: float = 1.0
) -> Float[np.ndarray, "length pairs"]:
    """Return the float64 angle of each position and each pair of columns (Su et al. 2021).

    Args:
        columns: Columns of a head that are rotated; even. Pair c has the frequency
            theta**(-2 c / columns).
        scaling: What positions are divided by (Chen et al. 2023).
    """
    frequencies = theta ** (-np.arange(0, columns, 2) / columns)
    return np.arange(length)[:, None] / scaling * frequencies


def rotate(
    x: Float[Array, "B H L K"], rotation: tuple[Float[Array, "... C"], Float[Array, "... C"]]
) -> Float[Array, "B H L K"]:
    """Return heads whose first 2 C columns are rotated, column c with column c + C.

    Args:
        rotation: Cosines and sines of the angles of each position [L, C], or of the one position
            of each row [B, 1, 1, C].
    """
    cosines, sines = rotation
    half = cosines.shape[-1]
    first, second, rest = (
        part.astype(cosines.dtype) for part in jnp.split(x, [half, 2 * half], -1)
    )
    rotated = first * cosines - second * sines, second * cosines + first * sines, rest
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


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
    """
    if mask is None:
        return x
    limit = math.sqrt(jnp.finfo(x.dtype).max)
    if isinstance(mask, SegmentMask):
        attended = mask.attended(x.shape[1])
    else:
        attended = jnp.any(mask, axis=(1, 2))
    return jnp.where(attended[..., None] | (jnp.abs(x) < limit), x, 0)


def at_last(x: Shaped[Array, "B L *rest"], found: Bool[Array, "B L"]) -> Shaped[Array, "B *rest"]:
    """Return what stands at each row's last position that is found, or at its last one."""
    last = x.shape[1] - 1 - jnp.argmax(found[:, ::-1], axis=1)
    return x[jnp.arange(x.shape[0]), last]


def dot_product_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S U"],
    mask: Bool[Array, "#B #H #T #S"] | None = None,
    dropout: Callable[[Float[Array, "B H T S"]], Float[Array, "B H T S"]] | None = None,
    bias: Float[Array, "#B H T S"] | None = None,
    divisor: float | None = None,
    exponentials: Exponentials = "wide",
    softcap: float | None = None,
) -> Float[Array, "B H T U"]:
    """Return the values averaged by softmax(query keyᵀ / sqrt(head_dim) + bias) (section 3.2.1).

    The softmax runs in at least float32. A query that may attend to nothing gives 0, with finite
    gradients. Keys and values that no query may attend to have no influence, whatever they contain.

    Query head h reads head h // (H / G) of the keys and values: with G = H its own, else one that
    a group shares (Ainslie et al. 2023).

    Args:
        mask: True = attend, broadcastable to [B, H, T, S]; None attends to everything.
        bias: Added to the scores, broadcastable to [B, H, T, S]; None adds nothing.
        divisor: What the scores are divided by, before the bias; None is sqrt(head_dim).
        softcap: Scores s become softcap * tanh(s / softcap) after the division (Gemma 2); None
            leaves them.
    """
    key_heads = key.shape[1]
    if mask is not None:  # their weights are 0, but 0 * NaN would be NaN
        attended = attended_keys(mask, key_heads)  # [B, G, S, 1]
        key, value = jnp.where(attended, key, 0), jnp.where(attended, value, 0)
    scores = jnp.einsum("bgtk,bgsk->bgts", join_queries(query, key_heads), key)
    scores = scores.reshape(*query.shape[:3], key.shape[2])
    divisor = math.sqrt(query.shape[-1]) if divisor is None else divisor
    if divisor != 1:
        scores = scores / divisor
    scores = soft_cap(scores, softcap)
    if bias is not None:
        scores = scores + bias
    weights = masked_softmax(scores, mask, exponentials)
    if dropout is not None:
        weights = dropout(weights)
    heads = jnp.einsum("bgts,bgsk->bgtk", join_queries(weights, key_heads), value)
    return heads.reshape(*query.shape[:3], value.shape[3])
