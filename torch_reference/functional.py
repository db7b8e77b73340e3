"""The maths of the Transformer as pure functions of tensors.

Letters in shapes: B batch, T queries, S keys, L length, D d_model, F d_ff, H heads, G key heads,
K width of a head's queries and keys, U of its values.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from jax_transformer.config.transformer_config import NormKind


def neighbours(x: Float[Tensor, "B L C"], stride: int) -> Float[Tensor, "B M 3*C"]:
    """Return what a convolution of width 3 reads at each position, or at each `stride`-th."""
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
    return padded.unfold(1, 3, stride).flatten(2)


def sinusoidal_positions(
    length: int, d_model: int, kind: str = "sinusoidal", offset: int = 0, rounding: str = "none"
) -> Float[Tensor, "length d_model"]:
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
    position = torch.arange(offset, offset + length, dtype=torch.float64)[:, None]
    if kind == "sinusoidal_tensor2tensor":
        half = d_model // 2
        angle = position * 10000 ** (-torch.arange(half, dtype=torch.float64) / (half - 1))
        zeros = torch.zeros(length, d_model % 2, dtype=torch.float64)
        table = torch.cat([angle.sin(), angle.cos(), zeros], dim=1)
    else:
        even = torch.arange(0, d_model, 2, dtype=torch.float64)
        odd = even
        if kind == "sinusoidal_per_column":
            even, odd = 2 * even, 2 * (even + 1)
        sines = torch.sin(position / 10000 ** (even / d_model))
        cosines = torch.cos(position / 10000 ** (odd / d_model))
        if kind == "sinusoidal_halves":
            table = torch.cat([sines, cosines], dim=1)
        else:
            table = torch.stack([sines, cosines], dim=2).flatten(1)
    return table if rounding == "none" else table.float().to(getattr(torch, rounding)).to(table)


def rotary_angles(
    length: int, columns: int, theta: float, scaling: float = 1.0
) -> Float[Tensor, "length pairs"]:
    """Return the float64 angle of each position and each pair of columns (Su et al. 2021).

    Args:
        columns: Columns of a head that are rotated; even. Pair c has the frequency
            theta**(-2 c / columns).
        scaling: What positions are divided by (Chen et al. 2023).
    """
    position = torch.arange(length, dtype=torch.float64)[:, None] / scaling
    return position * theta ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)


def rotate(
    x: Float[Tensor, "B H L K"], rotation: tuple[Float[Tensor, "L C"], Float[Tensor, "L C"]]
) -> Float[Tensor, "B H L K"]:
    """Return heads whose first 2 C columns are rotated, column c with column c + C.

    Args:
        rotation: Cosines and sines of the angles of each position [L, C].
    """
    cosines, sines = (table.to(x) for table in rotation)
    half = cosines.shape[-1]
    first, second, rest = x.tensor_split([half, 2 * half], dim=-1)
    rotated = first * cosines - second * sines, second * cosines + first * sines, rest
    return torch.cat(rotated, dim=-1)


def soft_cap(x: Float[Tensor, "*shape"], cap: float | None) -> Float[Tensor, "*shape"]:
    """Return numbers below a bound, cap * tanh(x / cap) (Gemma Team 2024); None changes nothing."""
    return x if cap is None else cap * torch.tanh(x / cap)


def relative_position_buckets(
    distance: Int[Tensor, "*shape"], num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, "*shape"]:
    """Return the bucket of each distance between a query and a key (Raffel et al. 2020).

    Args:
        max_distance: The distance from which on all distances share a bucket.
        bidirectional: Whether later keys have half of the buckets, as in an encoder; else they
            all have bucket 0, as in a decoder, whose mask hides them.
    """
    first = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = num_buckets * (distance > 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = exact + (growth * (num_buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


def activation(x: Float[Tensor, "*shape"], kind: str) -> Float[Tensor, "*shape"]:
    """Return the feed-forward nonlinearity `kind`, a value of `TransformerConfig.activation`."""
    if kind == "relu":
        return torch.relu(x)
    if kind == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def norm(
    x: Float[Tensor, "*batch D"],
    scale: Float[Tensor, " D"],
    bias: Float[Tensor, " D"] | None,
    epsilon: float,
    kind: NormKind,
) -> Float[Tensor, "*batch D"]:
    """Return the normed rows, times `scale`, plus `bias`.

    Args:
        kind: As of `jax_transformer.model.norms.norm`.
    """
    if kind == "zero_centered_rms_norm":
        scale, kind = 1 + scale, "rms_norm"
    if kind == "rms_norm":
        y = x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + epsilon)
    else:
        unbiased = kind in ("std_norm", "unbiased_layer_norm")
        centred = x - x.mean(dim=-1, keepdim=True)
        if kind in ("std_norm", "biased_std_norm"):
            y = centred / (x.std(dim=-1, keepdim=True, correction=unbiased) + epsilon)
        else:
            y = centred / torch.sqrt(x.var(dim=-1, keepdim=True, correction=unbiased) + epsilon)
    y = y * scale
    return y if bias is None else y + bias


def split_heads(x: Float[Tensor, "B L D"], num_heads: int) -> Float[Tensor, "B H L K"]:
    """Return the columns of each position split into heads of consecutive columns."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H L K"]) -> Float[Tensor, "B L D"]:
    """Return the heads of each position side by side: the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


def clear_unattended(
    x: Float[Tensor, "B L D"], mask: Bool[Tensor, "#B #H _ #L"] | None
) -> Float[Tensor, "B L D"]:
    """Return `x`, with NaN and very large numbers replaced by 0 at positions no query attends to.

    Such a position is padding: its numbers change no other position's output. But the gradients
    of products multiply them by 0, and 0 * NaN is NaN. A number is very large if its square
    overflows.
    """
    if mask is None:
        return x
    limit = math.sqrt(torch.finfo(x.dtype).max)
    ignored = ~mask.any(dim=2).any(dim=1)[..., None]  # [B, L, 1]
    return x.masked_fill(ignored & ~(x.abs() < limit), 0)


def at_last(
    x: Shaped[Tensor, "B L *rest"], found: Bool[Tensor, "B L"]
) -> Shaped[Tensor, "B *rest"]:
    """Return what stands at each row's last position that is found, or at its last one."""
    last = x.shape[1] - 1 - found.flip(1).int().argmax(dim=1)
    return x[torch.arange(len(x), device=x.device), last]


def dot_product_attention(
    query: Float[Tensor, "B H T K"],
    key: Float[Tensor, "B G S K"],
    value: Float[Tensor, "B G S U"],
    mask: Bool[Tensor, "#B #H #T #S"] | None = None,
    dropout: Callable[[Float[Tensor, "B H T S"]], Float[Tensor, "B H T S"]] | None = None,
    bias: Float[Tensor, "#B H T S"] | None = None,
    divisor: float | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B H T U"]:
    """Return the values averaged by softmax(query keyᵀ / sqrt(head_dim) + bias) (section 3.2.1).

    A masked key has weight 0; a query that may attend to nothing gives 0, with finite gradients.
    Keys and values that no query may attend to have no influence, whatever they contain.

    Query head h reads head h // (H / G) of the keys and values: with G = H its own, else one that
    a group shares (Ainslie et al. 2023).

    Args:
        mask: True = attend, broadcastable to [B, H, T, S]; None attends to everything.
        bias: Added to the scores, broadcastable to [B, H, T, S]; None adds nothing.
        divisor: What the scores are divided by, before the bias; None is sqrt(head_dim).
        softcap: Scores s become softcap * tanh(s / softcap) after the division (Gemma 2); None
            leaves them.
    """
    if key.shape[1] != query.shape[1]:
        shared_by = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared_by, dim=1) for x in (key, value))
    if mask is not None:  # their weights are 0, but 0 * NaN would be NaN
        ignored = ~mask.any(dim=-2)[..., None]  # [B, H, S, 1]
        key, value = key.masked_fill(ignored, 0), value.masked_fill(ignored, 0)
    scores = query @ key.transpose(-2, -1)
    divisor = math.sqrt(query.shape[-1]) if divisor is None else divisor
    if divisor != 1:
        scores = scores / divisor
    scores = soft_cap(scores, softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ value
