"""Given targets under the model: their log-probability and their attention weights.

Letters in shapes: B batch, S source length, T target length, H heads.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.generation import checked_source
from jax_transformer.model import functional
from jax_transformer.model.checks import check_inputs, check_not_empty, check_rows
from jax_transformer.model.self_over_memory import needs_equal_lengths, pad_source
from jax_transformer.model.transformer import Params, Source, SourceMask, Transformer, apply


def score(
    params: Params,
    config: TransformerConfig,
    src: Source,
    tgt: Integer[Array | np.ndarray, "B T"],
    *,
    src_mask: SourceMask | None = None,
) -> Float32[Array, " B"]:
    """Return the log-probability of each target given its source, in nats, float32 [B].

    The sum of the log-probabilities of its tokens, computed in one pass over the whole target.
    Where `config.decoder_attention` is "self_over_memory", the pass depends on the length of the
    target, so the sum differs from the score of `generate`, which does not know the length.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        src: Source ids [B, S], or sound [B, frames, `config.source_features`].
        tgt: Target ids [B, T] as `generate` returns them: without BOS, with EOS, then padding,
            which does not count.
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.

    Raises:
        InputError: A length does not fit the position table, an id is outside the vocabulary, or
            the model has no token embeddings or output projection.
    """
    src, tgt = _check(params, config, src, tgt, src_mask)
    return _score(params, config, src, tgt, src_mask)


def cross_attention_weights(
    params: Params,
    config: TransformerConfig,
    src: Source,
    tgt: Integer[Array | np.ndarray, "B T"],
    *,
    src_mask: SourceMask | None = None,
) -> Float[Array, "B layers H T S"]:
    """Return the cross-attention weights of each decoder layer and head for each target token.

    The weights [B, layers, H, T, S] are those of the step that predicts token t. They sum to 1
    over the source, or to 0 where the whole source is masked; where `config.decoder_attention` is
    "merged", to the share that targets leave the source.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        src: Source ids [B, S], or sound [B, frames, `config.source_features`].
        tgt: Target ids [B, T], as of `score`.
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.

    Raises:
        InputError: As `score`.
    """
    src, tgt = _check(params, config, src, tgt, src_mask)
    return _weights(params, config, src, tgt, src_mask)


def _check(
    params: Params,
    config: TransformerConfig,
    src: Source,
    tgt: Integer[Array | np.ndarray, "B T"],
    src_mask: SourceMask | None,
) -> tuple[Source, Int32[Array, "B T"]]:
    """Refuse what cannot be scored; return ids as int32."""
    src = checked_source(params, config, src, src_mask)
    check_inputs("tgt", tgt, config.tgt_vocab_size, None, config)
    check_not_empty("tgt", tgt)
    check_rows("tgt", tgt, src.shape[0], "src")
    return src, functional.cast_ids(tgt, config.tgt_vocab_size)


@partial(jax.jit, static_argnames="config")
def _score(
    params: Params,
    config: TransformerConfig,
    src: Source,
    tgt: Int32[Array, "B T"],
    src_mask: SourceMask | None,
) -> Float32[Array, " B"]:
    src, tgt_input, src_mask = _inputs(config, src, tgt, src_mask)
    logits = apply(params, config, src, tgt_input, src_mask)[:, : tgt.shape[1]]
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = functional.pick(logits, tgt) - jax.nn.logsumexp(logits, axis=-1)
    return jnp.sum(scores, axis=-1, where=tgt != config.pad_id).astype(jnp.float32)


@partial(jax.jit, static_argnames="config")
def _weights(
    params: Params,
    config: TransformerConfig,
    src: Source,
    tgt: Int32[Array, "B T"],
    src_mask: SourceMask | None,
) -> Float[Array, "B layers H T S"]:
    source_length = config.positions_of(src.shape[1])
    attention = "self_attention" if config.decoder_attention == "merged" else "cross_attention"
    src, tgt_input, src_mask = _inputs(config, src, tgt, src_mask)
    _, captured = Transformer(config).apply(
        {"params": params},
        src,
        tgt_input,
        src_mask,
        capture_intermediates=lambda module, method: (
            module.path[-2:] == (attention, "dropout") and method == "__call__"
        ),
        mutable="intermediates",
    )
    layers = captured["intermediates"]["decoder"]
    weights = [
        layers[f"layers_{index}"][attention]["dropout"]["__call__"][0]
        for index in range(config.num_decoder_layers)
    ]
    return jnp.stack(weights, axis=1)[:, :, :, : tgt.shape[1], :source_length]


def _inputs(
    config: TransformerConfig,
    src: Source,
    tgt: Int32[Array, "B T"],
    src_mask: SourceMask | None,
) -> tuple[Array, Int32[Array, "B _"], Bool[Array, "#B #H 1 _"]]:
    """Return the source, the decoder's input for the target, and the source mask."""
    bos = jnp.full((tgt.shape[0], 1), config.bos_id, tgt.dtype)
    tgt_input = jnp.concatenate([bos, tgt[:, :-1]], axis=1)
    count = jnp.sum(tgt != config.pad_id, axis=1, keepdims=True)
    # The last token predicts nothing: replace it by padding, so that no position attends to it.
    tgt_input = jnp.where(jnp.arange(tgt_input.shape[1]) < count, tgt_input, config.pad_id)
    src, src_mask = pad_source(config, src, src_mask, tgt.shape[1])
    if needs_equal_lengths(config):
        missing = src.shape[1] - tgt.shape[1]
        tgt_input = jnp.pad(tgt_input, ((0, 0), (0, missing)), constant_values=config.pad_id)
    return src, tgt_input, src_mask
