"""The whole model, and its functional face: init_params, encode, decode, apply, classify.

Letters in shapes: B batch, S source length, T target length, D d_model, M that of the
encoder, V target vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_transformer.config import Stack, TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.kernels.cached_attention import LayerCache, RecurrenceCache, StepPosition
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, CacheLayout, Execution
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask, band_mask
from jax_transformer.kernels.softmax import soft_cap
from jax_transformer.model import checks, functional, masks
from jax_transformer.model.layers import (
    AttentionContext,
    ClassificationHead,
    DecoderLayer,
    Dropout,
    Embedding,
    EncoderLayer,
    Linear,
    Norm,
    OutputProjection,
    PositionEmbedding,
    RelativeAttentionBias,
    rotation_of,
    with_position_bias,
)
from jax_transformer.model.merged_attention import MergedAttentionLayer
from jax_transformer.model.self_over_memory import (
    OverMemoryCache,
    SelfOverMemoryLayer,
    check_equal_lengths,
)
from jax_transformer.model.ssru import SSRULayer
from jax_transformer.model.tree import Params, filled_params
from jax_transformer.runtime.sharding import shard_rows

Source = Int[Array | np.ndarray, "B S"] | Float[Array | np.ndarray, "B _ _"]
Target = Int[Array | np.ndarray, "B T"] | Float[Array | np.ndarray, "B T D"]
SourceMask = Bool[Array | np.ndarray, "#B #H _ #S"] | SegmentMask
TargetMask = Bool[Array | np.ndarray, "#B #H #T #T"] | SegmentMask
SourcePositions = Int[Array | np.ndarray, "B S"]
TargetPositions = Int[Array | np.ndarray, "B T"]
# An entry for each layer.
DecoderCache = tuple[LayerCache | OverMemoryCache | RecurrenceCache, ...]
Mask = Bool[Array, "#B #H _ _"] | SegmentMask | None
DECODER_LAYERS: dict[str, type[DecoderLayer]] = {
    "self_then_cross": DecoderLayer,
    "self_over_memory": SelfOverMemoryLayer,
    "merged": MergedAttentionLayer,
    "ssru_then_cross": SSRULayer,
}


def windowed(
    mask: Mask, window: tuple[int, int] | None, length: int, position: StepPosition | None
) -> Mask:
    """Return a mask that also hides what is outside the window of a query.

    Args:
        window: As `TransformerConfig.window_of`.
        length: Number of positions.
        position: Where a decoding step is, whose mask is one of slots.
    """
    if window is None:
        return mask
    if position is not None:  # slots are a ring: how far back one lies changes in each step
        hypotheses, slots = mask.shape[2:]
        return mask & (position.distances(slots, hypotheses) <= window[0])
    if isinstance(mask, SegmentMask):
        return mask.replace(window=window)
    band = band_mask(length, length, window)
    return band if mask is None else mask & band


def scan_layers(
    layers: Sequence[nn.Module],
    x: Float[Array, "B L D"],
    contexts: Sequence[AttentionContext],
    run: Callable[[Callable, Float[Array, "B L D"], AttentionContext], Float[Array, "B L D"]],
) -> Float[Array, "B L D"]:
    """Return the output of the last layer, computed by one loop over stacked parameters.

    The loop compiles in the time of one layer, which `run` calls on its input and its context.
    Layers may differ in their parameters only.
    """
    if any(context is not contexts[0] for context in contexts):
        raise InputError(
            "scan_layers=True needs layers that are alike, but sliding_window_pattern="
            f"{layers[0].config.sliding_window_pattern} gives only some a window; use "
            "scan_layers=False"
        )
    params = [layer.variables["params"] for layer in layers]
    if len({str(jax.tree.map(jnp.shape, own)) for own in params}) > 1:
        raise InputError(
            "scan_layers=True needs an adapter of the same targets and rank in every layer"
        )
    dropping = layers[0].has_rng("dropout")
    keys = [{"dropout": layer.make_rng("dropout")} if dropping else {} for layer in layers]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(params, keys, strict=True))
    any_layer = layers[0].clone(parent=None)

    def run_one(x: Float[Array, "B L D"], own: tuple) -> tuple[Float[Array, "B L D"], None]:
        params, keys = own
        layer = partial(any_layer.apply, {"params": params}, rngs=keys)
        return shard_rows(run(layer, x, contexts[0])), None

    return jax.lax.scan(run_one, x, stacked)[0]


class LayerStack(nn.Module):
    """What the encoder and the decoder have in common: layers, and what all of them share."""

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION
    stack: ClassVar[Stack]

    def setup(self) -> None:
        """Declare the layers, a table of relative biases, a final norm and its dropout."""
        config, execution = self.config, self.execution
        if self.stack == "encoder":
            layer, has_norm = EncoderLayer, config.final_norm
        else:
            layer = DECODER_LAYERS[config.decoder_attention]
            has_norm = config.decoder_has_final_norm
        if execution.remat != "none":
            keep_products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            layer = nn.remat(layer, policy=keep_products if execution.remat == "dots" else None)
        count = getattr(config, f"num_{self.stack}_layers")
        self.layers = [layer(config, execution) for _ in range(count)]
        if config.has_shared_relative_bias:
            bidirectional = self.stack == "encoder"
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional)
        self.norm = Norm(config, execution.norm) if has_norm else None
        rate = config.dropout if config.final_dropout else 0.0
        self.dropout = Dropout(rate, execution.dropout_mask)

    def contexts(
        self, x: Float[Array, "B L D"], mask: Mask, position: StepPosition | None = None
    ) -> list[AttentionContext]:
        """Return the context of each layer's self-attention; layers that are alike share one.

        Args:
            mask: What all layers have in common.
            position: Where a decoding step is.
        """
        shared, length, rows = AttentionContext(mask, position=position), x.shape[1], None
        if self.config.has_shared_relative_bias:
            shared = with_position_bias(shared, self.relative_attention_bias, length)
        if position is not None:
            length, rows = mask.shape[3] // mask.shape[2], position.rows
        windows = [self.config.window_of(self.stack, n) for n in range(len(self.layers))]
        by_window = {
            window: shared._replace(
                mask=windowed(mask, window, length, position),
                rotation=rotation_of(self.config, window, length, x.dtype, rows),
            )
            for window in dict.fromkeys(windows)
        }
        return [by_window[window] for window in windows]

    def finish(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Return what leaves the stack: the last layer's output, normed where the config says."""
        return self.dropout(x if self.norm is None else self.norm(x))


class Encoder(LayerStack):
    """The stack of encoder layers, with a final norm where the config has one."""

    stack: ClassVar[Stack] = "encoder"

    def __call__(
        self,
        x: Float[Array, "B S D"],
        src_mask: Bool[Array, "#B #H #S #S"] | SegmentMask | None = None,
    ) -> Float[Array, "B S D"]:
        """Return the memory of embedded sources."""
        x = functional.clear_unattended(x, src_mask)
        contexts = self.contexts(x, src_mask)
        if self.execution.scan_layers:
            x = scan_layers(self.layers, x, contexts, lambda layer, x, context: layer(x, context))
        else:
            for layer, context in zip(self.layers, contexts, strict=True):
                x = shard_rows(layer(x, context))
        return self.finish(x)


class Decoder(LayerStack):
    """The stack of decoder layers, with a final norm where the config has one."""

    stack: ClassVar[Stack] = "decoder"

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S M"] | None,
        tgt_mask: Bool[Array, "#B #H _ _"] | SegmentMask | None = None,
        src_mask: Bool[Array, "#B #H #T #S"] | SegmentMask | None = None,
        cache: DecoderCache | None = None,
        position: StepPosition | None = None,
    ) -> tuple[Float[Array, "B T D"], DecoderCache | None]:
        """Return the hidden states of embedded targets, and the cache with them written.

        Args:
            memory: What the encoder returned; None with a cache.
            tgt_mask: Which target attends to which, or in a decoding step, which hypothesis to
                which slot of the cache, this position's included.
            cache: An entry for each layer; None where all positions are computed.
            position: Where a decoding step is, whose `x` has one position of N hypotheses.
        """
        if cache is None:
            x = functional.clear_unattended(x, tgt_mask)
            memory = functional.clear_unattended(memory, src_mask)
        contexts = self.contexts(x, tgt_mask, position)
        if cache is None and self.execution.scan_layers:
            x = scan_layers(
                self.layers,
                x,
                contexts,
                lambda layer, x, context: layer(x, memory, context, src_mask)[0],
            )
            return self.finish(x), None
        written = []
        for number, (layer, context) in enumerate(zip(self.layers, contexts, strict=True)):
            kept = None if cache is None else cache[number]
            x, kept = layer(x, memory, context, src_mask, kept)
            x = shard_rows(x)
            written.append(kept)
        return self.finish(x), None if cache is None else tuple(written)

    def init_cache(
        self,
        memory: Float[Array, "B S M"],
        src_mask: SourceMask | None,
        hypotheses: int,
        slots: int,
        layout: CacheLayout,
    ) -> DecoderCache:
        """Return what each layer keeps before the first token.

        Args:
            hypotheses: Those of a source.
            slots: Target positions times hypotheses.
            layout: How the arrays lie, as `SearchExecution.cache`.
        """
        memory = functional.clear_unattended(memory, src_mask)
        return tuple(layer.init_cache(memory, hypotheses, slots, layout) for layer in self.layers)


class Transformer(nn.Module):
    """Embeddings, encoder, decoder and output projection (Vaswani et al. 2017, figure 1).

    Masks that are not given come from `masks.source_mask` and `masks.target_mask`, as in the
    functions `encode`, `decode` and `apply` and in `torch_reference.Transformer`.

    Attributes:
        config: The shape of the model.
        execution: How the model is executed; the default suits a CPU.
    """

    config: TransformerConfig
    execution: Execution = DEFAULT_EXECUTION

    def setup(self) -> None:
        """Declare the parts; a shared table is one part with one name."""
        config, of_encoder = self.config, self.config.stack("encoder")
        if config.token_embeddings == "shared":
            self.token_embedding = Embedding(config)
        elif config.token_embeddings == "separate":
            self.source_embedding = Embedding(of_encoder)
            self.target_embedding = Embedding(config)
        if config.source_features is not None:
            self.source_convolution_1 = Linear(of_encoder, self.execution)
            self.source_convolution_2 = Linear(of_encoder, self.execution)
        if config.positions == "learned":
            self.source_positions = PositionEmbedding(of_encoder)
            self.target_positions = PositionEmbedding(config)
        if config.embedding_norm:
            self.source_embedding_norm = Norm(of_encoder, self.execution.norm)
            self.target_embedding_norm = Norm(config, self.execution.norm)
        source_rate = config.dropout if config.embedding_dropout == "both" else 0.0
        target_rate = config.dropout if config.embedding_dropout != "none" else 0.0
        self.source_dropout = Dropout(source_rate, self.execution.dropout_mask)
        self.target_dropout = Dropout(target_rate, self.execution.dropout_mask)
        self.encoder = Encoder(of_encoder, self.execution)
        self.decoder = Decoder(config, self.execution)
        if config.output_projection != "none":
            self.output_projection = OutputProjection(config, self.execution)
        if config.head != "none":
            self.head = ClassificationHead(config, self.execution)

    def encode(
        self,
        src: Source,
        src_mask: SourceMask | None = None,
        *,
        src_positions: SourcePositions | None = None,
    ) -> Float[Array, "B S D"]:
        """Return the memory [B, S, D]; see the function `encode`."""
        if src_mask is None:
            src_mask = masks.source_mask(src, self.config)
        length = self.config.positions_of(src.shape[1])
        src_mask = self._readable(src_mask, length, length)
        x = self._stack_input(src, "source", src_mask, src_positions)
        return self.encoder(x, src_mask)

    def decode(
        self,
        tgt: Target,
        memory: Float[Array, "B S M"],
        tgt_mask: TargetMask | None = None,
        src_mask: SourceMask | None = None,
        *,
        tgt_positions: TargetPositions | None = None,
    ) -> Float[Array, "B T V"]:
        """Return the logits [B, T, V]; see the function `decode`."""
        if tgt_mask is None:
            tgt_mask = masks.target_mask(tgt, self.config)
        tgt_mask = self._readable(tgt_mask, tgt.shape[1], tgt.shape[1])
        src_mask = self._readable(src_mask, tgt.shape[1], memory.shape[1])
        x = self._stack_input(tgt, "target", tgt_mask, tgt_positions)
        x, _ = self.decoder(x, memory, tgt_mask, src_mask)
        return self.project(x)

    def __call__(
        self,
        src: Source,
        tgt: Target,
        src_mask: SourceMask | None = None,
        tgt_mask: TargetMask | None = None,
        *,
        src_positions: SourcePositions | None = None,
        tgt_positions: TargetPositions | None = None,
    ) -> Float[Array, "B T V"]:
        """Return the logits [B, T, V]; see the function `apply`."""
        if src_mask is None:
            src_mask = masks.source_mask(src, self.config)
        memory = self.encode(src, src_mask, src_positions=src_positions)
        return self.decode(tgt, memory, tgt_mask, src_mask, tgt_positions=tgt_positions)

    def classify(
        self, src: Source, src_mask: SourceMask | None = None
    ) -> Float[Array, "B labels"] | Float[Array, "B S labels"]:
        """Return the scores of the labels; see the function `classify`."""
        config = self.config
        if config.head == "token":
            return self.head(self.encode(src, src_mask))
        start = jnp.full_like(src[:, 0], config.bos_id)
        if config.head_start == "last_token":
            start = functional.at_last(src, src != config.pad_id)
        tgt = jnp.concatenate([start[:, None], src[:, :-1]], axis=1)
        # As in transformers: nothing that is read comes after padding at the end.
        x = self(src, tgt, src_mask, SegmentMask(None, causal=True))
        is_end = src == config.eos_id
        x = functional.at_last(x, is_end)
        return self.head(jnp.where(jnp.any(is_end, axis=1, keepdims=True), x, jnp.nan))

    def step(
        self,
        tokens: Int[Array, "B N"] | Float[Array, "B N D"],
        cache: DecoderCache,
        position: StepPosition,
        tgt_mask: Bool[Array, "B 1 N slots"],
        src_mask: SourceMask | None,
    ) -> tuple[Float[Array, "B N V"], DecoderCache]:
        """Return the logits after one more position, and the cache with that position written.

        Args:
            position: Where each row is; past the last slot its logits are NaN.
        """
        length = tgt_mask.shape[-1] // tokens.shape[1]
        x = self._stack_input(tokens, "target", None, position.rows[:, None], length)
        x, cache = self.decoder(x, None, tgt_mask, src_mask, cache, position)
        x = jnp.where(position.rows[:, None, None] < length, x, jnp.nan)
        return self.project(x), cache

    def embed(self, tokens: Source, side: Literal["source", "target"]) -> Float[Array, "B S D"]:
        """Return the vectors [B, S, D] of tokens or of sound, without positions."""
        if side == "source" and self.config.source_features is not None:
            return shard_rows(self._convolve(jnp.asarray(tokens)))
        table, tokens = self._table(side), jnp.asarray(tokens)
        x = tokens if table is None else table(tokens)
        if side == "target" and self.config.start_embedding == "zero":
            x = jnp.where((tokens == self.config.bos_id)[..., None], 0, x)
        return shard_rows(x.astype(self.execution.compute_dtype or x.dtype))

    def _convolve(self, x: Float[Array, "B frames _"]) -> Float[Array, "B S D"]:
        x = x.astype(self.execution.compute_dtype or x.dtype)
        x = functional.activation(self.source_convolution_1(functional.neighbours(x, 1)), "gelu")
        return functional.activation(self.source_convolution_2(functional.neighbours(x, 2)), "gelu")

    def project(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits of hidden states, or these where there is no output projection."""
        if self.config.output_projection == "none":
            return x
        if self.config.output_scale == "inverse_sqrt_d_model":
            x = x * self.config.d_model**-0.5
        tied = self.config.output_projection == "tied"
        logits = self.output_projection(x, self._table("target").embedding if tied else None)
        return soft_cap(logits, self.config.logit_softcap)

    def _readable(self, mask: Mask, queries: int, keys: int) -> Mask:
        """Return a mask as attention reads it: without fused kernels, one array for all layers."""
        return as_boolean_mask(mask, queries, keys) if self.execution.attention == "plain" else mask

    def _stack_input(
        self,
        tokens: Source,
        side: Literal["source", "target"],
        mask: Mask,
        positions: Int[Array | np.ndarray, "#B #L"] | None = None,
        length: int | None = None,
    ) -> Float[Array, "B L D"]:
        """Return what enters a stack: embedded tokens with positions, normed where the config says.

        Args:
            mask: Of the stack's self-attention; a norm reads no position that nothing attends to.
            positions: As of `add_positions`; `length` too.
        """
        x = self.add_positions(self.embed(tokens, side), side, positions, length)
        if self.config.embedding_norm:
            norm = self.source_embedding_norm if side == "source" else self.target_embedding_norm
            x = norm(functional.clear_unattended(x, mask))
        return self.source_dropout(x) if side == "source" else self.target_dropout(x)

    def _table(self, side: Literal["source", "target"]) -> Embedding | None:
        if self.config.token_embeddings == "none":
            return None
        if self.config.token_embeddings == "shared":
            return self.token_embedding
        return self.source_embedding if side == "source" else self.target_embedding

    def add_positions(
        self,
        x: Float[Array, "B L D"],
        side: Literal["source", "target"],
        positions: Int[Array | np.ndarray, "#B #L"] | None = None,
        length: int | None = None,
    ) -> Float[Array, "B L D"]:
        """Return vectors plus their rows of the position table.

        Args:
            positions: Position of each vector, broadcastable to [B, L]; None is 0 to L - 1. A
                position outside the table gives NaN.
            length: Rows of the table; None is all of them, or L without `positions`.
        """
        config = self.config.stack("encoder" if side == "source" else "decoder")
        if not config.has_position_table:
            return x
        if positions is None and is_symbolic_dim(x.shape[1]):  # of a length that is not known
            positions = jnp.arange(x.shape[1])[None]
        if length is None:
            length = x.shape[1] if positions is None else config.max_length
        elif is_symbolic_dim(length):
            length = config.max_length
        if config.positions == "learned":
            learned = self.source_positions if side == "source" else self.target_positions
            table = learned(length).astype(x.dtype)
        else:
            table = jnp.asarray(functional.sinusoids_of(config, length, x.shape[-1]), x.dtype)
        return x + (table if positions is None else functional.embed(positions, table))


def init_params(key: PRNGKeyArray, config: TransformerConfig) -> Params:
    """Return freshly drawn float32 parameters as a plain nested dict of arrays.

    Args:
        key: Random key; the same key gives the same parameters, and a parameter depends on the key,
            its path and its shape alone.
        config: The shape of the model; `config.initialization` names the scheme and its source.

    Raises:
        InputError: `key` is not a random key, or this machine's memory cannot hold the parameters.
    """
    checks.check_key("key", key)
    checks.check_config(config)
    checks.check_parameters(config, key)
    return filled_params(key, {}, config)


def encode(
    params: Params,
    config: TransformerConfig,
    src: Source,
    src_mask: SourceMask | None = None,
    *,
    src_positions: SourcePositions | None = None,
    dropout_key: PRNGKeyArray | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> Float[Array, "B S D"]:
    """Return the memory of the sources [B, S, D] (section 3.1).

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        src: Source ids [B, S]; vectors [B, S, D] where `config.token_embeddings` is "none"; sound
            [B, frames, `config.source_features`], of which S positions are made.
        src_mask: True = attend, broadcastable to [B, heads, S, S]; None hides `config.pad_id`
            (nothing, where the sources are vectors).
        src_positions: Position of each token in its sentence [B, S]; None is 0 to S - 1. Under
            `jit`, one outside the position table gives NaN. Relative and rotary positions do not
            read it: the distance of two tokens is that of their places in the row.
        dropout_key: Random key that switches dropout on.
        execution: How the model is executed.

    Raises:
        InputError: An argument has another type (dtype or shape) than this, or a source is longer
            than the position table; under `jit` too. Where ids and positions are concrete (not
            traced), one is outside the vocabulary or the table; under `jit` it gives NaN.
    """
    checks.check_params(params, config, "encode")
    checks.check_source(config, src, src_mask, src_positions)
    src, src_mask, src_positions = as_jax((src, src_mask, src_positions))
    model = bind(params, config, execution, dropout_key)
    return model.encode(src, src_mask, src_positions=src_positions)


def decode(
    params: Params,
    config: TransformerConfig,
    tgt: Target,
    memory: Float[Array, "B S M"],
    tgt_mask: TargetMask | None = None,
    src_mask: SourceMask | None = None,
    *,
    tgt_positions: TargetPositions | None = None,
    dropout_key: PRNGKeyArray | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> Float[Array, "B T V"]:
    """Return the logits of each target position's successor [B, T, V] (section 3.1).

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        tgt: Target ids [B, T]; vectors [B, T, D] where `config.token_embeddings` is "none".
        memory: What `encode` returned [B, S, M].
        tgt_mask: True = attend, broadcastable to [B, heads, T, T]; None hides later positions
            and `config.pad_id`.
        src_mask: True = attend, broadcastable to [B, heads, T, S]; None attends to the whole
            memory: decode does not see the source ids, so it cannot find their padding.
        tgt_positions: Position of each token in its sentence [B, T], as `src_positions` of
            `encode`.
        dropout_key: Random key that switches dropout on.
        execution: How the model is executed.

    Returns:
        Logits [B, T, V], or hidden states [B, T, D] where `config.output_projection` is "none".

    Raises:
        InputError: As `encode`; or targets and memory do not belong together.
    """
    checks.check_params(params, config, "decode")
    checks.check_target(config, tgt, tgt_mask, tgt_positions)
    checks.check_memory(config, memory, src_mask, tgt)
    check_equal_lengths(config, tgt.shape[1], memory.shape[1])
    model = bind(params, config, execution, dropout_key)
    tgt, memory, tgt_mask, src_mask = as_jax((tgt, memory, tgt_mask, src_mask))
    return model.decode(tgt, memory, tgt_mask, src_mask, tgt_positions=as_jax(tgt_positions))


def apply(
    params: Params,
    config: TransformerConfig,
    src: Source,
    tgt: Target,
    src_mask: SourceMask | None = None,
    tgt_mask: TargetMask | None = None,
    *,
    src_positions: SourcePositions | None = None,
    tgt_positions: TargetPositions | None = None,
    dropout_key: PRNGKeyArray | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> Float[Array, "B T V"]:
    """Return the logits of each target position's successor [B, T, V] (figure 1).

    Equal to `decode(..., tgt, encode(..., src), ...)` with one mask for the source.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        src: Source ids [B, S]; vectors [B, S, D] where `config.token_embeddings` is "none"; sound
            [B, frames, `config.source_features`], of which S positions are made.
        tgt: Target ids [B, T], BOS first; or vectors [B, T, D].
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.
        tgt_mask: True = attend, broadcastable to [B, heads, T, T]; None hides later positions
            and `config.pad_id`.
        src_positions: Position of each source token in its sentence [B, S], as of `encode`.
        tgt_positions: Position of each target token in its sentence [B, T], as of `encode`.
        dropout_key: Random key that switches dropout on.
        execution: How the model is executed; the default suits a CPU.

    Returns:
        Logits [B, T, V], or hidden states [B, T, D] where `config.output_projection` is "none".

    Raises:
        InputError: As `encode` and `decode`.
    """
    checks.check_params(params, config)
    checks.check_target(config, tgt, tgt_mask, tgt_positions)
    checks.check_source(config, src, src_mask, src_positions, tgt)
    check_equal_lengths(config, tgt.shape[1], src.shape[1])
    model = bind(params, config, execution, dropout_key)
    src, tgt, src_mask, tgt_mask = as_jax((src, tgt, src_mask, tgt_mask))
    return model(
        src,
        tgt,
        src_mask,
        tgt_mask,
        src_positions=as_jax(src_positions),
        tgt_positions=as_jax(tgt_positions),
    )


def classify(
    params: Params,
    config: TransformerConfig,
    src: Source,
    src_mask: SourceMask | None = None,
    *,
    dropout_key: PRNGKeyArray | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> Float[Array, "B labels"] | Float[Array, "B S labels"]:
    """Return the scores of `config.labels`, which `config.head` computes.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of a model with a head.
        src: Source ids [B, S], each row with its EOS; vectors [B, S, D] where
            `config.token_embeddings` is "none".
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.
        dropout_key: Random key that switches dropout on.
        execution: How the model is executed.

    Returns:
        Scores [B, labels] of each source where `config.head` is "sequence", NaN of a source
        without EOS; [B, S, labels] of each token where it is "token".

    Raises:
        InputError: The config has no head; else as `encode`.
    """
    checks.check_params(params, config)
    if config.head == "none":
        raise InputError("head='none' scores no labels; config.with_head has a head")
    checks.check_source(config, src, src_mask, None)
    src, src_mask = as_jax((src, src_mask))
    return bind(params, config, execution, dropout_key).classify(src, src_mask)


def bind(
    params: Params,
    config: TransformerConfig,
    execution: Execution,
    dropout_key: PRNGKeyArray | None = None,
) -> Transformer:
    """Return the module with these parameters, whose methods can be called."""
    checks.check_execution(execution)
    rngs = {}
    if dropout_key is not None:
        checks.check_key("dropout_key", dropout_key)
        rngs = {"dropout": dropout_key}
    return Transformer(config, execution).bind({"params": as_jax(params)}, rngs=rngs)


def as_jax(tree: Any) -> Any:
    """Return a tree whose arrays of numpy are arrays of jax."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)
