"""The whole model in torch, named as in `jax_transformer.model.transformer`.

Letters in shapes: B batch, S source length, T target length, D d_model, M that of the
encoder, V target vocabulary.
"""

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import Stack, TransformerConfig
from jax_transformer.config.lengths import axis_length
from torch_reference import functional, masks
from torch_reference.layers import (
    AttentionContext,
    ClassificationHead,
    DecoderLayer,
    Embedding,
    EncoderLayer,
    LayerCache,
    Linear,
    Norm,
    OutputProjection,
    PositionEmbedding,
    RelativeAttentionBias,
    cached_length,
    rotation_of,
)
from torch_reference.merged_attention import MergedAttentionLayer
from torch_reference.self_over_memory import SelfOverMemoryLayer
from torch_reference.ssru import SSRULayer

Source = Int[Tensor, "B S"] | Float[Tensor, "B _ _"]
Target = Int[Tensor, "B T"] | Float[Tensor, "B T D"]
SourceMask = Bool[Tensor, "#B #H _ #S"]
TargetMask = Bool[Tensor, "#B #H #T #T"]
DecoderCache = list[LayerCache]  # an entry for each layer
DECODER_LAYERS: dict[str, type[DecoderLayer]] = {
    "self_then_cross": DecoderLayer,
    "self_over_memory": SelfOverMemoryLayer,
    "merged": MergedAttentionLayer,
    "ssru_then_cross": SSRULayer,
}


def windowed(
    mask: Bool[Tensor, "#B #H #T #L"] | None,
    window: tuple[int, int] | None,
    queries: int,
    length: int,
) -> Bool[Tensor, "#B #H #T #L"] | None:
    """Return a mask that also hides what is outside the window of a query.

    Args:
        window: As `TransformerConfig.window_of`.
        queries: How many of the last positions are queries.
        length: Number of positions.
    """
    if window is None:
        return mask
    band = masks.band_mask(length, *window)[:, :, length - queries :]
    return band if mask is None else mask & band.to(mask.device)


class LayerStack(nn.Module):
    """What the encoder and the decoder have in common: layers, and what all of them share."""

    stack: ClassVar[Stack]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        if self.stack == "encoder":
            layer, has_norm = EncoderLayer, config.final_norm
        else:
            layer = DECODER_LAYERS[config.decoder_attention]
            has_norm = config.decoder_has_final_norm
        count = getattr(config, f"num_{self.stack}_layers")
        self.layers = nn.ModuleList(layer(config) for _ in range(count))
        if config.has_shared_relative_bias:
            bidirectional = self.stack == "encoder"
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional)
        self.norm = Norm(config) if has_norm else None
        self.dropout = nn.Dropout(config.dropout if config.final_dropout else 0.0)

    def contexts(
        self, x: Float[Tensor, "B T D"], mask: Bool[Tensor, "#B #H #T #L"] | None, length: int
    ) -> list[AttentionContext]:
        """Return the context of each layer's self-attention; layers that are alike share one.

        Args:
            mask: What all layers have in common.
            length: Number of positions, of which `x` has the last.
        """
        shared, queries = AttentionContext(mask), x.shape[1]
        if self.config.has_shared_relative_bias:
            bias = self.relative_attention_bias(queries, length)
            shared = shared._replace(position_bias=bias)
        windows = [self.config.window_of(self.stack, n) for n in range(len(self.layers))]
        by_window = {
            window: shared._replace(
                mask=windowed(mask, window, queries, length),
                rotation=rotation_of(self.config, window, length, queries),
            )
            for window in dict.fromkeys(windows)
        }
        return [by_window[window] for window in windows]

    def finish(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Return what leaves the stack: the last layer's output, normed where the config says."""
        return self.dropout(x if self.norm is None else self.norm(x))


class Encoder(LayerStack):
    """The stack of encoder layers, with a final norm where the config has one."""

    stack: ClassVar[Stack] = "encoder"

    def forward(
        self, x: Float[Tensor, "B S D"], src_mask: Bool[Tensor, "#B #H #S #S"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Return the memory of embedded sources."""
        x = functional.clear_unattended(x, src_mask)
        contexts = self.contexts(x, src_mask, x.shape[1])
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, context)
        return self.finish(x)


class Decoder(LayerStack):
    """The stack of decoder layers, with a final norm where the config has one."""

    stack: ClassVar[Stack] = "decoder"

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S M"] | None,
        tgt_mask: Bool[Tensor, "#B #H #T #T"] | None = None,
        src_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
        cache: DecoderCache | None = None,
    ) -> tuple[Float[Tensor, "B T D"], DecoderCache | None]:
        """Return the hidden states of embedded targets, and the cache with them written.

        Args:
            memory: What the encoder returned; None with a cache.
            cache: An entry for each layer, of the targets before `x`; None where there are none.
        """
        length = x.shape[1]
        if cache is None:
            x = functional.clear_unattended(x, tgt_mask)
            memory = functional.clear_unattended(memory, src_mask)
        else:
            length = length + cached_length(cache[0])
        contexts = self.contexts(x, tgt_mask, length)
        written = []
        for number, (layer, context) in enumerate(zip(self.layers, contexts, strict=True)):
            kept = None if cache is None else cache[number]
            x, kept = layer(x, memory, context, src_mask, kept)
            written.append(kept)
        return self.finish(x), None if cache is None else written

    def init_cache(
        self, memory: Float[Tensor, "B S M"], src_mask: SourceMask | None
    ) -> DecoderCache:
        """Return what each layer keeps before the first token."""
        memory = functional.clear_unattended(memory, src_mask)
        return [layer.init_cache(memory) for layer in self.layers]


class Transformer(nn.Module):
    """Embeddings, encoder, decoder and output projection (figure 1).

    Dropout follows `train()` and `eval()`. Parameters are drawn as torch draws them; weights of
    the JAX model come through `jax_transformer.convert.to_torch`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, of_encoder = config, config.stack("encoder")
        if config.token_embeddings == "shared":
            self.token_embedding = Embedding(config, config.src_vocab_size)
        elif config.source_features is not None:
            channels = (axis_length(of_encoder, f"{n}_by_width") for n in ("features", "d_model"))
            first, second = (Linear(count, of_encoder.d_model, bias=True) for count in channels)
            self.source_convolution_1, self.source_convolution_2 = first, second
        elif config.token_embeddings == "separate":
            self.source_embedding = Embedding(of_encoder, config.src_vocab_size)
        if config.positions == "learned":
            self.source_positions = PositionEmbedding(of_encoder)
        if config.embedding_norm:
            self.source_embedding_norm = Norm(of_encoder)
        source_rate = config.dropout if config.embedding_dropout == "both" else 0.0
        self.source_dropout = nn.Dropout(source_rate)
        self.encoder = Encoder(of_encoder)
        if config.num_decoder_layers:
            self._add_target_side()
        if config.head != "none":
            self.head = ClassificationHead(config)

    def _add_target_side(self) -> None:
        """Declare what an encoder alone has not."""
        config = self.config
        if config.token_embeddings == "separate":
            self.target_embedding = Embedding(config, config.tgt_vocab_size)
        if config.positions == "learned":
            self.target_positions = PositionEmbedding(config)
        if config.embedding_norm:
            self.target_embedding_norm = Norm(config)
        target_rate = config.dropout if config.embedding_dropout != "none" else 0.0
        self.target_dropout = nn.Dropout(target_rate)
        self.decoder = Decoder(config)
        if config.output_projection != "none":
            self.output_projection = OutputProjection(config)

    def encode(self, src: Source, src_mask: SourceMask | None = None) -> Float[Tensor, "B S D"]:
        """Return the memory of the sources [B, S, D]; arguments as `jax_transformer.encode`."""
        if src_mask is None:
            src_mask = masks.source_mask(src, self.config)
        return self.encoder(self._stack_input(src, "source", src_mask), src_mask)

    def decode(
        self,
        tgt: Target,
        memory: Float[Tensor, "B S M"],
        tgt_mask: TargetMask | None = None,
        src_mask: SourceMask | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits of each target position's successor [B, T, V].

        Arguments and result as `jax_transformer.decode`.
        """
        if tgt_mask is None:
            tgt_mask = masks.target_mask(tgt, self.config)
        x = self._stack_input(tgt, "target", tgt_mask)
        x, _ = self.decoder(x, memory, tgt_mask, src_mask)
        return self.project(x)

    def forward(
        self,
        src: Source,
        tgt: Target,
        src_mask: SourceMask | None = None,
        tgt_mask: TargetMask | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits [B, T, V]; masks as in `encode` and `decode`, one for the source."""
        if src_mask is None:
            src_mask = masks.source_mask(src, self.config)
        return self.decode(tgt, self.encode(src, src_mask), tgt_mask, src_mask)

    def classify(
        self, src: Source, src_mask: SourceMask | None = None
    ) -> Float[Tensor, "B labels"] | Float[Tensor, "B S labels"]:
        """Return the scores of the labels; arguments and result as `jax_transformer.classify`."""
        config = self.config
        if config.head == "token":
            return self.head(self.encode(src, src_mask))
        start = torch.full_like(src[:, 0], config.bos_id)
        if config.head_start == "last_token":
            start = functional.at_last(src, src != config.pad_id)
        tgt = torch.cat([start[:, None], src[:, :-1]], dim=1)
        x = self(src, tgt, src_mask, masks.causal_mask(tgt.shape[1]).to(tgt.device))
        is_end = src == config.eos_id
        x = functional.at_last(x, is_end)
        return self.head(x.masked_fill(~is_end.any(dim=1, keepdim=True), torch.nan))

    def embed(self, tokens: Source, side: Literal["source", "target"]) -> Float[Tensor, "B S D"]:
        """Return the vectors [B, S, D] of tokens or of sound, without positions."""
        if side == "source" and self.config.source_features is not None:
            return self._convolve(tokens)
        table = self._table(side)
        x = tokens if table is None else table(tokens)
        if side == "target" and self.config.start_embedding == "zero":
            x = x.masked_fill((tokens == self.config.bos_id)[..., None], 0)
        return x

    def _convolve(self, x: Float[Tensor, "B frames _"]) -> Float[Tensor, "B S D"]:
        x = x.to(self.source_convolution_1.weight)
        x = functional.activation(self.source_convolution_1(functional.neighbours(x, 1)), "gelu")
        return functional.activation(self.source_convolution_2(functional.neighbours(x, 2)), "gelu")

    def project(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Return the logits of hidden states, or these where there is no output projection."""
        if self.config.output_projection == "none":
            return x
        if self.config.output_scale == "inverse_sqrt_d_model":
            x = x * self.config.d_model**-0.5
        table = self._table("target")
        logits = self.output_projection(x, table.weight if table else None)
        return functional.soft_cap(logits, self.config.logit_softcap)

    def step(
        self, tokens: Int[Tensor, " B"], cache: DecoderCache, src_mask: SourceMask | None
    ) -> tuple[Float[Tensor, "B V"], DecoderCache]:
        """Return the logits after one more token of each target, and the cache with it written."""
        x = self._stack_input(tokens[:, None], "target", None, cached_length(cache[0]))
        x, cache = self.decoder(x, None, None, src_mask, cache)
        return self.project(x)[:, 0], cache

    def add_positions(
        self, x: Float[Tensor, "B L D"], side: Literal["source", "target"], first: int = 0
    ) -> Float[Tensor, "B L D"]:
        """Return vectors plus their rows of the position table, a side's own if learned.

        Args:
            first: Position of the first vector.
        """
        config, length = self.config, first + x.shape[1]
        if not config.has_position_table:
            return x
        if config.positions == "learned":
            learned = self.source_positions if side == "source" else self.target_positions
            table = learned(length)
        else:
            table = functional.sinusoidal_positions(
                length,
                x.shape[2],
                config.positions,
                config.position_offset,
                config.position_rounding,
            )
        # Past the table there is no row, which is an error; `[-1:]` would be the last one.
        return x + table[first:].to(x)

    def _stack_input(
        self,
        tokens: Source,
        side: Literal["source", "target"],
        mask: Bool[Tensor, "#B #H _ #L"] | None,
        first: int = 0,
    ) -> Float[Tensor, "B L D"]:
        """Return what enters a stack: embedded tokens with positions, normed where the config says.

        Args:
            mask: Of the stack's self-attention; a norm reads no position that nothing attends to.
            first: Position of the first token.
        """
        x = self.add_positions(self.embed(tokens, side), side, first)
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
