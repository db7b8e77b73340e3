"""Decoding: from sources to the target tokens that the model thinks best."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Integer

from jax_transformer import masks
from jax_transformer.checks import check_ids, check_length
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model import Params, SourceMask, decode, encode


class Hypotheses(NamedTuple):
    """The K best targets of each source of a batch, best first.

    Attributes:
        tokens: Ids without the begin [B, K, L]: padding follows the end, and a row that never
            ended has none.
        scores: Sums of the log-probabilities of the tokens, the end included, float32 [B, K].
        lengths: Tokens of each row, the end included [B, K].
    """

    tokens: Int32[Array, "B K L"]
    scores: Float32[Array, "B K"]
    lengths: Int32[Array, "B K"]


def generate(
    params: Params,
    config: TransformerConfig,
    src: Integer[Array | np.ndarray, "B S"],
    *,
    max_new_tokens: int,
    src_mask: SourceMask | None = None,
) -> Hypotheses:
    """Translate a batch greedily: each next token is the likeliest one, the lowest id of a tie.

    One compiled loop that ends when every row has. Works under `jax.jit` with `config` and
    `max_new_tokens` static.

    Args:
        params: Parameters, as from `init_params`.
        config: Their shape.
        src: Source ids [B, S].
        max_new_tokens: Most tokens of a target, the end included: L of the result.
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.

    Returns:
        One hypothesis a source: K = 1.

    Raises:
        InputError: The model has no token embeddings or output projection, `max_new_tokens` or
            the source's length does not fit its position table, or a source id is outside the
            vocabulary.
    """
    check_generates(config)
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens} must be at least 1")
    check_length("src", src.shape[1], config.max_length)
    check_length("max_new_tokens: the target", max_new_tokens, config.max_length)
    if not isinstance(src, jax.core.Tracer):
        check_ids("src", np.asarray(src), config.src_vocab_size)
    if src_mask is not None and src_mask.shape[2] != 1:
        raise InputError(
            f"src_mask of shape {src_mask.shape} must have 1 as its third axis: every query of "
            "a source and of its target sees the same sources"
        )
    return _greedy(params, config, jnp.asarray(src, jnp.int32), max_new_tokens, src_mask)


def check_generates(config: TransformerConfig) -> None:
    """Refuse a model that is a body without token ids going in or logits coming out.

    Raises:
        InputError: The model has no token embeddings or no output projection.
    """
    for name in ("token_embeddings", "output_projection"):
        if getattr(config, name) == "none":
            raise InputError(f"{name}='none': a model needs them to turn text into text")


class _State(NamedTuple):
    step: Int32[Array, ""]
    tokens: Int32[Array, "B L"]
    scores: Float32[Array, " B"]
    lengths: Int32[Array, " B"]
    ended: Bool[Array, " B"]


@partial(jax.jit, static_argnames=("config", "max_new_tokens"))
def _greedy(
    params: Params,
    config: TransformerConfig,
    src: Int32[Array, "B S"],
    max_new_tokens: int,
    src_mask: SourceMask | None,
) -> Hypotheses:
    batch, source_length = src.shape
    src_mask = masks.source_mask(src, config) if src_mask is None else src_mask
    target_length = max_new_tokens
    if config.decoder_attention == "self_over_memory":  # its sources and targets are equally long
        target_length = max(source_length, max_new_tokens)
        added = target_length - source_length
        src = jnp.pad(src, ((0, 0), (0, added)), constant_values=config.pad_id)
        src_mask = jnp.broadcast_to(src_mask, (*src_mask.shape[:3], source_length))
        src_mask = jnp.pad(src_mask, ((0, 0), (0, 0), (0, 0), (0, added)))
    memory = encode(params, config, src, src_mask)

    def unfinished(state: _State) -> Bool[Array, ""]:
        return (state.step < max_new_tokens) & ~jnp.all(state.ended)

    def extend(state: _State) -> _State:
        begin = jnp.full((batch, 1), config.bos_id, src.dtype)
        tgt = jnp.concatenate([begin, state.tokens[:, :-1]], axis=1)
        logits = decode(params, config, tgt, memory, src_mask=src_mask)[:, state.step]
        token = jnp.argmax(logits, axis=-1).astype(src.dtype)
        score = jnp.max(jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1)
        return _State(
            step=state.step + 1,
            tokens=state.tokens.at[:, state.step].set(jnp.where(state.ended, config.pad_id, token)),
            scores=state.scores + jnp.where(state.ended, 0, score),
            lengths=state.lengths + ~state.ended,
            ended=state.ended | (token == config.eos_id),
        )

    start = _State(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.full((batch, target_length), config.pad_id, src.dtype),
        scores=jnp.zeros(batch, jnp.float32),
        lengths=jnp.zeros(batch, jnp.int32),
        ended=jnp.zeros(batch, bool),
    )
    end = jax.lax.while_loop(unfinished, extend, start)
    return Hypotheses(
        tokens=end.tokens[:, None, :max_new_tokens],
        scores=end.scores[:, None],
        lengths=end.lengths[:, None],
    )
